"""I10: cos and sin as tables whose rows the positions choose. The same bytes as with gathered rows, and every refusal."""

import mmap

import kvquant
import numpy as np
import pytest
from calls import call, refused, rows, tokens_of_codes
from cases import Case, build, narrow
from memory import guarded
from test_errors import (ANY_TYPE, BATCHES, DIM, EXPECTED, IMPLEMENTATIONS, STEPS, TOKENS, Impostor, as_type, good, hashes,
                         observed, run)  # fmt: skip


def with_tables(pair, dim=34, table_rows=9, half=False, positions=(0, 8, 3, 3), **options):
    """A call of four tokens with tables of random values, a full K and V, and the same call with gathered rows."""
    rng = np.random.default_rng(3)
    built = build(Case(pair=pair, dim=dim, tokens=len(positions), rank=2, cache_mode="page", kv_output=True, **options))
    tables = {name: narrow(rng.uniform(-1, 1, (table_rows, dim // 2 if half else dim)), pair[1]) for name in ("cos", "sin")}
    positions = np.array(positions)
    whole = {name: np.concatenate([table, table], 1) if half else table for name, table in tables.items()}
    gathered = {name: table[positions] for name, table in whole.items()}
    return built.arguments | tables | {"positions": positions}, built.arguments | gathered


def same(a, b):
    return [array.tobytes() for array in a] == [array.tobytes() for array in b]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dim", [2, 34, 64, 128, 256, 320])
def test_I10_same_bytes_as_gathered_rows(dim, half, pair, isa, executed):
    tables, gathered = with_tables(pair, dim, half=half)
    assert same(call(tables, isa), call(gathered, isa))
    executed("I10", isa, pair)


def test_I10_example(pair, isa, executed):
    """Row 0 is cos=1, sin=0, row 1 is cos=0, sin=1: x=[1,2] stays or becomes [-2,1]."""
    arguments = tokens_of_codes(pair, [1, 1], (1, 2, 1, 2), [0, 1], cache_mode="page", positions=np.array([1, 0]))
    arguments |= {"cos": narrow([[1], [0]], pair[1]), "sin": narrow([[0], [1]], pair[1])}
    q = call(arguments, isa)[0]
    assert q.ravel().tolist() == [-1, 1, 1, 1]
    executed("I10", isa, pair)


def test_fault_F21_position_outside_the_table(pair, isa, executed):
    """A table of 8 rows that ends at a page nobody may read."""
    tables, _ = with_tables(pair, 64, 8, positions=(0, 7, 3, 3))
    for name in ("cos", "sin"):
        tables[name] = guarded(tables[name])
    call(tables, isa)
    for bad in ([0, 8], [-1], [2**31], [2**32], [0, 2**62], [-(2**63)]):
        tables["positions"] = np.array([0] * (4 - len(bad)) + bad)
        refused(IndexError, rf"^positions\[3\]: .*8, got {bad[-1]}", tables, isa)
    for value in (8, -1, 2**31 - 1, -(2**31)):
        tables["positions"] = np.array([7, value, 0, 9], np.int32)
        refused(IndexError, rf"^positions\[1\]: .*8, got {value}", tables, isa)
    executed("I10", isa, pair)


def test_fault_F73_positions_of_any_integer_type_and_stride(pair, isa, executed):
    tables, gathered = with_tables(pair, positions=(5, 6, 7, 8))
    expected = call(gathered, isa)
    wide = np.arange(5, 9)
    for positions in (wide, wide.astype(np.int32), np.repeat(wide, 2)[::2], np.repeat(wide.astype(np.int32), 3)[::3],
                      wide[::-1].copy()[::-1], wide.astype(np.longlong)):  # fmt: skip
        assert same(call({**tables, "positions": positions}, isa), expected)
    refused(TypeError, "^positions", {**tables, "positions": [5, 6, 7, 8]}, isa)
    executed("I10", isa, pair)


def test_uncached_tokens_have_positions_too(isa):
    """q of a padding token is computed, so that its position counts."""
    pair = ("float16", "float16")
    arguments = tokens_of_codes(pair, [1, 2], (1, 2, 1, 2), [0, -1], cache_mode="page", padding_index=-1)
    arguments |= {"cos": narrow([[1, 1], [2, 2]], pair[1]), "sin": narrow([[0, 0], [0, 0]], pair[1])}
    got = call({**arguments, "positions": np.array([0, 1])}, isa)
    assert got[0].ravel().tolist() == [1, 1, 4, 4] and rows(got[3]) == [[1, 77]]
    refused(IndexError, r"^positions\[1\]", {**arguments, "positions": np.array([0, -1])}, isa)


def test_rows_beyond_4_GiB(pair, isa, executed):
    """The offset of a row is formed in 64 bits: rows 2^31 + 64 bytes apart in memory that is mapped, but mostly never touched."""
    tables, gathered = with_tables(pair, 32, 3, positions=(2, 0, 1, 2))
    apart = (1 << 31) + 64
    for name in ("cos", "sin"):
        memory = np.frombuffer(mmap.mmap(-1, 2 * apart + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        table = np.ndarray((3, 32), tables[name].dtype, memory, 0, (apart, tables[name].itemsize))
        table[...] = tables[name]
        tables[name] = table
    for name in ("k_cache", "v_cache"):
        tables[name] = tables[name].copy()
    assert same(kvquant.dequant_rope_quant_kvcache(**tables, isa=isa), call(gathered, isa))
    executed("I10", isa, pair)


def test_no_tokens(isa):
    arguments = tokens_of_codes(("float16", "float16"), [], (1, 2, 1, 2), [], cache_mode="page")
    for table_rows in (0, 3):
        tables = dict.fromkeys(("cos", "sin"), np.ones((table_rows, 1), np.float16))
        assert call({**arguments, **tables, "positions": np.zeros(0, np.int32)}, isa)[0].shape == (0, 1, 2)


@pytest.mark.parametrize("three_d", [False, True])
def test_plan_and_threads(three_d, isa):
    """T and the tables' rows belong to the run."""
    table = np.random.default_rng(1).uniform(-1, 1, (2, 40, 17)).astype(np.float16)
    for tokens in (3, 400, 0, 1):
        lead = (2, tokens) if three_d else (tokens,)
        count = int(np.prod(lead))
        arguments = tokens_of_codes(("int32", "float16"), np.arange(count) % 90, (count + 1, 1, 1, 34), np.arange(count),
                                    rank=lead if three_d else 2, cache_mode="page")  # fmt: skip
        arguments |= {"cos": table[0], "sin": table[1], "positions": np.arange(count) % 40}
        expected = call(arguments, isa)
        if tokens == 3:
            plan = kvquant.plan(**arguments, isa=isa)
        names = ("x", "k_cache", "v_cache", "indices", "positions")
        for threads in (1, 3):
            arguments["k_cache"][...] = arguments["v_cache"][...] = 77
            assert same(plan.run(**{name: arguments[name] for name in names}, num_threads=threads), expected)


# Refusals, in the manner of test_errors.py ----------------------------------------------------------------------------


def table(*shape):
    return np.ones(shape, np.float16)


FAULTS = {
    "list": (TypeError, "positions", {"positions": list(range(TOKENS))}),
    "scalar": (TypeError, "positions", {"positions": np.int64(1)}),
    "other-library": (TypeError, "positions", {"positions": Impostor(np.arange(TOKENS))}),
    "masked": (TypeError, "positions", {"positions": np.ma.arange(TOKENS)}),
    "swapped": (TypeError, "positions", {"positions": np.arange(TOKENS, dtype=np.dtype("i8").newbyteorder())}),
    "2-d": (ValueError, "positions", {"positions": np.zeros((BATCHES, STEPS), np.int64)}),
    "0-d": (ValueError, "positions", {"positions": np.zeros((), np.int64)}),
    "short": (ValueError, "positions", {"positions": np.zeros(TOKENS - 1, np.int64)}),
    "long": (ValueError, "positions", {"positions": np.zeros(TOKENS + 1, np.int32)}),
    "table-too-narrow": (ValueError, "cos", {"cos": table(9, DIM // 4), "sin": table(9, DIM // 4)}),
    "table-too-wide": (ValueError, "cos", {"cos": table(9, 2 * DIM), "sin": table(9, 2 * DIM)}),
    "1-d-table": (ValueError, "cos", {"cos": table(DIM)}),
    "3-d-table": (ValueError, "sin", {"sin": table(9, 1, DIM // 2)}),
    "rows-of-each-token": (ValueError, "cos", {"cos": table(BATCHES, STEPS, 1, DIM)}),
    "two-widths": (ValueError, "sin", {"sin": table(9, DIM)}),
    "two-lengths": (ValueError, "sin", {"sin": table(8, DIM // 2)}),
    "strided-table": (ValueError, "cos", {"cos": table(9, DIM)[:, ::2]}),
    "empty-table": (IndexError, r"^positions\[0\]: .* 0 <= position < 0", {"cos": table(0, DIM), "sin": table(0, DIM)}),
    "vendor-limits": (ValueError, "positions", {"vendor_limits": True}),
    **{f"{name}": (TypeError, "positions", {"positions": as_type(np.arange(TOKENS), name)})
       for name in ANY_TYPE if isinstance(name, str) and name not in ("int32", "int64")},
}  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("label", FAULTS)
def test_fault(label, implementation):
    error, pattern, change = FAULTS[label]
    arguments = good() | {"cos": table(9, DIM // 2), "sin": table(9, DIM // 2), "positions": np.arange(TOKENS)} | change
    before = hashes(arguments)
    with pytest.raises(error, match=pattern) as caught:
        run(implementation, arguments)
    assert caught.type is error
    assert hashes(arguments) == before
    assert observed(run(implementation, good())) == EXPECTED


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_outputs_may_not_lie_over_tables_or_positions(implementation):
    arguments = good() | {"cos": table(9, DIM // 2), "sin": table(9, DIM // 2), "positions": np.arange(TOKENS)}
    q = arguments["out"][0]
    for name in ("cos", "sin", "positions"):
        moved = np.ndarray(arguments[name].shape, arguments[name].dtype, q, 64)
        with pytest.raises(ValueError, match=rf"\b(q|{name})\b"):
            run(implementation, arguments | {name: moved})
