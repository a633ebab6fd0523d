"""The operator in exact rationals: the third oracle, for small calls.

Numbers are decoded from their bits, computed with as integers and fractions, and rounded where docs/contract.md says so. No
floating-point operation takes part, so no floating-point state and no library can make it wrong in the way of the others.
Must not know how any implementation computes. A value is None (NaN) or (sign, magnitude), magnitude a Fraction or INFINITE.
"""

from fractions import Fraction

import numpy as np

INFINITE = float("inf")  # only ever compared
# Type -> bits of precision, smallest and largest exponent, bits of storage.
FORMATS = {"float16": (11, -14, 15, 16), "bfloat16": (8, -126, 127, 16), "float32": (24, -126, 127, 32)}


def power(exponent):
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def decode(bits, name):
    precision, low, _, size = FORMATS[name]
    fraction_bits = precision - 1
    sign, exponent = bits >> (size - 1), bits >> fraction_bits & (1 << (size - precision)) - 1
    fraction = bits & (1 << fraction_bits) - 1
    if exponent == (1 << (size - precision)) - 1:
        return None if fraction else (sign, INFINITE)
    if exponent:
        fraction |= 1 << fraction_bits
    return sign, fraction * power(max(exponent, 1) - 1 + low - fraction_bits)


def encode(value, name):
    """The bits; a NaN becomes the positive quiet one (C5)."""
    precision, low, _, size = FORMATS[name]
    fraction_bits = precision - 1
    infinity = (1 << (size - precision)) - 1 << fraction_bits
    if value is None:
        return infinity | 1 << (fraction_bits - 1)
    sign, magnitude = value
    if magnitude is INFINITE:
        bits = infinity
    else:
        exponent = max(log2(magnitude), low) if magnitude else low
        units = magnitude / power(exponent - fraction_bits)
        assert units.denominator == 1, "not a value of this type"
        bits = units.numerator + (exponent - low << fraction_bits)
    return sign << (size - 1) | bits


def log2(magnitude):
    """Of the largest power of two that is not above it."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if power(guess) <= magnitude else guess - 1


def rounded(value, name="float32"):
    """To nearest, ties to even; subnormals kept; overflow to infinity."""
    if value is None or value[1] is INFINITE or value[1] == 0:
        return value
    precision, low, high, _ = FORMATS[name]
    sign, magnitude = value
    unit = power(max(log2(magnitude), low) - precision + 1)
    magnitude = round(magnitude / unit) * unit  # of a Fraction: ties go to even
    return sign, INFINITE if magnitude >= power(high + 1) else magnitude


def of_integer(n):
    return int(n < 0), Fraction(abs(n))


def times(a, b):
    if a is None or b is None or {a[1], b[1]} == {INFINITE, 0}:
        return None
    infinite = INFINITE in (a[1], b[1])
    return a[0] ^ b[0], INFINITE if infinite else a[1] * b[1]


def over(a, b):
    """b is finite and not zero."""
    return a and (a[0] ^ b[0], a[1] if a[1] is INFINITE else a[1] / b[1])


def plus(a, b):
    if a is None or b is None:
        return None
    if INFINITE in (a[1], b[1]):
        if a[1] == b[1] and a[0] != b[0]:
            return None
        return a if a[1] is INFINITE else b
    total = (-1) ** a[0] * a[1] + (-1) ** b[0] * b[1]
    if total == 0:
        return (a[0] & b[0] if a[1] == b[1] == 0 else 0), Fraction(0)
    return int(total < 0), abs(total)


def minus(a, b):
    return plus(a, b and (1 - b[0], b[1]))


# The operator --------------------------------------------------------------------------------------------------------


def numbers(array):
    """Values of an array, flat; integers as integers."""
    name = array.dtype.name
    if name not in FORMATS:
        return array.ravel().tolist()
    return [decode(bits, name) for bits in np.ascontiguousarray(array).view(f"u{array.itemsize}").ravel().tolist()]


def dequantised(x, column, token, a):
    """C2, C3."""
    if a["weight_scale"] is None:
        return x
    bias = a["bias"] and a["bias"][column]
    if isinstance(bias, int):
        x = (x + bias + 2**31) % 2**32 - 2**31
    f = rounded(times(rounded(of_integer(x)), a["weight_scale"][column]))
    if a["activation_scale"]:
        f = rounded(times(f, a["activation_scale"][token]))
    if a["bias"] and not isinstance(bias, int):
        f = rounded(plus(f, bias))
    return f


def rotated(head, cos, sin, step):
    """C4; `step` is the type that each operation is rounded to."""
    half = len(head) // 2
    out = []
    for j in range(2 * half):
        product = rounded(times(head[j], cos[j]), step)
        other = rounded(times(head[j - half if j >= half else j + half], sin[j]), step)
        out.append(rounded((plus if j >= half else minus)(product, other), step))
    return out


def code(value, scale, offset):
    """C6."""
    value = rounded(over(value, scale))
    if offset is not None:
        value = rounded(plus(value, offset))
    if value is None:
        return 0
    sign, magnitude = value
    magnitude = 1000 if magnitude is INFINITE else min(round(magnitude), 1000)
    return max(-128, min(127, -magnitude if sign else magnitude))


def per_channel(array, heads, dim):
    """Scales or offsets of any shape as [heads][dim], or None."""
    if array is None:
        return None
    values = numbers(array)
    if len(values) == 1:
        values = values * heads * dim
    elif len(values) == heads and array.ndim == 2 and array.shape[1] == 1:
        values = [value for value in values for _ in range(dim)]
    return [values[head * dim : head * dim + dim] for head in range(heads)]


def dequant_rope_quant_kvcache(arguments):
    """Expected results of a call whose operands are good: bits of q, k, v (lists), k_cache and v_cache (arrays)."""
    given = arguments.get
    x, cos_array, cache = arguments["x"], arguments["cos"], arguments["k_cache"]
    output = cos_array.dtype.name
    page, (heads, dim) = given("cache_mode") == "page", cache.shape[2:]
    steps = x.shape[1] if x.ndim == 3 else 1
    width, tokens = x.shape[-1], x.shape[0] * steps
    integer = x.dtype.name == "int32"
    a = {name: numbers(given(name)) if integer and given(name) is not None else None
         for name in ("weight_scale", "activation_scale", "bias")}  # fmt: skip
    values, cos, sin = numbers(x), numbers(cos_array), numbers(arguments["sin"])
    positions = range(tokens) if given("positions") is None else given("positions").tolist()  # I10
    columns = cos_array.shape[-1]
    scales = {name: per_channel(given(name), heads, dim) for name in ("scale_k", "scale_v", "offset_k", "offset_v")}
    ascend = given("numerics") == "ascend" and output == "float16"  # C7
    indices = arguments["indices"].tolist()
    results = {"q": [], "k": [], "v": [], "k_cache": cache.copy(), "v_cache": arguments["v_cache"].copy()}
    for t in range(tokens):
        turn = [(table[positions[t] * columns :][:columns] * 2)[:dim] for table in (cos, sin)]
        row = [dequantised(values[t * width + c], c, t, a) for c in range(width)]
        index = indices[t if page else t // steps]
        where = divmod(index, cache.shape[1]) if page else (t // steps, index + t % steps)
        for head in range(width // dim):
            part = row[head * dim : head * dim + dim]
            kv = head - (width // dim - 2 * heads)  # k's heads, then v's
            if kv < heads:
                if ascend:
                    part = [rounded(value, "float16") for value in part]
                part = rotated(part, *turn, "float16" if ascend else "float32")
            name = "q" if kv < 0 else "k" if kv < heads else "v"
            results[name] += [encode(rounded(value, output), output) for value in part]
            if kv >= 0 and index != -1:  # I3
                h, scale, offset = kv % heads, scales[f"scale_{name}"], scales[f"offset_{name}"]
                results[f"{name}_cache"][where][h] = [code(part[j], scale[h][j], offset and offset[h][j]) for j in range(dim)]
    return results
