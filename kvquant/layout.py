"""From an engine's block tables to cache rows. Plain NumPy; knows nothing of the operator."""
import numpy as np
from numpy.typing import NDArray

_Index = NDArray[np.int32] | NDArray[np.int64]


def slots(block_table: _Index, positions: _Index, block_size: int) -> NDArray[np.int64]:
    """Cache rows of tokens: block_table[b, position // block_size] * block_size + position % block_size.

    The result is what `indices` takes with cache_mode="page" and caches [blocks, block_size, Nkv, D].

    Parameters
    ----------
    block_table : ndarray [B, M] or [M], int32 or int64
        The blocks of each sequence in their order, -1 where there is none. Of [M], all tokens are of one sequence. For a ragged
        batch give each token its own row: block_table[sequence_of_token].
    positions : ndarray [B] or [B, S]; [T] for a block_table [M]; int32 or int64
        The place of each token in its sequence, 0 <= position < M * block_size.
    block_size : int >= 1
        Tokens per block.

    Returns
    -------
    ndarray [positions.size], int64
        -1 where the block is -1: such tokens are not cached with padding_index=-1.

    Raises
    ------
    TypeError, ValueError, IndexError
        As the operator does: the message names the argument, what was expected, what came and, for values, where (counted
        flat over the argument). Entries of block_table that no position asks for are not looked at.
    """
    for name, array in (("block_table", block_table), ("positions", positions)):
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected a numpy.ndarray, got {type(array).__name__}")
        if not array.dtype.isnative or array.dtype.name not in ("int32", "int64"):
            raise TypeError(f"{name}: expected int32 or int64 in native byte order, got {array.dtype}")
    if not isinstance(block_size, (int, np.integer)) or isinstance(block_size, bool) or not 1 <= block_size < 2**63:
        raise ValueError(f"block_size: expected an integer of at least 1 and below 2**63, got {block_size!r}")
    if block_table.ndim not in (1, 2):
        raise ValueError(f"block_table: expected shape [B, M] or [M], got {block_table.shape}")
    if block_table.ndim == 1:
        if positions.ndim != 1:
            raise ValueError(f"positions: expected shape [T], got {positions.shape}")
    elif positions.ndim not in (1, 2) or positions.shape[0] != block_table.shape[0]:
        batch = block_table.shape[0]
        raise ValueError(f"positions: expected shape [{batch}] or [{batch}, S], got {positions.shape}")

    if positions.size == 0:
        return np.empty(0, np.int64)
    size, table = int(block_size), np.atleast_2d(block_table)
    per_row = positions.reshape(table.shape[0], -1).astype(np.int64)
    _check("positions", "position", per_row, 0, table.shape[1] * size)
    rows, columns = np.arange(table.shape[0])[:, None], per_row // size
    block = table[rows, columns].astype(np.int64)
    _check("block_table", "block", block, -1, (2**63 - 1) // size, rows * table.shape[1] + columns)
    return np.where(block < 0, -1, block * size + per_row % size).reshape(-1)


def _check(
    argument: str, what: str, values: NDArray[np.int64], low: int, limit: int, where: NDArray[np.int64] | None = None
) -> None:
    """IndexError for the first value outside low <= value < limit; `where` holds the places of the values in the argument."""
    bad = np.flatnonzero((values < low) | (values >= limit))
    if bad.size:
        place = bad[0] if where is None else where.reshape(-1)[bad[0]]
        raise IndexError(f"{argument}[{place}]: expected {low} <= {what} < {limit}, got {values.reshape(-1)[bad[0]]}")
