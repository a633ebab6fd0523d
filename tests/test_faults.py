"""Faults that other projects shipped at this job, F01 to F48: where bytes go and what they are, under every ISA.

One test a fault, with its relatives: the other dtypes, K and V, vector part and tail, first and last row. F49 and later are in
test_faults_process.py; docs/testing.md says where each fault comes from, and which other tests cover it.
"""

import signal
import subprocess
import sys
from pathlib import Path

import kvquant
import numpy as np
import pytest
from calls import bits, call, codes, f32, hex32, one_token, refused, rows, the_one, tokens_of_codes
from cases import PAIRS, TYPES, Built, Case, build, difference, narrow
from memory import Sparse, guarded

DIMS = (2, 34, 66)  # one column in a tail; whole blocks and a tail


def agree(arguments, isa, *buffers):
    """Reference and kernel leave the same bytes in these buffers and results, starting from the same memory."""
    built = Built()
    built.arguments, built.buffers = arguments, {str(number): buffer for number, buffer in enumerate(buffers)}
    built.freeze()
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)
    assert difference(expected, got) is None, difference(expected, got)


# Addressing ----------------------------------------------------------------------------------------------------------

F01_ROWS = 1 << 20  # of 4096 bytes: 4 GiB, so that row 524288 begins at 2^31
F01_LAYOUTS = {
    "flat": lambda k, v: (k.reshape(F01_ROWS, 1, 32, 128), v.reshape(F01_ROWS, 1, 32, 128)),
    "paged": lambda k, v: (k.reshape(-1, 16, 32, 128), v.reshape(-1, 16, 32, 128)),
    "batches": lambda k, v: (k.reshape(4, -1, 32, 128), v.reshape(4, -1, 32, 128)),
    "head_major": lambda k, v: tuple(c.reshape(4, 32, -1, 128).transpose(0, 2, 1, 3) for c in (k, v)),
    "padded_page": lambda k, v: tuple(c.reshape(-1, 64, 32, 128)[:, :63] for c in (k, v)),
    "interleaved": lambda k, v: tuple(np.moveaxis(k.reshape(-1, 2, 16, 32, 128), 1, 0)),
    "side_by_side": lambda k, v: (k.reshape(-1, 16, 32, 256)[..., :128], k.reshape(-1, 16, 32, 256)[..., 128:]),
}


@pytest.mark.parametrize("layout", F01_LAYOUTS)
def test_fault_F01_slot_times_row_size_in_32_bits(layout, pair, isa, executed):
    contiguous = layout == "batches"
    results = []
    for name in ("reference", isa):
        memory = Sparse(F01_ROWS * 4096), Sparse(F01_ROWS * 4096)
        caches = F01_LAYOUTS[layout](*(m.bytes.view(np.int8) for m in memory))
        total = caches[0].shape[0] * caches[0].shape[1]
        slots = [262143, 262143, 0, 262143] if contiguous else [total // 2 - 1, total // 2, total // 2 + 1, total - 1]
        arguments = tokens_of_codes(pair, [1, 2, 3, 4], (1, 1, 32, 128), slots)
        arguments |= {"k_cache": caches[0], "v_cache": caches[1], "cache_mode": "contiguous" if contiguous else "page"}
        if name == "reference":
            kvquant.reference.dequant_rope_quant_kvcache(**arguments)
        else:
            kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa)
        for token, slot in enumerate(slots):
            row = (token, slot) if contiguous else divmod(slot, caches[0].shape[1])
            assert (caches[0][row] == token + 1).all() and (caches[1][row] == -token - 1).all()
        results.append([m.contents() for m in memory])
    assert results[0] == results[1]  # nothing else in eight gigabytes
    executed("I5", isa, pair)


def apart(array, axis, stride):
    """A copy of `array` in lazily mapped memory with this stride on `axis`; and the memory."""
    strides = [stride if i == axis else s for i, s in enumerate(array.strides)]
    memory = Sparse(sum(s * (n - 1) for s, n in zip(strides, array.shape)) + array.itemsize + 64)
    copy = np.ndarray(array.shape, array.dtype, memory.bytes, 64, strides)
    copy[...] = array
    return copy, memory


@pytest.mark.parametrize("name", ["x", "cos", "sin", "q", "k", "v", "indices"])
def test_fault_F71_input_and_output_rows_apart_by_more_than_31_bits(name, pair, isa):
    built = build(Case(pair=pair, tokens=3, dim=34, rank=2, cache_mode="page", kv_output=True, data="special"))
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    built.restore()
    if name in "qkv":
        shape = (3, built.arguments["k_cache"].shape[2] if name != "q" else 4, 34)
        array, memory = apart(np.zeros(shape, TYPES[pair[1]]), 0, 2**31 + 64)
        built.arguments["out"] = tuple(array if name == which else None for which in "qkv")
    else:
        built.arguments[name], memory = apart(built.arguments[name], 0, 2**31 + 64)
    got = built.observe(kvquant.dequant_rope_quant_kvcache(**built.arguments, isa=isa))
    assert difference(expected, got) is None
    assert len(memory.contents()) <= 6  # three rows, each on two pages at most


@pytest.mark.parametrize("dim", [8, 34])
def test_fault_F03_strides_of_interleaved_caches(dim, pair, isa):
    for slots in ([0, 5, 15], [15, 0, 7]):
        for make in (
            lambda: np.zeros((4, 2, 4, 2, dim), np.int8),  # [:, 0] and [:, 1]
            lambda: np.zeros((2, 4, 4, 2, dim), np.int8).swapaxes(0, 1),
            lambda: np.zeros((4, 4, 2, 2, dim), np.int8).swapaxes(1, 2),  # K and V of a row side by side
            lambda: np.zeros((4, 2, 2, 4, dim), np.int8).swapaxes(2, 3),  # head-major
        ):
            kv = make()
            kv[...] = 77
            arguments = tokens_of_codes(pair, [1, 2, 3], (4, 4, 2, dim), slots, cache_mode="page")
            arguments |= {"k_cache": kv[:, 0], "v_cache": kv[:, 1]}
            agree(arguments, isa, kv)
            for side in (0, 1):
                by_slot = np.array(rows(kv[:, side])).ravel()
                assert by_slot[slots].tolist() == [[1, 2, 3], [-1, -2, -3]][side]
                assert (np.delete(by_slot, slots) == 77).all()


@pytest.mark.parametrize("stride", [7, 0, -7, 2**40, -(2**62)])
def test_fault_F06_strides_of_axes_of_size_1(stride, pair, isa):
    for shape, axis in (((4, 1, 2, 8), 1), ((1, 4, 2, 8), 0), ((2, 4, 1, 8), 2), ((1, 1, 1, 34), 1)):
        tokens = min(3, shape[0] * shape[1])
        plain = tokens_of_codes(pair, np.arange(1, tokens + 1), shape, np.arange(tokens)[::-1], cache_mode="page")
        expected = call(plain, isa)
        odd = dict(plain)
        for name in ("k_cache", "v_cache"):
            strides = [stride if i == axis else s for i, s in enumerate(plain[name].strides)]
            odd[name] = np.lib.stride_tricks.as_strided(np.full(shape, 77, np.int8), shape, strides)
        got = kvquant.dequant_rope_quant_kvcache(**odd, isa=isa)
        assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]


# Slots ---------------------------------------------------------------------------------------------------------------


def test_fault_F07_padding_must_not_wrap_to_the_last_slot(pair, isa):
    for shape in ((4, 1, 2, 34), (1, 4, 2, 34), (2, 2, 2, 34)):
        arguments = tokens_of_codes(pair, [5, 6, 7], shape, [0, -1, 1], cache_mode="page", padding_index=-1)
        got = call(arguments, isa)
        assert np.ravel(rows(got[3])).tolist() == [5, 7, 77, 77]
        assert np.ravel(rows(got[4])).tolist() == [-5, -7, 77, 77]
        refused(IndexError, r"indices\[1\]", arguments, isa, padding_index=None)
    arguments = tokens_of_codes(pair, [5, 6, 7], (3, 4, 1, 2), [0, -1, 3], padding_index=-1)  # contiguous, rank 2
    assert rows(call(arguments, isa)[3]) == [[5, 77, 77, 77], [77] * 4, [77, 77, 77, 7]]


@pytest.mark.parametrize("side", ["front", "back"])
def test_fault_F09_more_tokens_than_slots_and_more_slots_than_tokens(side, pair, isa):
    for tokens, slots in ((7, 5), (5, 7), (5, 0), (1, 2)):
        arguments = tokens_of_codes(pair, np.arange(tokens), (8, 2, 1, 34), np.arange(tokens), cache_mode="page")
        for index_type in (np.int32, np.int64):
            arguments["indices"] = guarded(np.arange(slots, dtype=index_type), side)
            refused(ValueError, "^indices", arguments, isa)
        refused(ValueError, "^indices", arguments, isa, cache_mode="contiguous")


def test_fault_F11_the_last_of_equal_slots_wins_every_time(pair, isa):
    values = np.arange(4096) % 100
    arguments = tokens_of_codes(pair, values, (4, 1, 1, 34), np.full(4096, 3), cache_mode="page", allow_duplicates=True)
    refused(ValueError, r"indices\[1\].*3", arguments, isa, allow_duplicates=False)
    for num_threads in (1, 2, 8):
        for _ in range(5):
            arguments["k_cache"][...] = arguments["v_cache"][...] = 77
            kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=num_threads)
            assert rows(arguments["k_cache"]) == [[77], [77], [77], [95]]
            assert rows(arguments["v_cache"]) == [[77], [77], [77], [-95]]


@pytest.mark.parametrize("position", [0, 31, 63])
def test_fault_F13_a_bad_slot_is_found_before_anything_is_written(position, pair, isa):
    arguments = tokens_of_codes(pair, np.arange(64), (8, 8, 1, 34), np.arange(64), cache_mode="page", kv_output=True)
    out = tuple(np.full((64, 1, 34), 9, TYPES[pair[1]]) for _ in "qkv")
    for bad in (64, -1, 2**31, -(2**63)):
        arguments["indices"] = np.arange(64)
        arguments["indices"][position] = bad
        for num_threads in (1, 8):
            refused(IndexError, rf"indices\[{position}\].*{bad}", arguments, isa, out=out, num_threads=num_threads)
            assert all((array == 9).all() for array in out)
    arguments["indices"][position] = position
    assert np.ravel(rows(call(arguments, isa)[3])).tolist() == list(range(64))


def test_fault_F15_nothing_is_divided_by_zero_heads(pair, isa):
    arguments = tokens_of_codes(pair, [5], (1, 1, 1, 2), [0], cache_mode="page")
    for axis, mode in ((0, "page"), (1, "page"), (2, "page"), (3, "page"), (1, "contiguous"), (2, "contiguous")):
        shape = [0 if i == axis else n for i, n in enumerate((1, 1, 1, 2))]
        caches = {name: np.zeros(shape, np.int8) for name in ("k_cache", "v_cache")}
        for splits in ([2, 2, 2], [6, 0, 0]):
            refused(ValueError, "^k_cache", arguments, isa, **caches, cache_mode=mode, size_splits=splits)
    no_q = {**arguments, "x": arguments["x"][:, 2:], "size_splits": [0, 2, 2]}  # Nq = 0 is allowed
    if pair[0] == "int32":
        no_q["weight_scale"] = np.ones(4, np.float32)
    assert codes(call(no_q, isa)) == ([5, 5], [-5, -5])


# Rotation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [2, 16, 33])
def test_fault_F17_halves_are_paired_not_neighbours(half, pair, isa):
    k = np.arange(1, 2 * half + 1)
    got = call(one_token(pair, k, cos=0, sin=1, kv_output=True), isa)
    expected = np.concatenate([-k[half:], k[:half]])
    for array in (got[0], got[1], got[3]):
        assert array.ravel().astype(int).tolist() == expected.tolist()
    assert codes(got)[1] == k.tolist()  # v stays
    if half == 2:
        assert expected.tolist() == [-3, -4, 1, 2]  # paired with neighbours: -2, 1, -4, 3


def test_fault_F19_rotation_of_strided_input(pair, isa):
    """Whole heads only: partial rotation does not exist here."""
    for dim in (8, 34):
        head = np.arange(1, dim + 1)
        big = narrow(np.full((5, 6 * dim + 16), 99), pair[0])
        big[:, 8:-8] = np.tile(head, 6)
        arguments = tokens_of_codes(pair, np.zeros(5), (5, 1, 1, dim), np.arange(5), cache_mode="page", kv_output=True)
        arguments |= {
            "x": big[:, 8:-8],
            "cos": narrow(np.zeros((5, dim)), pair[1]),
            "sin": narrow(np.ones((5, dim)), pair[1]),
            "size_splits": [4 * dim, dim, dim],
        }
        if pair[0] == "int32":
            arguments["weight_scale"] = np.ones(6 * dim, np.float32)
        q, k, v, k_cache, v_cache = call(arguments, isa)
        turned = np.concatenate([-head[dim // 2 :], head[: dim // 2]])
        assert (q == turned).all() and (k == turned).all() and (v == head).all()
        assert (k_cache == turned).all() and (v_cache == head).all()


def test_fault_F24_heads_of_k_and_v_have_their_own_count(pair, isa):
    arguments = one_token(pair, np.arange(32, 40), np.arange(40, 48), np.arange(32), kv_output=True)
    arguments["size_splits"] = [32, 8, 8]
    got = call(arguments, isa)
    assert [a.ravel().astype(int).tolist() for a in got[:3]] == [list(range(32)), list(range(32, 40)), list(range(40, 48))]
    assert codes(got) == (list(range(32, 40)), list(range(40, 48)))
    short = {**arguments, "x": np.ascontiguousarray(arguments["x"][:, :47])}
    refused(ValueError, "size_splits|x", short, isa)


# Quantiser -----------------------------------------------------------------------------------------------------------


def k_and_v_codes(pair, values, isa, repeat=1, **options):
    """The codes of these values in K (cos 1, sin 0) and in V."""
    values = np.tile(np.asarray(values, np.float32), repeat)
    k_values = np.where(np.isfinite(values), values, 0)  # the rotation would make a NaN of infinity times 0
    return codes(call(one_token(pair, k_values, values, **options), isa))


@pytest.mark.parametrize("repeat", [1, 11])
def test_fault_F25_saturation_reaches_minus_128(repeat, pair, isa):
    got = k_and_v_codes(pair, [-129, -128, -127, 126, 127, 128], isa, repeat)
    assert got == ([-128, -128, -127, 126, 127, 127] * repeat,) * 2


@pytest.mark.parametrize("repeat", [1, 11])
def test_fault_F27_values_beyond_int32(repeat, pair, isa):
    values = [65504, 60000, -65504, np.inf, -60000, -np.inf]
    if pair[1] != "float16":
        values = [f32(0x4F330000), 2147483648, f32(0x7E960000), np.inf, -f32(0x4F330000), -np.inf]  # about 3e9 and 1e38
    expected = [127 if value > 0 else -128 for value in values]
    k, v = k_and_v_codes(pair, values, isa, repeat)
    assert v == expected * repeat
    assert k == [code if np.isfinite(value) else 0 for code, value in zip(expected, values)] * repeat


@pytest.mark.parametrize("repeat", [1, 17])
def test_fault_F29_every_type_rounds_and_none_truncates(repeat, pair, isa):
    v = f32(0x3D4D0000) if pair[0] == "bfloat16" else np.float32(0.050018310546875)
    scale = 0.0999755859375
    assert k_and_v_codes(pair, [v, -v], isa, repeat, scale_k=scale, scale_v=scale) == ([1, -1] * repeat,) * 2


def test_fault_F30_nan_stores_0_in_every_lane(pair, isa):
    lanes = [0, 1, 7, 8, 15, 16, 31, 32, 33]
    for nan in (f32(0x7FC00000), f32(0xFFC00000)):
        for lane in lanes:
            values = np.full(34, 5, np.float32)
            values[lane] = nan
            k, v = codes(call(one_token(pair, values), isa))
            assert v == [0 if i == lane else 5 for i in range(34)]
            assert k == [0 if i % 17 == lane % 17 else 5 for i in range(34)]  # the rotation carries it to its partner
    values = np.full(34, 5, np.float32)
    values[lanes] = np.nan
    assert codes(call(one_token(pair, np.full(34, 5), values), isa))[1] == [0 if i in lanes else 5 for i in range(34)]


@pytest.mark.parametrize("name", ["scale_k", "scale_v"])
def test_fault_F32_a_scale_of_zero_is_an_error(name, pair, isa):
    arguments = tokens_of_codes(pair, [5, 6], (2, 1, 1, 34), [0, 1], cache_mode="page")
    for position in (0, 3, 16, 33):
        for bad in (0.0, -0.0, np.nan, np.inf, -np.inf):
            scale = np.ones(34, np.float32)
            scale[position] = bad
            refused(ValueError, rf"^{name}\[{position}\]", arguments, isa, **{name: scale})
    scale = np.ones(34, np.float32)
    scale[3] = -1  # negative scales are allowed
    got = call({**arguments, name: scale}, isa)[3 if name == "scale_k" else 4]
    sign = 1 if name == "scale_k" else -1
    assert (got[:, 0, 0, 3] == [-5 * sign, -6 * sign]).all() and (np.delete(got, 3, -1)[0] == 5 * sign).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] == "float32"], ids="-".join)
def test_fault_F34_products_are_not_fused(pair, dim, isa):
    """Other output types have values of their own: test_numbers.py::test_C1_products_are_not_fused."""
    x1, cos, x2, sin, scale = hex32("be039e97 3faee846 bf2a4a33 3eb3f921 3cbea8e3")
    got = call(one_token(pair, np.repeat([x1, x2], dim // 2), cos=cos, sin=sin, scale_k=scale), isa)
    assert the_one(codes(got)[0][: dim // 2]) == 2  # fused: 3


# float16 and bfloat16 ------------------------------------------------------------------------------------------------


def narrowed(output, value, isa, dim):
    """The bits of q, k and v for one float32 value in every column: one number for all three."""
    pair = ("int32", output)
    got = call(one_token(pair, np.full(dim, value, np.float32), kv_output=True), isa)
    return the_one([the_one(bits(array)) for array in got[:3]])


@pytest.mark.parametrize("dim", DIMS)
def test_fault_F37_bfloat16_rounds_to_even(dim, isa):
    for value, expected in ((0x3E89CCD5, 0x3E8A), (0xBE89CCD5, 0xBE8A), (0x3E898000, 0x3E8A), (0x3E888000, 0x3E88)):
        assert narrowed("bfloat16", f32(value), isa, dim) == expected


@pytest.mark.parametrize("dim", DIMS)
def test_fault_F39_float16_rounds_the_same_in_software_and_hardware(dim, isa):
    assert narrowed("float16", 1.000732421875, isa, dim) == 0x3C01  # on scalar and on F16C
    assert narrowed("float16", -1.000732421875, isa, dim) == 0xBC01
    assert narrowed("bfloat16", f32(0x3F80C000), isa, dim) == 0x3F81


@pytest.mark.parametrize("dim", DIMS)
def test_fault_F41_a_carry_reaches_the_exponent(dim, isa):
    for value, float16, bfloat16 in ((0.49999, 0x3800, 0x3F00), (0.99999, 0x3C00, 0x3F80), (-0.99999, 0xBC00, 0xBF80)):
        assert narrowed("float16", value, isa, dim) == float16
        assert narrowed("bfloat16", value, isa, dim) == bfloat16


# Memory of vector code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["front", "back"])
def test_fault_F43_nothing_beyond_an_operand(side, pair, isa):
    for dim in (2, 4, 6, 10, 14, 18, 30, 34, 66):
        case = Case(pair=pair, tokens=1, dim=dim, heads=(1, 1), rank=2, cache_mode="page", kv_output=True, offsets="both",
                    bias=pair[1], activation_scale=True, out="contiguous")  # fmt: skip
        built = build(case)
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        built.restore()
        a = built.arguments
        a |= {name: guarded(value, side) for name, value in a.items() if isinstance(value, np.ndarray)}
        a["out"] = tuple(guarded(array, side) for array in a["out"])
        q, k, v, k_cache, v_cache = kvquant.dequant_rope_quant_kvcache(**a, isa=isa)
        assert [array.tobytes() for array in (q, k, v)] == [expected[name][2] for name in "qkv"]
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            assert expected[f"buffer of {name}"].startswith(cache.tobytes())


@pytest.mark.parametrize("side, offset", [("back", 64), ("front", -1)])
def test_guarded_memory_is_guarded(side, offset):
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import ctypes, numpy as np
from memory import guarded
array = guarded(np.zeros(64, np.uint8), {side!r})
print(ctypes.string_at(array.ctypes.data, 64) == bytes(64), flush=True)
ctypes.string_at(array.ctypes.data + {offset}, 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "True\n"), done.stderr


@pytest.mark.parametrize("dim", [32, 34, 64, 96])
def test_fault_F46_columns_keep_their_order(dim, pair, isa):
    ascending = np.arange(dim)
    got = call(one_token(pair, ascending, kv_output=True), isa)
    for array in got:
        assert array.ravel().astype(int).tolist() == ascending.tolist()


@pytest.mark.parametrize("base", [1, 2, 4])
def test_fault_F48_any_alignment(base, pair, isa):
    """Every operand `base` bytes past a 64-byte boundary, also where that is not a multiple of its item size."""
    case = Case(pair=pair, tokens=5, dim=34, cache_mode="page", kv_output=True, offsets="both", bias="float32",
                activation_scale=True, out="contiguous", data="special")  # fmt: skip
    built = build(case)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    built.restore()

    def moved(array):
        room = np.zeros(array.nbytes + 128, np.uint8)
        copy = np.ndarray(array.shape, array.dtype, room, -room.ctypes.data % 64 + base)
        copy[...] = array
        return copy

    a = built.arguments
    a |= {name: moved(value) for name, value in a.items() if isinstance(value, np.ndarray)}
    a["out"] = tuple(moved(array) for array in a["out"])
    got = kvquant.dequant_rope_quant_kvcache(**a, isa=isa)
    assert [array.tobytes() for array in got[:3]] == [expected[name][2] for name in "qkv"]
    for name, cache in zip(("k_cache", "v_cache"), got[3:]):
        assert expected[f"buffer of {name}"].startswith(cache.tobytes())
