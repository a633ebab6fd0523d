"""The reference against numbers written by hand and against exact rational arithmetic.

The oracle below shares nothing with the reference: it knows integers and fractions, no NumPy arithmetic, and so no
rounding but its own.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from calls import bits, f32, one_token
from cases import TYPES, narrow
from kvquant.reference import dequant_rope_quant_kvcache

F32 = ("float32", "float32")
BF16 = ("bfloat16", "bfloat16")
F16 = ("float16", "float16")
TO_F16 = ("int32", "float16")


def v_codes(pair, values, scale, offset=None):
    more = {} if offset is None else {"offset_v": np.full(1, offset, np.float32)}
    call = one_token(pair, np.zeros(len(values)), values, scale_v=scale, **more)
    return dequant_rope_quant_kvcache(**call)[4].ravel().tolist()


# Numbers by hand -----------------------------------------------------------------------------------------------------


def test_division_is_not_a_product_with_the_reciprocal():
    v = f32(0x41426666)  # 12.149999618530273
    assert v_codes(F32, [v, -v], np.float32(0.1)) == [121, -121]


def test_products_are_not_fused():
    x1, cos, x2, sin, scale = (f32(n) for n in (0xBE039E97, 0x3FAEE846, 0xBF2A4A33, 0x3EB3F921, 0x3CBEA8E3))
    call = one_token(F32, [x1, x2], cos=cos, sin=sin, scale_k=scale)
    assert dequant_rope_quant_kvcache(**call)[3].ravel()[0] == 2


def test_overflow_of_a_product_stays():
    call = one_token(BF16, [2.0**127, 2.0**127], cos=[2, 1], sin=[1, 0])
    q, *_, k_cache, _ = dequant_rope_quant_kvcache(**call)
    assert bits(q) == [0x7F80, 0x7F00]
    assert k_cache.ravel().tolist() == [127, 127]


@pytest.mark.parametrize("types, nan", [(F16, 0x7E00), (TO_F16, 0x7E00), (BF16, 0x7FC0), (F32, 0x7FC00000)])
def test_every_nan_becomes_the_positive_quiet_one(types, nan):
    made = one_token(types, [np.inf, 1.0], cos=[0, 0], sin=0, kv_output=True)
    q, k, *_ = dequant_rope_quant_kvcache(**made)
    assert bits(q)[0] == bits(k)[0] == nan
    for given in (0x7FC00000, 0xFFC00000, 0x7FE00000, 0xFFE00000):
        q, _, v, k_cache, v_cache = dequant_rope_quant_kvcache(**one_token(types, [f32(given), 1], kv_output=True))
        assert bits(v)[0] == bits(q)[0] == nan
        assert k_cache.ravel()[0] == v_cache.ravel()[0] == 0


def test_narrowing_by_hand():
    def q_of(value, output):
        return bits(dequant_rope_quant_kvcache(**one_token(("int32", output), [value, 0]))[0])[0]

    assert q_of(f32(0x3E89CCD5), "bfloat16") == 0x3E8A
    assert q_of(1.000732421875, "float16") == 0x3C01
    assert q_of(0.49999, "float16") == 0x3800
    assert q_of(0.99999, "float16") == 0x3C00
    assert q_of(65519.996, "float16") == 0x7BFF
    assert q_of(65520, "float16") == 0x7C00
    assert q_of(2.0**-25, "float16") == 0
    assert q_of(f32(0x7F7F8000), "bfloat16") == 0x7F80
    assert q_of(f32(0x00000001), "float32") == 1


def test_half_rotation_and_the_split():
    call = one_token(F32, [1, 2, 3, 4], cos=0, sin=1)
    q, _, _, k_cache, v_cache = dequant_rope_quant_kvcache(**call)
    assert q.ravel().tolist() == [-3, -4, 1, 2]
    assert k_cache.ravel().tolist() == [-3, -4, 1, 2]
    assert v_cache.ravel().tolist() == [1, 2, 3, 4]


def test_split_of_grouped_heads():
    dim, width = 8, 48
    call = one_token(F32, np.zeros(dim))
    call |= {"x": np.arange(width, dtype=np.float32)[None], "size_splits": [32, 8, 8]}
    q, _, _, k_cache, v_cache = dequant_rope_quant_kvcache(**call)
    assert q.shape == (1, 4, 8) and q.ravel().tolist() == list(range(32))
    assert k_cache.ravel().tolist() == list(range(32, 40))
    assert v_cache.ravel().tolist() == list(range(40, 48))


def test_saturation_and_ties():
    assert v_codes(F32, [-129, -128, -127, 126, 127, 128], 1) == [-128, -128, -127, 126, 127, 127]
    assert v_codes(F32, [3e9, 2147483648, 1e38, np.inf, -3e9, -np.inf], 1) == [127, 127, 127, 127, -128, -128]
    assert v_codes(F32, [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5], 1) == [0, 2, 2, 0, -2, 126, 127, -128]
    assert v_codes(F32, [0.25, 0.75], 1, offset=0.25) == [0, 1]
    assert v_codes(F32, [3, -3], -1) == [-3, 3]
    assert v_codes(F32, [2.0**-149, 3 * 2.0**-149], 2.0**-149) == [1, 3]
    v = 0.050018310546875
    for pair in (F16, TO_F16, F32):
        assert v_codes(pair, [v, -v], 0.0999755859375) == [1, -1]


# Exact arithmetic ----------------------------------------------------------------------------------------------------

# type: digits of the significand, exponent of the smallest subnormal, first power of two that does not exist
FORMATS = {"float32": (24, -149, 128), "float16": (11, -24, 16), "bfloat16": (8, -133, 128)}


def nearest(value, type_name="float32"):
    """An exact rational rounded to nearest even, as a Fraction; infinity where it overflows."""
    digits, smallest, limit = FORMATS[type_name]
    if value == 0 or not isinstance(value, Fraction):
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - digits + 1, smallest)
    rounded = round(value / quantum) * quantum  # Fraction rounds half to even
    return rounded if abs(rounded) < Fraction(2) ** limit else math.copysign(math.inf, rounded)


def oracle(x, cos, sin, scale, offset, weight_scale, activation_scale, bias, int_bias, half):
    """One token, one head each; returns q as exact values of float32 and the codes of k and v."""

    def half_rounded(value):
        return nearest(value, "float16") if half else value

    dequantised = []
    for h, value in enumerate(x):
        if weight_scale is None:
            dequantised.append(value)
            continue
        if int_bias:
            value = (value + bias[h] + 2**31) % 2**32 - 2**31
        f = nearest(nearest(Fraction(value)) * weight_scale[h])
        if activation_scale is not None:
            f = nearest(f * activation_scale)
        if bias is not None and not int_bias:
            f = nearest(f + bias[h])
        dequantised.append(f)
    dim = len(x) // 3
    rotated = []
    for head in (dequantised[:dim], dequantised[dim : 2 * dim]):
        head = [half_rounded(value) for value in head]
        out = [None] * dim
        for j in range(dim // 2):
            a, b = head[j], head[j + dim // 2]
            products = [
                half_rounded(nearest(n * table[c]))
                for n, table, c in ((a, cos, j), (b, sin, j), (b, cos, j + dim // 2), (a, sin, j + dim // 2))
            ]
            out[j] = half_rounded(nearest(products[0] - products[1]))
            out[j + dim // 2] = half_rounded(nearest(products[2] + products[3]))
        rotated.append(out)
    codes = []
    for head in (rotated[1], dequantised[2 * dim :]):
        steps = [nearest(nearest(value / s) + o) for value, s, o in zip(head, scale, offset)]
        codes.append([max(-128, min(127, round(n) if isinstance(n, Fraction) else n)) for n in steps])
    return rotated[0], *codes


def fractions(array):
    return [Fraction(float(value)) for value in array]


@pytest.mark.parametrize("bias_type", [None, "int32", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numerics", ["fp32", "ascend"])
def test_against_exact_arithmetic(pair, numerics, bias_type):
    x_type, output = pair
    rng = np.random.default_rng(7)
    dim = 6
    for attempt in range(24):
        size = 2.0 ** (rng.integers(-20, 11) if output == "float16" else rng.integers(-140, 60))
        if x_type == "int32":
            x = (rng.integers(-(2**31), 2**31, 3 * dim) >> rng.integers(0, 20)).astype(np.int32)
            weight_scale = (rng.standard_normal(3 * dim) * size * 2.0**-24).astype(np.float32)
        else:
            x, weight_scale = narrow(rng.standard_normal(3 * dim) * size, x_type), None
        cos, sin = (narrow(rng.standard_normal(dim), output) for _ in "cs")
        scale = (rng.choice([1, -1], dim) * rng.uniform(0.01, 0.5, dim) * size).astype(np.float32)
        offset = (rng.uniform(-9, 9, dim) * (attempt % 2)).astype(np.float32)
        activation_scale = np.float32(rng.uniform(0.1, 3)) if attempt % 3 else None
        bias = None
        if bias_type == "int32":
            bias = rng.integers(-(2**31), 2**31, 3 * dim).astype(np.int32)
        elif bias_type:
            bias = narrow(rng.standard_normal(3 * dim) * size, bias_type)
            bias = np.where(np.isfinite(bias.astype(np.float32)), bias, bias.dtype.type(1))
        call = one_token(("float32", "float32"), np.zeros(dim)) | {
            "x": x[None],
            "cos": cos[None],
            "sin": sin[None],
            "scale_k": scale,
            "scale_v": scale[None],
            "offset_k": offset,
            "offset_v": offset[None],
            "weight_scale": weight_scale,
            "activation_scale": None if activation_scale is None else np.array([activation_scale]),
            "bias": bias,
            "numerics": numerics,
        }
        q, _, _, k_cache, v_cache = dequant_rope_quant_kvcache(**call)

        exact_x = [int(value) for value in x] if x_type == "int32" else fractions(x)
        exact_bias = [int(b) for b in bias] if bias_type == "int32" else bias if bias is None else fractions(bias)
        expected_q, k_codes, v_codes = oracle(
            exact_x,
            fractions(cos),
            fractions(sin),
            fractions(scale),
            fractions(offset),
            None if weight_scale is None else fractions(weight_scale),
            None if activation_scale is None else Fraction(float(activation_scale)),
            exact_bias,
            bias_type == "int32",
            numerics == "ascend" and output == "float16",
        )
        assert q.dtype == TYPES[output]
        assert [float(value) for value in q.ravel()] == [float(nearest(value, output)) for value in expected_q]
        assert k_cache.ravel().tolist() == k_codes
        assert v_cache.ravel().tolist() == v_codes
