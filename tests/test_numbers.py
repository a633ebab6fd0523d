"""Clauses C1 to C8 of docs/contract.md, one test each for every ISA and type pair, with the numbers that the page gives.

Expected values are written by hand; the reference is held to them too (see `call`).
"""

import ctypes
import itertools
import platform
import subprocess
import sys
from pathlib import Path

import kvquant
import numpy as np
import pytest
from calls import bits, call, codes, copies, f32, hex32, one_token, refused, the_one
from cases import PAIRS, TYPES, Case, build, difference, narrow


def v_token(pair, values, **options):
    """A one-token call with these dequantised values in V and zeros elsewhere."""
    return one_token(pair, np.zeros(len(values)), values, **options)


# Half a head: one column in the tail of a block, whole blocks, blocks and a tail.
HALVES = (1, 16, 33)


# C1 ------------------------------------------------------------------------------------------------------------------

# Type of the tables -> x1, cos, x2, sin (float32 x), scale, and K's first code: with two roundings, with a fused product.
FUSED = {
    "float16": ("3f6c5e55 3f654000 3ee62f56 3f1ac000 3ebd7690", 2, 1),
    "bfloat16": ("3dfe29cf 3f960000 be65d94e 3f770000 3e7720c6", 1, 2),
    "float32": ("be039e97 3faee846 bf2a4a33 3eb3f921 3cbea8e3", 2, 3),
}
# The same for the second half: x1, x2, cos, sin, scale.
FUSED_SECOND_HALF = {
    "float16": ("3e7ce832 3f0da969 3f796000 3fa78000 3eb0964a", 3, 2),
    "bfloat16": ("3f2706bf bf605599 3ece0000 3fae0000 3eb663a5", 2, 1),
    "float32": ("bc446b5e 3d3606c7 3f53b225 3f652f72 3c8e1584", 2, 1),
}


def test_C1_products_are_not_fused(pair, isa, executed):
    x_type, output = pair
    if x_type in ("float16", "bfloat16"):
        # Products of 16-bit values are exact; what a fused product changes is an overflow.
        big = 2.0**127 if output == "bfloat16" else 2.0**15
        for half in HALVES:
            got = call(one_token(pair, [big] * 2 * half, cos=[2] * half + [1] * half, sin=[1] * half + [0] * half), isa)
            # bfloat16: the product is infinite. float16: 2^16 is no overflow in float32, so 2^15 comes out.
            assert the_one(bits(got[0])[:half]) == {"bfloat16": 0x7F80, "float16": 0x7800}[output]
    else:
        for half in HALVES:
            words, right, wrong = FUSED[output]
            x1, cos, x2, sin, scale = hex32(words)
            k = np.repeat([x1, x2], half)
            k_codes, _ = codes(call(one_token(pair, k, cos=cos, sin=sin, scale_k=scale), isa))
            assert the_one(k_codes[:half]) == right != wrong
            words, right, wrong = FUSED_SECOND_HALF[output]
            x1, x2, cos, sin, scale = hex32(words)
            k = np.repeat([x1, x2], half)
            k_codes, _ = codes(call(one_token(pair, k, cos=cos, sin=sin, scale_k=scale), isa))
            assert the_one(k_codes[half:]) == right != wrong
    executed("C1", isa, pair)


def test_C1_subnormals_are_kept(pair, isa, executed):
    tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}[pair[1]]
    got = call(one_token(pair, [tiny, tiny], [tiny, -tiny], scale_k=tiny, scale_v=tiny, kv_output=True), isa)
    assert bits(got[0]) == bits(got[1]) == [1, 1]
    assert codes(got) == ([1, 1], [1, -1])
    executed("C1", isa, pair)


class FloatState:
    """The thread's floating-point environment, through the C library."""

    libm = ctypes.CDLL("libm.so.6")

    def __init__(self):
        self.raw = (ctypes.c_uint32 * 16)()
        self.libm.fegetenv(self.raw)
        self.x86 = platform.machine() == "x86_64"

    def set(self, rounding, flush, sticky):
        """rounding: 0 nearest, 1 down, 2 up, 3 to zero; flush: bit 0 results, bit 1 inputs; sticky: all flags set."""
        raw = (ctypes.c_uint32 * 16)(*self.raw)
        if self.x86:
            flags = 0x3D if sticky else 0
            raw[7] = 0x1F80 | rounding << 13 | (flush & 1) << 15 | (flush >> 1) << 6 | flags  # MXCSR
        else:
            raw[0] = (0, 2, 1, 3)[rounding] << 22 | (0b11 << 24 if flush else 0)  # FPCR: RMode, FZ, DN
            raw[1] = 0x1F if sticky else 0  # FPSR
        self.libm.fesetenv(raw)
        return self.read()

    def read(self):
        """(control, sticky) bits."""
        now = (ctypes.c_uint32 * 16)()
        self.libm.fegetenv(now)
        return (now[7] & ~0x3F, now[7] & 0x3F) if self.x86 else (now[0], now[1])

    def restore(self):
        self.libm.fesetenv(self.raw)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_C1_any_floating_point_state(num_threads, pair, isa, executed):
    """4 rounding modes x flush results/inputs x sticky flags: same bytes, state given back."""
    built = build(Case(pair=pair, tokens=64, dim=34, data="special", kv_output=True, out="contiguous", offsets="both"))
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    bad = copies(built.arguments) | {"scale_k": np.full(1, np.nan, np.float32), "out": None}
    state = FloatState()
    for rounding in range(4):
        for flush in range(4):
            for sticky in (False, True):
                built.restore()
                before = state.set(rounding, flush, sticky)
                try:
                    result = kvquant.dequant_rope_quant_kvcache(
                        **{**built.arguments, "num_threads": num_threads, "isa": isa}
                    )
                    after = state.read()
                    with pytest.raises(ValueError):
                        kvquant.dequant_rope_quant_kvcache(**{**bad, "isa": isa})
                    after_error = state.read()
                finally:
                    state.restore()
                assert difference(expected, built.observe(result)) is None, (rounding, flush)
                assert after == before, f"state {before} became {after}"
                assert after_error[0] == before[0]  # pytest.raises may compute, so no word on its sticky bits
    executed("C1", isa, pair)


def test_C1_no_trap_fires(isa, executed):
    """With traps for invalid, division by zero and overflow on, in a process of its own: SIGFPE would end it."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import ctypes, kvquant
from cases import PAIRS, Case, build
libm = ctypes.CDLL("libm.so.6")
for pair in PAIRS:
    built = build(Case(pair=pair, tokens=64, dim=34, data="special", kv_output=True))
    libm.feenableexcept(1 | 4 | 8)
    kvquant.dequant_rope_quant_kvcache(**{{**built.arguments, "isa": {isa!r}, "num_threads": 2}})
    libm.fedisableexcept(0x3d)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    for pair in PAIRS:
        executed("C1", isa, pair)


# C2, C3 --------------------------------------------------------------------------------------------------------------


def dequantised(pair, dim, x, weight_scale, scale, **more):
    """A call with one x in all columns."""
    arguments = one_token(pair, np.full(dim, np.float32(weight_scale)), scale_v=scale)
    arguments["x"] = np.full_like(arguments["x"], x)
    for name in ("activation_scale", "bias"):
        if name in more:
            size = 1 if name == "activation_scale" else arguments["x"].size
            arguments[name] = np.full(size, more[name][0], more[name][1])
    return arguments


def test_C2_order_of_the_steps(pair, isa, executed):
    def code(*args, **more):
        return the_one([the_one(codes(call(dequantised(pair, 2 * h, *args, **more), isa))[1]) for h in HALVES])

    if pair[0] != "int32":  # C2 does not apply: x is taken as it is, without a weight_scale
        assert codes(call(v_token(pair, [3, -4]), isa))[1] == [3, -4]
    else:
        floats = [TYPES[name] for name in ("float16", "bfloat16", "float32")]
        # int32 bias wraps: 2^31-1 + 1 is -2^31.
        assert code(2**31 - 1, 2.0**-31, 1, bias=(1, np.int32)) == -1
        # int32 bias is added before the conversion to float32: (2^24+1) + 1 stays even and exact.
        assert code(2**24 + 1, 2.0**-24, 2, bias=(1, np.int32)) == 1
        for dtype in floats:
            assert code(2**24 + 1, 2.0**-24, 2, bias=(2.0**-24, dtype)) == 0
        # The activation scale reaches an int32 bias, not a float one.
        two = (2, np.float32)
        assert code(1, 1, 1, activation_scale=two, bias=(1, np.int32)) == 4
        for dtype in floats:
            assert code(1, 1, 1, activation_scale=two, bias=(1, dtype)) == 3
        # (x * weight_scale) * activation_scale: any other grouping gives 2.
        weight, activation, scale = hex32("399d8e8a 3fd09897 45a90694")
        assert code(16566495, weight, scale, activation_scale=(activation, np.float32)) == 1
        # x * weight_scale is rounded before the bias is added: a fused product gives 2.
        weight, scale = hex32("39b07e4a 44a16fba")
        for dtype in floats:
            assert code(5754693, weight, scale, bias=(0.01019287109375, dtype)) == 1
    executed("C2", isa, pair)


def test_C3_float_x_looks_at_x_only(pair, isa, executed):
    arguments = one_token(pair, [3, -4], [5, 6])
    if pair[0] == "int32":  # the other side of the rule: here all three count
        arguments["bias"] = np.full(6, 2, np.float32)
        arguments["activation_scale"] = np.full(1, 3, np.float32)
        assert codes(call(arguments, isa)) == ([11, -10], [17, 20])
        refused(TypeError, "weight_scale", {**arguments, "weight_scale": None}, isa)
    else:
        for nonsense in (None, "anything", np.full(1, np.nan), np.zeros((2, 2), object)):
            more = {"weight_scale": nonsense, "activation_scale": nonsense, "bias": nonsense}
            assert codes(call(arguments, isa, **more)) == ([3, -4], [5, 6])
    executed("C3", isa, pair)


# C4 to C7 ------------------------------------------------------------------------------------------------------------


def test_C4_half_rotation_of_q_and_k(pair, isa, executed):
    got = call(one_token(pair, [1, 2, 3, 4], cos=0, sin=1), isa)
    assert got[0].ravel().tolist() == [-3, -4, 1, 2]
    assert codes(got) == ([-3, -4, 1, 2], [1, 2, 3, 4])  # v is not rotated
    # Each half reads its own half of cos and sin.
    got = call(one_token(pair, [1, 2, 3, 4], q=[4, 3, 2, 1], cos=[1, 2, 3, 4], sin=[5, 6, 7, 8]), isa)
    assert got[0].ravel().tolist() == [4 - 10, 6 - 6, 6 + 28, 4 + 24]
    assert codes(got) == ([1 - 15, 4 - 24, 9 + 7, 16 + 16], [1, 2, 3, 4])
    executed("C4", isa, pair)


# a, b, s -> bits of a*1 - b*s in the output type; every input exists in that type.
INF, NAN = np.inf, np.nan
NARROWED = {
    "float16": [
        (1, -3, 2.0**-12, 0x3C01),  # 1.000732421875: above the tie
        (1, -1, 2.0**-11, 0x3C00),  # tie, to even
        (1 + 2.0**-10, -1, 2.0**-11, 0x3C02),  # tie, to even
        (1 - 2.0**-11, -1, 2.0**-12, 0x3C00),  # the carry reaches the exponent
        (65504, -16, 1, 0x7C00),  # 65520 overflows
        (65504, -15, 1, 0x7BFF),
        (2.0**-24, 0, 0, 0x0001),
        (0, -(2.0**-13), 2.0**-12, 0x0000),  # 2^-25: tie, to even
        (0, -3 * 2.0**-13, 2.0**-12, 0x0002),
        (-NAN, 0, 0, 0x7E00),
        (INF, INF, 1, 0x7E00),
        (0, INF, 0, 0x7E00),
        (-INF, 0, 0, 0xFC00),
    ],
    "bfloat16": [
        (f32(0x3E890000), -231, 227 * 2.0**-25, 0x3E8A),  # 0x3E89CCD5: truncated it would be 3E89
        (1, -1, 2.0**-8, 0x3F80),
        (1 + 2.0**-7, -1, 2.0**-8, 0x3F82),
        (1 - 2.0**-8, -1, 2.0**-9, 0x3F80),
        (f32(0x7F7F0000), -(2.0**60), 2.0**59, 0x7F80),
        (f32(0x7F7F0000), -255, 2.0**111, 0x7F7F),
        (2.0**-133, 0, 0, 0x0001),  # subnormals are kept
        (0, -(2.0**-67), 2.0**-67, 0x0000),
        (0, -3 * 2.0**-67, 2.0**-67, 0x0002),
        (-NAN, 0, 0, 0x7FC0),
        (INF, INF, 1, 0x7FC0),
        (0, INF, 0, 0x7FC0),
        (-INF, 0, 0, 0xFF80),
    ],
    "float32": [
        (1, -1, 2.0**-23, 0x3F800001),
        (1, -1, 2.0**-24, 0x3F800000),
        (1 + 2.0**-23, -1, 2.0**-24, 0x3F800002),
        (f32(0x7F7FFFFF), f32(0xFF7FFFFF), 1, 0x7F800000),
        (2.0**-149, 0, 0, 0x00000001),
        (-NAN, 0, 0, 0x7FC00000),
        (f32(0x7F800001), 0, 0, 0x7FC00000),
        (INF, INF, 1, 0x7FC00000),
        (0, INF, 0, 0x7FC00000),
        (-INF, 0, 0, 0xFF800000),
    ],
}


def test_C5_narrowing(pair, isa, executed):
    for (a, b, s, expected), half in itertools.product(NARROWED[pair[1]], HALVES):
        k = np.concatenate([np.full(half, a, np.float32), np.full(half, b, np.float32)])
        sin = np.repeat([s, 0], half)
        got = call(one_token(pair, k, k[::-1], cos=1, sin=sin, kv_output=True), isa)
        assert the_one(bits(got[0])[:half]) == the_one(bits(got[1])[:half]) == expected, f"{a} - {b}*{s}"
        if np.isnan(a):
            assert (
                the_one(bits(got[2])[half:]) == {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}[pair[1]]
            )
    if pair[0] == "int32":  # v is narrowed from the dequantised float32
        wide = {"float16": [1.000732421875, 65520], "bfloat16": [f32(0x3E89CCD5), f32(0x7F7F8000)]}
        wide = wide.get(pair[1], [f32(1), f32(0x7F7FFFFF)])
        expected = {"float16": [0x3C01, 0x7C00], "bfloat16": [0x3E8A, 0x7F80]}.get(pair[1], [1, 0x7F7FFFFF])
        assert bits(call(v_token(pair, wide, kv_output=True), isa)[2]) == expected
    executed("C5", isa, pair)


# Type of v -> v, scale, code by division, code by a product with 1/scale.
DIVIDED = {
    "float16": [("4074a000", "3d7a7ef9", 63, 62), ("4215c000", "3f6ca458", 40, 41)],
    "bfloat16": [("41720000", "3f24c416", 24, 23), ("42170000", "3ed33c28", 91, 92)],
    "float32": [("41426666", "3dcccccd", 121, 122)],
}


def test_C6_quantise(pair, isa, executed):
    def v_codes(values, scale=1.0, offset=None):
        more = {} if offset is None else {"offset_v": np.full(1, offset, np.float32)}
        by_v = codes(call(v_token(pair, values, scale_v=scale, **more), isa))[1]
        assert codes(call(v_token(pair, np.tile(values, 17), scale_v=scale, **more), isa))[1] == by_v * 17
        more = {} if offset is None else {"offset_k": np.full(1, offset, np.float32)}
        if np.isfinite(values).all():  # with sin 0 the rotation keeps finite values
            assert codes(call(one_token(pair, values, scale_k=scale, **more), isa))[0] == by_v
        return by_v

    assert v_codes([-129, -128, -127, 126, 127, 128]) == [-128, -128, -127, 126, 127, 127]
    assert v_codes([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5]) == [0, 2, 2, 0, -2, 126, 127, -128]
    assert v_codes([NAN, -NAN, INF, -INF, 7, 8]) == [0, 0, 127, -128, 7, 8]
    assert v_codes([3, -3], scale=-1) == [-3, 3]
    assert v_codes([1, -1], scale=2.0**-149) == [127, -128]
    assert v_codes([0.25, 0.75], offset=0.25) == [0, 1]
    assert v_codes([0.25, -0.75], offset=0.5) == [1, 0]  # the offset is added before rounding
    assert v_codes([INF, -INF], offset=-5) == [127, -128]
    assert v_codes([1, -1], offset=300) == [127, 127]
    if pair[1] != "float16":
        assert v_codes([2.0**31, 2.0**32, 2.0**126, -(2.0**31), -(2.0**63), 2.0**63]) == [127] * 3 + [-128] * 2 + [127]
    for v, scale, right, wrong in DIVIDED["float32" if pair[0] == "int32" else pair[0]]:
        assert v_codes([hex32(v)[0], -hex32(v)[0]], scale=hex32(scale)[0]) == [right, -right]
        assert right != wrong
    # From the unrounded value: 0.5 + 2^-13 is 1; rounded to 16 bits first it would be 0.5, that is 0.
    got = call(one_token(pair, [0.5, -(2.0**-7)], cos=1, sin=[2.0**-6, 0], kv_output=True), isa)
    assert codes(got)[0] == [1, 0]
    if pair[1] != "float32":
        assert got[1].ravel()[0] == 0.5
    executed("C6", isa, pair)


def test_C7_roundings_of_the_published_kernel(pair, isa, executed):
    def run(k, numerics, v=None, **tables):
        return call(one_token(pair, k, v, **tables, kv_output=True), isa, numerics=numerics)

    # Two products and a sum, each rounded: the last bit differs, and so does a code on a tie.
    half = 33
    tables = np.repeat([0.8369140625, 1], half), np.repeat([-0.662109375, 0], half)
    example = {"cos": tables[0], "sin": tables[1], "scale_k": hex32("3e661535")[0]}
    values = np.repeat([0.62939453125, 0.052825927734375], half)
    if pair[1] == "float16":
        plain, ascend = run(values, "fp32", **example), run(values, "ascend", **example)
        q_plain, q_ascend = (the_one(result[0].ravel()[:half].tolist()) for result in (plain, ascend))
        assert (q_plain, q_ascend) == (0.5615234375, 0.56201171875)
        assert (the_one(codes(plain)[0][:half]), the_one(codes(ascend)[0][:half])) == (2, 3)
        # K is quantised from the float16 value ...
        near = {"cos": 1, "sin": [2.0**-6, 0]}
        assert codes(run([0.5, -(2.0**-7)], "fp32", **near))[0][0] == 1
        assert codes(run([0.5, -(2.0**-7)], "ascend", **near))[0][0] == 0
        if pair[0] == "int32":
            # ... V from the float32 value, and q and k are rounded once before the rotation as well.
            assert codes(run([0.5 + 2.0**-13] * 2, "ascend")) == ([0, 0], [1, 1])
            arguments = one_token(pair, [1 + 2.0**-11] * 2, cos=1 + 2.0**-10, scale_k=2.0**-10)
            arguments["offset_k"] = np.full(1, -1000, np.float32)
            assert codes(call(arguments, isa))[0] == [26, 26]
            assert codes(call(arguments, isa, numerics="ascend"))[0] == [25, 25]
    else:
        values = narrow(values, pair[1]).astype(np.float32)
        plain, ascend = run(values, "fp32", **example), run(values, "ascend", **example)
        assert [array.tobytes() for array in plain] == [array.tobytes() for array in ascend]
    executed("C7", isa, pair)


# C8 ------------------------------------------------------------------------------------------------------------------


def test_C8_threads_splits_strides_and_alignment(pair, isa, executed):
    base = Case(pair=pair, tokens=33, dim=34, data="special", kv_output=True, offsets="both", cache_mode="page")
    built = build(base)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    for num_threads in (1, 2, 3, 8):
        got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa, num_threads=num_threads)
        assert difference(expected, got) is None, num_threads

    # The same values in one call and in 33 calls; packed and aligned, and strided at an odd address.
    flat = build(
        Case(pair=pair, tokens=33, dim=34, rank=2, cache_mode="page", data="special", kv_output=True)
    ).arguments
    whole = call(flat, isa)
    caches = {name: flat[name].copy() for name in ("k_cache", "v_cache")}
    for t in range(33):
        one = {name: flat[name][t : t + 1] for name in ("x", "cos", "sin", "indices")}
        part = kvquant.dequant_rope_quant_kvcache(**{**flat, **one, **caches, "isa": isa})
        assert [array[0].tobytes() for array in part[:3]] == [array[t].tobytes() for array in whole[:3]]
    assert caches["k_cache"].tobytes() == whole[3].tobytes()
    assert caches["v_cache"].tobytes() == whole[4].tobytes()

    odd = dict(flat)
    for name in ("x", "cos", "sin"):
        array = flat[name]
        raw = np.zeros(array.shape[0] * (array.shape[1] * array.itemsize + 5) + 1, np.uint8)
        strides = (array.shape[1] * array.itemsize + 5, array.itemsize)
        odd[name] = np.ndarray(array.shape, array.dtype, raw, 1, strides)
        odd[name][...] = array
    got = kvquant.dequant_rope_quant_kvcache(**{**odd, **{n: flat[n].copy() for n in caches}, "isa": isa})
    assert [array.tobytes() for array in got] == [array.tobytes() for array in whole]
    executed("C8", isa, pair)
