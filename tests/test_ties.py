"""Rounding ties and exhaustive conversions. Random values hardly ever meet a tie, so each value here is built to sit on
one or within two units in the last place of it, for the quantiser (C6) and for narrowing (C5)."""

import functools

import kvquant
import numpy as np
import pytest
from calls import f32
from cases import TYPES, Built, difference, narrow, ulps

STEPS = np.arange(-128, 128)
NEAR = (-2, -1, 0, 1, 2)
QUIET_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}


def columns(pair, k, v, q=None, **arrays):
    """One token whose K and V hold these values (float32 [heads,D] each), q too if given; cos 1, sin 0."""
    x_type, output = pair
    dim = k.shape[1]
    parts = [k[:0] if q is None else q, k, v]
    row = np.concatenate([part.ravel() for part in parts])
    built = Built()
    built.arguments = a = {
        "x": np.ones((1, row.size), np.int32) if x_type == "int32" else narrow(row, x_type)[None],
        "cos": narrow(np.ones((1, dim)), output),
        "sin": narrow(np.zeros((1, dim)), output),
        "k_cache": np.full((1, 1, *k.shape), 77, np.int8),
        "v_cache": np.full((1, 1, *k.shape), 77, np.int8),
        "indices": np.zeros(1, np.int64),
        "scale_k": np.ones(1, np.float32),
        "scale_v": np.ones(1, np.float32),
        "size_splits": [part.size for part in parts],
        "weight_scale": row if x_type == "int32" else None,
        **arrays,
    }
    built.buffers = {name: a[name] for name in ("k_cache", "v_cache")}
    return built.freeze()


def both(built, isa):
    """The compiled result, after its comparison with the reference's."""
    if not hasattr(built, "expected"):
        built.expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)
    assert difference(built.expected, got) is None, f"{isa}: {difference(built.expected, got)}"
    return {name: value[2] if isinstance(value, tuple) else value for name, value in got.items()}


# Quantiser -----------------------------------------------------------------------------------------------------------


def _scales(rng):
    """1000 float32 scales: all sizes, both signs, subnormal ones, powers of two and familiar ones."""
    familiar = [1, -1, 3, 0.1, 1 / 127, 1 / 128, 0.0999755859375, 2.0**-126, 2.0**-149, 2.0**100]
    magnitude = rng.uniform(1, 2, 990) * 2.0 ** rng.integers(-140, 110, 990)
    return np.concatenate([np.float32(familiar), np.float32(magnitude * rng.choice([-1, 1], 990))])


@functools.lru_cache(maxsize=2)
def quantiser_ties(pair, with_offsets):
    """K and V on and around v / scale + offset = step + 0.5 for 1000 scales x 256 steps x 5 neighbours."""
    rng = np.random.default_rng(4)
    shape = (1000, STEPS.size, len(NEAR))
    offset = np.zeros(shape, np.float32)
    if with_offsets:
        offset[...] = rng.choice(np.float32([0.5, -0.25, 3, -7.3, 100.1, 1e-3]), (1000, 1, 1))
    target = STEPS[:, None] + 0.5 - offset.astype(np.float64)
    with np.errstate(all="ignore"):
        if pair[0] in ("float16", "bfloat16"):  # few values exist: the scale is what moves
            values = narrow(rng.standard_normal(1000) * 2.0 ** rng.integers(-10, 10, 1000), pair[0])
            values = np.broadcast_to(values.astype(np.float32)[:, None, None], shape)
            scale = np.where(target == 0, 1, values / target).astype(np.float32)
            scale = (scale.view(np.int32) + np.int32(NEAR)).view(np.float32)
        else:
            scale = np.broadcast_to(_scales(rng)[:, None, None], shape)
            values = (target * scale).astype(np.float32)
            values = (values.view(np.int32) + np.int32(NEAR)).view(np.float32)
        values = np.where(np.isfinite(values), values, np.float32(0))
        reached = values / scale + offset
    share = np.mean(reached - np.floor(reached) == 0.5)
    assert share > 0.1, f"only {share:.0%} of the values sit on a tie"

    heads = (-1, 256)
    scale, offset = scale.reshape(heads), offset.reshape(heads)
    more = {"offset_k": offset, "offset_v": offset[:, ::-1].copy()} if with_offsets else {}
    k = values.reshape(heads)
    return columns(pair, k, k[:, ::-1], scale_k=scale, scale_v=scale[:, ::-1].copy(), **more)


@pytest.mark.parametrize("with_offsets", [False, True])
def test_quantiser_on_ties(with_offsets, pair, isa, executed):
    both(quantiser_ties(pair, with_offsets), isa)
    executed("C6 C8", isa, pair)


def test_ties_go_to_even_by_hand(pair, isa, executed):
    """Exact ties, known without any reference: scale 2, v = 2 * step + 1 is step + 0.5."""
    steps = np.arange(-64, 64)
    values = (2 * steps + 1).astype(np.float32).reshape(2, 64)
    half_even = [step if step % 2 == 0 else step + 1 for step in steps.tolist()]
    two = np.full(1, 2, np.float32)
    got = both(columns(pair, values, values, scale_k=two, scale_v=two), isa)
    assert np.frombuffer(got["buffer of k_cache"], np.int8).tolist() == half_even
    assert np.frombuffer(got["buffer of v_cache"], np.int8).tolist() == half_even
    executed("C6", isa, pair)


# Narrowing -----------------------------------------------------------------------------------------------------------


def finite_bits(output):
    """All non-negative finite values of a 16-bit type, as bits."""
    return np.arange(0x7C00 if output == "float16" else 0x7F80, dtype=np.uint16)


def as_float32(bit_patterns, output):
    return bit_patterns.astype(np.uint16).view(TYPES[output]).astype(np.float32)


def padded(array, columns, fill=0):
    """[heads, columns], the last row filled up."""
    rows = -(-array.size // columns)
    out = np.full(rows * columns, fill, array.dtype)
    out[: array.size] = array.ravel()
    return out.reshape(rows, columns)


@functools.lru_cache(maxsize=2)
def narrowing_ties(pair):
    """Every tie of the output type with both neighbours and both signs, and the bits each must give."""
    output = pair[1]
    low = finite_bits(output)
    # Halfway to the next value: exact in float64; the one above the largest is where infinity begins.
    high = np.append(as_float32(low[1:], output).astype(np.float64), 2.0 ** (16 if output == "float16" else 128))
    tie = ((as_float32(low, output) + high) / 2).astype(np.float32)
    values = np.stack([ulps(tie, -1), tie, ulps(tie, 1)])
    expected = np.stack([low, low + (low & 1), low + 1]).astype(np.uint16)
    values, expected = np.concatenate([values, -values]), np.concatenate([expected, expected | 0x8000])
    values, expected = padded(values, 130), padded(expected, 130)
    return columns(pair, values, values[::-1], values, kv_output=True), expected


@pytest.mark.parametrize("output", ["float16", "bfloat16"])
def test_narrowing_ties(output, isa, executed):
    built, expected = narrowing_ties(("int32", output))
    got = both(built, isa)
    # cos 1, sin 0: q and k are a*1 - b*0, so a value may only lose the sign of its zero.
    for name, bits in (("q", expected), ("k", expected), ("v", expected[::-1])):
        seen = np.frombuffer(got[name], np.uint16).reshape(bits.shape)
        wrong = (seen != bits) & ((seen & 0x7FFF) + (bits & 0x7FFF) != 0)
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} wrong, for example {seen[wrong][0]:04x} not {bits[wrong][0]:04x}"
        )
    assert (np.frombuffer(got["v"], np.uint16).reshape(expected.shape) == expected[::-1]).all()
    executed("C5 C8", isa, ("int32", output))


@functools.lru_cache(maxsize=2)
def rotated_ties(output):
    """For 16-bit x: a + b/2 with b one unit in the last place of a, or a little less or more, is on or next to a tie."""
    low = finite_bits(output)[:-1]
    a = as_float32(low, output)
    unit = as_float32(low + 1, output) - a
    factor = np.float32([1 - 2**-7, 1, 1 + 2**-6])
    b = narrow(unit * factor[:, None], output).astype(np.float32)
    exact = b == unit * factor[:, None]  # not so among subnormals
    expected = np.stack([low, low + (low & 1), low + 1]).astype(np.uint16)
    a, b, expected = (padded(array, 33) for array in (np.broadcast_to(a, b.shape)[exact], -b[exact], expected[exact]))
    both_signs = np.concatenate([np.hstack([a, b]), np.hstack([-a, -b])])
    built = columns((output, output), both_signs, both_signs[::-1], both_signs, kv_output=True)
    built.arguments["sin"] = narrow(np.full((1, 66), 0.5), output)
    return built, np.concatenate([expected, expected | 0x8000])


@pytest.mark.parametrize("output", ["float16", "bfloat16"])
def test_narrowing_ties_after_the_rotation(output, isa, executed):
    built, expected = rotated_ties(output)
    got = both(built, isa)
    for name in "qk":
        seen = np.frombuffer(got[name], np.uint16).reshape(-1, 66)[:, :33]
        wrong = (seen != expected) & ((seen & 0x7FFF) + (expected & 0x7FFF) != 0)
        assert not wrong.any(), f"{name}: {wrong.sum()} wrong, for example {seen[wrong][0]:04x}"
    executed("C5 C8", isa, (output, output))


# Exhaustive conversions ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def all_values(output, scale):
    """All 65536 values of a 16-bit type through q, K and V."""
    every = np.arange(65536, dtype=np.uint16)
    built = columns((output, output), *[np.zeros((128, 512), np.float32)] * 3, kv_output=True)
    shuffled = np.random.default_rng(0).permutation(every)
    built.arguments["x"] = np.concatenate([shuffled, shuffled, every]).view(TYPES[output])[None]
    built.arguments["scale_k"] = built.arguments["scale_v"] = np.full(1, scale, np.float32)
    return built


@pytest.mark.parametrize("scale", [1.0, 1 / 127, -3.0, 2.0**-126, 2.0**127])
@pytest.mark.parametrize("output", ["float16", "bfloat16"])
def test_all_16_bit_inputs(output, scale, isa, executed):
    got = both(all_values(output, scale), isa)
    expected = np.arange(65536)
    magnitude = expected & 0x7FFF
    expected[magnitude > (0x7C00 if output == "float16" else 0x7F80)] = QUIET_NAN[output]
    assert np.array_equal(np.frombuffer(got["v"], np.uint16), expected)
    executed("C3 C5 C6", isa, (output, output))


@pytest.mark.parametrize("types", [("int32", "float32"), ("float32", "float32")], ids="-".join)
def test_float32_passes_through(types, isa, executed):
    """No narrowing: bits stay as they are, apart from NaN."""
    rng = np.random.default_rng(2)
    values = f32(
        np.append(rng.integers(0, 2**32, 2**16 - 6, np.uint32), [0, 1, 0x7FFFFF, 0x7F800001, 0xFF800000, 2**31])
    )
    got = both(columns(types, *[values.reshape(128, 512)] * 2, kv_output=True), isa)
    expected = np.where(np.isnan(values), f32(QUIET_NAN["float32"]), values)
    assert got["v"] == expected.tobytes()
    executed("C5", isa, types)


def test_int32_to_float32(isa, executed):
    """Integers beyond 24 bits round to nearest even: on each tie, one below it and one above it."""
    rng = np.random.default_rng(3)
    bits = rng.integers(25, 32, 4096)
    unit = 1 << (bits - 24)
    x = (rng.integers(2**23, 2**24, 4096) * unit + unit // 2 + rng.integers(-1, 2, 4096)) * rng.choice([-1, 1], 4096)
    x = np.concatenate([x[np.abs(x) < 2**31], [2**31 - 1, -(2**31), 2**24 + 1, -(2**24) - 3]])
    x = x[: x.size // 16 * 16].astype(np.int32)
    built = columns(("int32", "float32"), *[np.ones((x.size // 16, 16), np.float32)] * 2, kv_output=True)
    built.arguments["x"] = np.concatenate([x, x])[None]
    got = both(built, isa)
    expected = x.astype(np.float64).astype(np.float32)  # int32 is exact in float64, so this rounds once
    assert got["v"] == expected.tobytes()
    executed("C2", isa, ("int32", "float32"))
