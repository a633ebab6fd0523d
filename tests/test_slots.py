"""kvquant.slots, block tables and positions to cache rows, and the cache layouts of engines."""

import runpy
from pathlib import Path

import kvquant
import numpy as np
import pytest


def plain(table, positions, size):
    """The rule, token by token, in Python integers."""
    rows = table if table.ndim == 2 else [table] * 1
    found = []
    for row, of_row in zip(rows, positions.reshape(len(rows), -1)):
        for position in of_row.tolist():
            block = int(row[position // size])
            found.append(-1 if block == -1 else block * size + position % size)
    return found


@pytest.mark.parametrize("table_type", [np.int32, np.int64])
@pytest.mark.parametrize("position_type", [np.int32, np.int64])
@pytest.mark.parametrize("size", [1, 3, 16, np.int32(16)])
def test_slots(table_type, position_type, size):
    rng = np.random.default_rng(0)
    table = rng.integers(-1, 2**31 - 1, (5, 4)).astype(table_type)
    for shape in ((5,), (5, 1), (5, 7)):
        positions = rng.integers(0, 4 * int(size), shape).astype(position_type)
        got = kvquant.slots(table, positions, size)
        assert got.dtype == np.int64 and got.shape == (positions.size,)
        assert got.tolist() == plain(table, positions, int(size))
        assert kvquant.slots(np.asfortranarray(table), positions[::1], size).tolist() == got.tolist()
    positions = rng.integers(0, 4 * int(size), 9).astype(position_type)
    assert kvquant.slots(table[2], positions, size).tolist() == plain(table[2], positions, int(size))
    sequence = rng.integers(0, 5, 9)  # a ragged batch: each token has the row of its sequence
    assert kvquant.slots(table[sequence], positions, size).tolist() == plain(table[sequence], positions, int(size))


def test_no_block_is_padding_and_unused_entries_are_not_looked_at():
    table = np.array([[7, -1, -99], [-1, 2**62, -5]])
    assert kvquant.slots(table, np.array([[0, 3, 4], [0, 1, 2]]), 4).tolist() == [28, 31, -1, -1, -1, -1]


def test_cache_layouts_of_engines(capsys):
    """The example compares the bytes of every layout itself."""
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "cache_layouts.py"))
    assert capsys.readouterr().out.count(" equal\n") == 7


def test_no_tokens():
    for table, positions in (((0, 3), (0,)), ((2, 3), (2, 0)), ((3,), (0,)), ((0,), (0,))):
        assert kvquant.slots(np.zeros(table, np.int32), np.zeros(positions, np.int64), 4).shape == (0,)


@pytest.mark.parametrize(
    "error, pattern, change",
    [
        (TypeError, "^block_table: .*list", {"block_table": [[0, 1]]}),
        (TypeError, "^positions: .*list", {"positions": [0, 1]}),
        (TypeError, "^positions: .*Masked", {"positions": np.ma.arange(2)}),
        (TypeError, "^block_table: .*uint32", {"block_table": np.zeros((2, 3), np.uint32)}),
        (TypeError, "^positions: .*float64", {"positions": np.zeros(2)}),
        (TypeError, "^positions: .*bool", {"positions": np.zeros(2, bool)}),
        (TypeError, "^positions: .*native", {"positions": np.zeros(2, ">i8")}),
        (ValueError, "^block_size: .*0", {"block_size": 0}),
        (ValueError, "^block_size: .*True", {"block_size": True}),
        (ValueError, "^block_size: .*4.0", {"block_size": 4.0}),
        (ValueError, "^block_table: ", {"block_table": np.zeros((2, 3, 1), np.int32)}),
        (ValueError, "^block_table: ", {"block_table": np.zeros((), np.int32)}),
        (ValueError, r"^positions: expected shape \[2\]", {"positions": np.zeros(3, np.int32)}),
        (ValueError, "^positions: ", {"positions": np.zeros((2, 1, 1), np.int32)}),
        (ValueError, r"^positions: expected shape \[T\]", {"block_table": np.zeros(3, int), "positions": np.zeros((1, 2), int)}),
        (IndexError, r"^positions\[1\]: expected 0 <= position < 12, got 12", {"positions": np.array([0, 12])}),
        (IndexError, r"^positions\[0\]: .*-1", {"positions": np.array([-1, 12])}),
        (IndexError, r"^positions\[0\]: ", {"positions": np.array([2**62, 0])}),
        (IndexError, r"^block_table\[4\]: .*-2", {"positions": np.array([0, 5])}),
        (IndexError, r"^block_table\[5\]: ", {"positions": np.array([0, 11])}),
    ],
)
def test_refused(error, pattern, change):
    good = {"block_table": np.array([[0, 1, 2], [3, -2, 2**61]]), "positions": np.array([0, 1]), "block_size": 4}
    assert kvquant.slots(**good).tolist() == [0, 13]
    with pytest.raises(error, match=pattern):
        kvquant.slots(**good | change)
