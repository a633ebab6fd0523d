"""Clauses I1 to I9 of docs/contract.md, one test each for every ISA and type pair, with the numbers that the page gives."""

import threading

import kvquant
import numpy as np
import pytest
from calls import call, codes, copies, refused, rows, tokens_of_codes
from cases import TYPES, narrow

# I1 to I3 ------------------------------------------------------------------------------------------------------------


def test_I1_contiguous(pair, isa, executed):
    arguments = tokens_of_codes(pair, [1, 2, 3, 4], (3, 4, 1, 2), [2, 0], rank=(2, 2))
    got = call(arguments, isa)
    assert rows(got[3]) == [[77, 77, 1, 2], [3, 4, 77, 77], [77] * 4]
    assert rows(got[4]) == [[77, 77, -1, -2], [-3, -4, 77, 77], [77] * 4]
    for bad in (3, -1, 4, 2**62, -(2**63)):  # 0 <= index <= C2 - S = 2
        arguments["indices"] = np.array([0, bad], np.int64)
        refused(IndexError, rf"indices\[1\].*{bad}", arguments, isa)
    refused(ValueError, "k_cache", tokens_of_codes(pair, [1, 2], (1, 4, 1, 2), [0, 0]), isa)  # C1 >= B
    executed("I1", isa, pair)


def test_I2_page(pair, isa, executed):
    arguments = tokens_of_codes(pair, [1, 2, 3], (2, 3, 2, 4), [5, 0, 3], cache_mode="page")
    got = call(arguments, isa)
    assert rows(got[3]) == [[2, 77, 77], [3, 77, 1]]
    assert rows(got[4]) == [[-2, 77, 77], [-3, 77, -1]]
    for bad in (6, -1, 2**31, 2**62, -(2**63)):
        arguments["indices"] = np.array([0, 5, bad], np.int64)
        refused(IndexError, rf"indices\[2\].*{bad}", arguments, isa)

    arguments["indices"] = np.array([4, 2, 4], np.int32)
    refused(ValueError, r"indices\[2\].*4", arguments, isa)
    for num_threads in (1, 2, 8):  # the last one wins
        got = call(arguments, isa, allow_duplicates=True, num_threads=num_threads)
        assert rows(got[3]) == [[77, 77, 2], [77, 3, 77]]
        assert rows(got[4]) == [[77, 77, -2], [77, -3, 77]]
    executed("I2", isa, pair)


def test_I2_last_duplicate_wins_on_any_number_of_threads(pair, isa, executed):
    values = np.arange(4096) % 100
    arguments = tokens_of_codes(pair, values, (2, 2, 1, 2), np.full(4096, 3), cache_mode="page", allow_duplicates=True)
    for num_threads in (1, 2, 8):
        got = call(arguments, isa, num_threads=num_threads)
        assert rows(got[3]) == [[77, 77], [77, 95]]
        assert rows(got[4]) == [[77, 77], [77, -95]]
    executed("I2 C8", isa, pair)


def test_I3_padding_index(pair, isa, executed):
    page = tokens_of_codes(pair, [1, 2, 3], (2, 2, 1, 4), [0, -1, 1], cache_mode="page")
    refused(IndexError, r"indices\[1\].*-1", page, isa)
    got = call(page, isa, padding_index=-1)
    assert rows(got[3]) == [[1, 3], [77, 77]] and rows(got[4]) == [[-1, -3], [77, 77]]
    assert got[0][1].ravel().tolist() == [2, 2, 2, 2]  # rotated all the same
    page["indices"] = np.array([0, -2, 1])
    refused(IndexError, r"indices\[1\].*-2", page, isa, padding_index=-1)

    arguments = tokens_of_codes(pair, [1, 2, 3, 4], (2, 2, 1, 2), [-1, 0], rank=(2, 2), padding_index=-1)
    got = call(arguments, isa)  # contiguous: the whole batch row
    assert rows(got[3]) == [[77, 77], [3, 4]] and rows(got[4]) == [[77, 77], [-3, -4]]
    assert got[0].reshape(4, 2)[:, 0].tolist() == [1, 2, 3, 4]
    arguments["indices"] = np.array([-1, -1])
    assert rows(call(arguments, isa)[3]) == [[77, 77], [77, 77]]
    executed("I3", isa, pair)


# I4 to I9 ------------------------------------------------------------------------------------------------------------


def test_I4_all_or_nothing(pair, isa, executed):
    arguments = tokens_of_codes(pair, np.arange(64) % 100, (8, 8, 2, 34), np.arange(64), cache_mode="page")
    arguments["out"] = (narrow(np.full((64, 1, 34), 9), pair[1]), None, None)
    untouched = [array.tobytes() for array in (arguments["k_cache"], arguments["v_cache"], arguments["out"][0])]
    faults = [
        (IndexError, r"indices\[63\]", {"indices": np.append(np.arange(63), 64)}),
        (ValueError, r"indices\[63\]", {"indices": np.append(np.arange(63), 5)}),
        (ValueError, r"scale_v\[67\]", {"scale_v": np.append(np.ones(67), 0).astype(np.float32)}),
    ]
    for error, name, fault in faults:
        for num_threads in (1, 8):
            refused(error, name, {**arguments, **fault, "num_threads": num_threads}, isa)
            now = [array.tobytes() for array in (arguments["k_cache"], arguments["v_cache"], arguments["out"][0])]
            assert now == untouched
    kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa)  # the next call works
    assert rows(arguments["k_cache"]) == (np.arange(64) % 100).reshape(8, 8).tolist()
    assert rows(arguments["v_cache"]) == (-(np.arange(64) % 100)).reshape(8, 8).tolist()
    executed("I4", isa, pair)


def test_I5_strides(pair, isa, executed):
    both = np.full((4, 2, 4, 2, 8), 77, np.int8)
    side = np.full((4, 4, 2, 16), 77, np.int8)
    heads = np.full((4, 2, 4, 8), 77, np.int8)
    arguments = tokens_of_codes(pair, [1, 2, 3], (4, 4, 2, 8), [0, 5, 15], cache_mode="page")
    plain = call(arguments, isa)
    for k_cache, v_cache in (
        (both[:, 0], both[:, 1]),
        (side[..., :8], side[..., 8:]),
        (heads.transpose(0, 2, 1, 3), np.full((4, 4, 2, 8), 77, np.int8)),
    ):
        for name in ("reference", isa):
            k_cache[...] = v_cache[...] = 77
            given = {**arguments, "k_cache": k_cache, "v_cache": v_cache}
            if name == "reference":
                kvquant.reference.dequant_rope_quant_kvcache(**given)
            else:
                kvquant.dequant_rope_quant_kvcache(**given, isa=isa)
            assert np.array_equal(k_cache, plain[3]) and np.array_equal(v_cache, plain[4])

    doubled = np.repeat(arguments["x"], 2, axis=1)[:, ::2]
    refused(ValueError, "^x: .*stride", {**arguments, "x": doubled}, isa)
    wide = np.zeros((4, 4, 2, 16), np.int8)[..., ::2]
    refused(ValueError, "^k_cache: .*stride", {**arguments, "k_cache": wide}, isa)
    executed("I5", isa, pair)


def test_I5a_overlap(pair, isa, executed):
    arguments = tokens_of_codes(pair, [1, 2, 3], (4, 4, 2, 8), [0, 5, 15], cache_mode="page")
    refused(ValueError, "k_cache|v_cache", {**arguments, "v_cache": arguments["k_cache"]}, isa)
    shared = np.zeros(4 * 4 * 2 * 8 + 1, np.int8)
    k_cache, v_cache = shared[:-1].reshape(4, 4, 2, 8), shared[1:].reshape(4, 4, 2, 8)
    refused(ValueError, "k_cache|v_cache", {**arguments, "k_cache": k_cache, "v_cache": v_cache}, isa)
    # Two axes of one written array that meet: row 1 of page 0 is row 0 of page 1.
    for strides in ((16, 16, 8, 1), (0, 16, 8, 1), (64, 16, 7, 1)):
        twisted = np.lib.stride_tricks.as_strided(np.zeros(2048, np.int8), (4, 4, 2, 8), strides)
        refused(ValueError, "^k_cache", {**arguments, "k_cache": twisted}, isa)
    # q over x.
    if TYPES[pair[0]].itemsize == TYPES[pair[1]].itemsize:
        memory = arguments["x"].copy()
        q = np.ndarray((3, 1, 8), TYPES[pair[1]], memory, 0, (memory.strides[0], 8 * memory.itemsize, memory.itemsize))
        refused(ValueError, r"\b[qx]\b", {**arguments, "x": memory, "out": (q, None, None)}, isa)
    # q beside x in one buffer passes.
    item, size = TYPES[pair[0]].itemsize, arguments["x"].shape[1]
    raw = np.zeros((3, size * item + 64), np.uint8)
    x = np.ndarray((3, size), TYPES[pair[0]], raw, 0, (raw.strides[0], item))
    x[...] = arguments["x"]
    q = np.ndarray((3, 1, 8), TYPES[pair[1]], raw, size * item, (raw.strides[0], 0, TYPES[pair[1]].itemsize))
    fresh = copies(arguments) | {"x": x, "out": (q, None, None)}
    got = kvquant.dequant_rope_quant_kvcache(**fresh, isa=isa)
    assert got[0] is q and q[:, 0, 0].tolist() == [1, 2, 3] and rows(got[3])[0][0] == 1
    executed("I5", isa, pair)


def test_I6_errors_name_argument_expected_and_got(pair, isa, executed):
    arguments = tokens_of_codes(pair, [1, 2, 3], (4, 4, 2, 8), [0, 5, 15], cache_mode="page")
    for error, message, fault in (
        (TypeError, r"^cos: .*float16.*, got .*float64", {"cos": np.ones((3, 8))}),
        (TypeError, r"^sin: ", {"sin": arguments["sin"].astype(arguments["sin"].dtype.newbyteorder())}),
        (TypeError, r"^indices: .*list", {"indices": [0, 5, 15]}),
        (ValueError, r"^cos: ", {"cos": arguments["cos"][:, :6]}),
        (ValueError, r"^scale_v\[0\]: .*inf", {"scale_v": np.full(1, np.inf, np.float32)}),
        (IndexError, r"^indices\[1\]: .*16", {"indices": np.array([0, 16, 1])}),
        (ValueError, r"^numerics: .*fp32.*exact", {"numerics": "exact"}),
    ):
        refused(error, message, {**arguments, **fault}, isa)
    executed("I6", isa, pair)


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)])
def test_I7_no_tokens(lead, pair, isa, executed):
    arguments = tokens_of_codes(pair, [], (2, 3, 2, 4), [], rank=lead, kv_output=True, cache_mode="page")
    if lead == (0,):
        arguments = tokens_of_codes(pair, [], (2, 3, 2, 4), [], kv_output=True, cache_mode="page")
    nan = np.full(1, np.nan, np.float32)
    for mode, indices in (("page", []), ("contiguous", [99] * lead[0])):
        more = {"indices": np.array(indices, np.int64), "cache_mode": mode, "scale_k": nan, "offset_v": nan}
        got = call({**arguments, **more}, isa)
        assert [array.shape for array in got[:3]] == [(*lead, 1, 4), (*lead, 2, 4), (*lead, 2, 4)]
        assert got[0].dtype == TYPES[pair[1]]
        assert (got[3] == 77).all() and (got[4] == 77).all()
    refused(ValueError, "^indices", {**arguments, "indices": np.zeros(1, np.int64)}, isa)
    refused(TypeError, "^scale_k", {**arguments, "scale_k": np.ones(1)}, isa)
    refused(ValueError, "^num_threads", {**arguments, "num_threads": 0}, isa)
    executed("I7", isa, pair)


def test_I7_heads(pair, isa, executed):
    arguments = tokens_of_codes(pair, [5], (1, 1, 1, 2), [0])
    none = {**arguments, "x": arguments["x"][:, 2:], "size_splits": [0, 2, 2]}
    if pair[0] == "int32":
        none["weight_scale"] = np.ones(4, np.float32)
    got = call(none, isa)  # Nq = 0
    assert got[0].shape == (1, 0, 2) and codes(got) == ([5, 5], [-5, -5])
    for shape in ((1, 1, 0, 2), (1, 1, 1, 0), (1, 1, 1, 3)):
        caches = {name: np.zeros(shape, np.int8) for name in ("k_cache", "v_cache")}
        refused(ValueError, "k_cache", {**arguments, **caches}, isa)
    executed("I7", isa, pair)


def test_I8_vendor_limits(pair, isa, executed):
    arguments = tokens_of_codes(pair, [5, 6], (2, 1, 1, 64), [1, 0], cache_mode="page", vendor_limits=True)
    flat = np.ones(64, np.float32)
    arguments |= {"indices": arguments["indices"].astype(np.int32), "scale_k": flat, "scale_v": flat}
    if pair[1] == "float32":
        refused(TypeError, "cos|x", arguments, isa)
    else:
        assert rows(call(arguments, isa)[3]) == [[6], [5]]
        refused(ValueError, "offset_[kv]", {**arguments, "offset_k": flat}, isa)
        refused(TypeError, "indices", {**arguments, "indices": arguments["indices"].astype(np.int64)}, isa)
        assert rows(call({**arguments, "offset_k": flat, "offset_v": flat}, isa)[4]) == [[-5], [-4]]
    executed("I8", isa, pair)


def test_I9_visibility(pair, isa, executed):
    """A thread that learns of the return by an event sees every byte."""
    tokens = 2048
    arguments = tokens_of_codes(pair, np.arange(tokens) % 100, (tokens, 1, 1, 64), np.arange(tokens), cache_mode="page")
    done, seen = threading.Event(), []

    def reader():
        done.wait()
        seen.append(arguments["k_cache"][:, 0, 0, 0].tolist() + (-arguments["v_cache"][:, 0, 0, 63]).tolist())

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=2)
    finally:
        done.set()
        thread.join()
    assert seen == [(np.arange(tokens) % 100).tolist() * 2]
    executed("I9", isa, pair)
