"""Compiled against reference, byte for byte: every ISA x type pair x D x T, with all pairs of options (tests/grid.txt)."""

import functools
import itertools
from collections import Counter

import kvquant
import numpy as np
import pytest
from cases import DIMS, GRID_COLUMNS, PAIRS, TOKENS, Case, build, case_of, difference, narrow, read_grid

ROWS = read_grid()
COMPARED = Counter()  # calls of the grid by ISA


@functools.lru_cache(maxsize=max(Counter(row["dim"] for row in ROWS).values()))  # one after the other under every ISA
def with_reference(case):
    built = build(case)
    return built, built.run(kvquant.reference.dequant_rope_quant_kvcache)


@pytest.mark.parametrize("dim", DIMS)
def test_grid(dim, pair, isa, executed):
    for number, row in enumerate(ROWS):
        if row["dim"] == dim:
            case = case_of(row, pair, number)
            built, expected = with_reference(case)
            got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)
            assert difference(expected, got) is None, f"{isa}: {case}: {difference(expected, got)}"
            COMPARED[isa] += 1
    executed("C8", isa, pair)


def test_grid_was_run_to_the_last_row(isa):
    """After test_grid only: on its own it misses every row, and it is right."""
    assert COMPARED[isa] == len(ROWS) * len(PAIRS)


def test_grid_holds_what_it_promises():
    """Counted from the file, without the code that chose its rows."""
    columns = {"dim": DIMS, "tokens": TOKENS, **GRID_COLUMNS}
    for (a, values_of_a), (b, values_of_b) in itertools.combinations(columns.items(), 2):
        missing = set(itertools.product(values_of_a, values_of_b)) - {(row[a], row[b]) for row in ROWS}
        assert not missing, (a, b, missing)
    met = {(row["dim"], row["tokens"], row["layout"]) for row in ROWS}
    crossed = [dim for dim in DIMS if met >= set(itertools.product([dim], TOKENS[:-1], GRID_COLUMNS["layout"]))]
    assert len(crossed) >= 21 and {2, 14, 16, 18, 30, 32, 34, 64, 128, 130, 512} <= set(crossed)
    for row in ROWS:
        assert row["tokens"] % row["steps"] == 0 if row["steps"] else row["tokens"] == 0
        assert row["rank"] == 3 or row["steps"] == 1


def test_every_number_of_tokens(isa):
    """In one process, so that growing and shrinking buffers meet; 0 to 200 and around the sizes where plans may change."""
    for tokens in (*range(201), 255, 256, 511, 513, 1000, 1023, 1025, 2048, 4095, 4096, 3):
        case = Case(tokens=tokens, dim=6, heads=(1, 1), rank=2, cache_mode="page", offsets="both", num_threads=None)
        built, expected = with_reference(case)
        got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)
        assert difference(expected, got) is None, f"{isa}: T={tokens}: {difference(expected, got)}"


def test_plain_empty_arrays(pair, isa):
    """Arrays of no elements as NumPy makes them: their strides mean nothing and must not matter."""
    case = Case(pair=pair, tokens=0, rank=2, cache_mode="page", kv_output=True)
    built = build(case)
    for name in ("x", "cos", "sin", "indices"):
        built.arguments[name] = np.zeros(built.arguments[name].shape, built.arguments[name].dtype)
    q, k, v, *_ = kvquant.dequant_rope_quant_kvcache(**built.arguments, isa=isa)
    outputs = tuple(np.zeros(array.shape, array.dtype) for array in (q, k, v))
    result = kvquant.dequant_rope_quant_kvcache(**{**built.arguments, "out": outputs}, isa=isa)
    assert all(given is got for given, got in zip(outputs, result))


@functools.lru_cache(maxsize=2)
def edges(pair):
    """x·cos and x·sin near the ends of float32's range (and of float16's), where a fused product or a native conversion
    differs; three quarters of the pairs of products nearly cancel or nearly overflow."""
    rng = np.random.default_rng(11)
    x_type, output = pair
    tokens, heads, dim = 256, 6, 64
    case = Case(pair=pair, tokens=tokens, dim=dim, heads=(2, 2), rank=2, cache_mode="page", kv_output=True)
    built = build(case)

    def powers(exponents):
        return (rng.uniform(1, 2, exponents.shape) * rng.choice([-1, 1], exponents.shape) * 2.0**exponents).astype("f4")

    low, high = (-24, 15) if "float16" in pair else (-149, 127)
    total = rng.choice([low - 1, low, low + 1, low + 12, high - 1, high, high + 1], (tokens, 1))
    table = rng.integers(max(low // 2, -14), high // 2, (tokens, dim // 2)) if "float16" in pair else None
    if table is None:
        table = rng.integers(-60, 60, (tokens, dim // 2))
    part = np.tile(np.clip(total - table, -130 if low < -24 else -24, high - 1), (1, 2 * heads))
    with np.errstate(all="ignore"):
        x, cos, sin = powers(part), powers(np.tile(table, (1, 2))), powers(np.tile(table, (1, 2)))
        built.arguments |= {"cos": narrow(cos, output), "sin": narrow(sin, output)}
        if x_type == "int32":  # a random mantissa; the exponent, one for all tokens, comes from weight_scale
            built.arguments["x"] = rng.integers(-(2**24), 2**24, x.shape).astype(np.int32)
            built.arguments["weight_scale"] = powers(
                np.maximum(np.tile(rng.integers(low, high, dim // 2), 12) - 24, -149)
            )
        else:
            built.arguments["x"] = narrow(x, x_type)
    for name in ("scale_k", "scale_v"):
        built.arguments[name] = powers(rng.choice([low, low + 3, high - 6], (2, dim)))
    return built, built.run(kvquant.reference.dequant_rope_quant_kvcache)


def test_edges_of_the_exponent(pair, isa, executed):
    built, expected = edges(pair)
    got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)
    assert difference(expected, got) is None, difference(expected, got)
    executed("C1 C5 C8", isa, pair)
