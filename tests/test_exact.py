"""Compiled operator and reference against exact rationals (exact.py): small calls, all pairs of options, special values and
ties among them."""

import functools

import kvquant
import numpy as np
import pytest
from cases import OPTIONS, PAIRS, TYPES, Built, Case, all_pairs, build
from exact import FORMATS, INFINITE, decode, dequant_rope_quant_kvcache, encode, power, rounded
from test_numbers import FloatState
from test_operator import edges


@functools.cache
def cases(pair):
    """All pairs of options on D 2 to 34; at most three tokens, since a fraction costs microseconds."""
    rng = np.random.default_rng(70 + PAIRS.index(pair))
    heads = {"heads": ((1, 1), (2, 1), (0, 2)), "dim": (2, 4, 6, 34), "tokens": (1, 2, 3)}
    rows = all_pairs({**OPTIONS, **heads}, [], rng)
    return [Case(pair=pair, seed=seed, **row) for seed, row in enumerate(rows * 5)]


@functools.cache
def expected_of(pair):
    prepared = []
    for case in cases(pair):
        built = build(case)
        prepared.append((built, dequant_rope_quant_kvcache(built.arguments)))
    # Products and sums at both ends of the exponent's range, subnormal ones among them.
    built = Built()
    built.arguments = dict(edges(pair)[0].arguments)
    built.arguments |= {name: built.arguments[name][:5] for name in ("x", "cos", "sin", "indices")}
    built.buffers = {name: built.arguments[name] for name in ("k_cache", "v_cache")}
    built.freeze()
    prepared.append((built, dequant_rope_quant_kvcache(built.arguments)))
    return prepared


def check(built, expected, function, **more):
    built.restore()
    result = function(**built.arguments, **more)
    kv_output = built.arguments["kv_output"]
    for name, array in zip(("q", "k", "v", "k_cache", "v_cache"), result):
        if name in ("k_cache", "v_cache"):
            assert np.array_equal(array, expected[name]), name
        elif name == "q" or kv_output:
            assert np.ascontiguousarray(array).view(f"u{array.itemsize}").ravel().tolist() == expected[name], name


def test_exact_rationals(pair, isa, executed):
    for built, expected in expected_of(pair):
        check(built, expected, kvquant.reference.dequant_rope_quant_kvcache)
        check(built, expected, kvquant.dequant_rope_quant_kvcache, isa=isa)
    executed("C2 C4 C5 C6 C8", isa, pair)


def test_enough_is_drawn(pair):
    """The cases above hold what is hard: NaN, infinities and subnormals come out, and codes saturate and sit between."""
    bits, codes = set(), set()
    for built, expected in expected_of(pair):
        bits.update(expected["q"])
        codes.update(expected["k_cache"].ravel().tolist())
    values = [decode(pattern, pair[1]) for pattern in bits]
    finite = [value[1] for value in values if value and value[1] is not INFINITE]
    assert {None, (0, INFINITE), (1, INFINITE)} <= set(values) and len(finite) > 1000
    assert any(0 < value < power(FORMATS[pair[1]][1]) for value in finite)
    assert len(codes) == 256


def test_no_floating_point_state_matters():
    built = build(Case(tokens=3, dim=6, data="special", offsets="both", bias="float32", kv_output=True))
    expected = dequant_rope_quant_kvcache(built.arguments)
    state = FloatState()
    for rounding, flush in ((1, 3), (2, 0), (3, 3)):
        state.set(rounding, flush, True)
        try:
            again = dequant_rope_quant_kvcache(built.arguments)
        finally:
            state.restore()
        assert all(np.array_equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_value_survives(name):
    """decode and encode are inverse, and widening and rounding change nothing."""
    for bits in range(1 << 16):
        value = decode(bits, name)
        if value is not None:
            assert encode(value, name) == bits
            assert rounded(rounded(value, "float32"), name) == value
    assert np.array([encode(None, name)], np.uint16).view(TYPES[name]).astype(np.float32) != 0
