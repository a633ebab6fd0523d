"""The C interface, driven by ctypes in a shared library: what any language that can call C sees.

The library is KVQUANT_LIBRARY if set, else one made of the installed static library, as an engine would link it into its own.
Its numbers are compared with the reference, its errors with those of the Python function.
"""

import concurrent.futures
import ctypes
import os
import subprocess
import sys
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint64, c_void_p
from pathlib import Path

import kvquant
import numpy as np
import pytest
from cases import OPTIONS, PAIRS, TYPES, Case, all_pairs, build, difference

OK, NULL_POINTER, INVALID = 0, 161001, 161002
DTYPES = {TYPES[name]: number for name, number in
          (("int8", 1), ("int32", 2), ("int64", 3), ("float16", 4), ("bfloat16", 5), ("float32", 6))}  # fmt: skip
INPUTS = ("x", "cos", "sin", "k_cache", "v_cache", "indices", "scale_k", "scale_v", "offset_k", "offset_v", "weight_scale",
          "activation_scale", "bias")  # fmt: skip
OUTPUTS = ("q", "k", "v")
ARRAYS = (*INPUTS, *OUTPUTS, "positions")


class Tensor(ctypes.Structure):
    _fields_ = [("dtype", c_int32), ("ndim", c_int32), ("shape", c_int64 * 4), ("strides", c_int64 * 4)]


class Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("isa", c_char_p), ("numerics", c_int32), ("skip_padding", c_uint8),
                ("allow_duplicates", c_uint8), ("vendor_limits", c_uint8), ("reserved", c_uint8),
                ("positions", ctypes.POINTER(Tensor))]  # fmt: skip


class Data(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("batch", c_int64), ("sequence", c_int64)]
    _fields_ += [(name, c_void_p) for name in ARRAYS]


class NewerData(Data):
    _fields_ = [("later", c_void_p)]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    path = os.environ.get("KVQUANT_LIBRARY")
    if not path:
        path = str(tmp_path_factory.mktemp("c_api") / "engine.so")
        archive = str(Path(kvquant.get_cmake_dir()).parents[1] / "libkvquant.a")
        whole = ["-Wl,--whole-archive", archive, "-Wl,--no-whole-archive"]
        if sys.platform == "darwin":
            whole = [f"-Wl,-force_load,{archive}"]
        subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-o", path, *whole], check=True)
    lib = ctypes.CDLL(path)
    tensor = POINTER(Tensor)
    phase_1 = lib.kvquant_dequant_rope_quant_kvcache_get_workspace_size
    phase_1.argtypes = [tensor] * 13 + [POINTER(c_int64), c_char_p, c_char_p, c_bool, c_char_p] + [tensor] * 3
    phase_1.argtypes += [POINTER(c_uint64), POINTER(c_void_p), POINTER(Options)]
    for name in ("kvquant_dequant_rope_quant_kvcache", "kvquant_prepare"):
        getattr(lib, name).argtypes = [c_void_p, c_uint64, c_void_p, POINTER(Data)]
    lib.kvquant_run.argtypes, lib.kvquant_run.restype = [c_void_p, c_void_p, c_int64, c_int64], None
    lib.kvquant_workspace_size.argtypes, lib.kvquant_workspace_size.restype = [c_void_p, c_int64, c_int64], c_uint64
    lib.kvquant_destroy.argtypes, lib.kvquant_destroy.restype = [c_void_p], None
    lib.kvquant_last_message.restype = lib.kvquant_version.restype = c_char_p
    return lib


def message(library):
    return library.kvquant_last_message().decode()


def in_elements(array):
    """Whether C can say its strides: whole elements, on axes where they mean anything."""
    return not array.size or all(s % array.itemsize == 0 for n, s in zip(array.shape, array.strides) if n > 1)


def arrays_of(arguments):
    return [a for a in (*arguments.values(), *(arguments.get("out") or ())) if isinstance(a, np.ndarray)]


def tensor_of(array):
    if array is None:
        return None
    assert in_elements(array)
    strides = [stride // array.itemsize for stride in array.strides]
    return Tensor(DTYPES.get(array.dtype, 31), array.ndim, (c_int64 * 4)(*array.shape), (c_int64 * 4)(*strides))


class Executor:
    """The first phase of a call given in Python's arguments; out must hold every output."""

    def __init__(self, library, arguments, isa=None, options=None):
        self.library, self.arguments, self.pointer = library, arguments, c_void_p()
        self.outputs = dict(zip(OUTPUTS, arguments["out"])) if arguments.get("out") else {}
        tensors = {name: tensor_of(self.array(name)) for name in ARRAYS}
        pointers = {name: None if tensor is None else byref(tensor) for name, tensor in tensors.items()}
        self.options = options or Options(
            size=ctypes.sizeof(Options), isa=isa.encode() if isa else None, numerics=arguments.get("numerics") == "ascend",
            skip_padding=arguments.get("padding_index") == -1, allow_duplicates=arguments.get("allow_duplicates", False),
            vendor_limits=arguments.get("vendor_limits", False),
            positions=ctypes.pointer(tensors["positions"]) if tensors["positions"] else None)  # fmt: skip
        size = c_uint64()
        self.status = library.kvquant_dequant_rope_quant_kvcache_get_workspace_size(
            *(pointers[name] for name in INPUTS), (c_int64 * 3)(*arguments["size_splits"]), b"static", b"BSND",
            arguments.get("kv_output", False), arguments.get("cache_mode", "contiguous").encode(),
            *(pointers[name] for name in OUTPUTS), byref(size), byref(self.pointer), byref(self.options))  # fmt: skip
        self.size = size.value
        self.memory = np.zeros(self.size + 64, np.uint8)
        self.workspace = self.memory.ctypes.data + -self.memory.ctypes.data % 64

    def __del__(self):
        self.library.kvquant_destroy(self.pointer)

    def array(self, name):
        return self.outputs.get(name) if name in OUTPUTS else self.arguments.get(name)

    def data(self, kind=Data, **changed):
        pointers = {name: self.array(name) for name in ARRAYS}
        pointers = {name: None if array is None else array.ctypes.data for name, array in pointers.items()}
        return kind(**{"size": ctypes.sizeof(kind)} | pointers | changed)

    def run(self, **changed):
        return self.library.kvquant_dequant_rope_quant_kvcache(self.workspace, self.size, self.pointer, byref(self.data(**changed)))


def through_c(library, isa, ranges=False):
    """kvquant.dequant_rope_quant_kvcache by way of the C interface."""

    def function(**arguments):
        x, cache, out = arguments["x"], arguments["k_cache"], list(arguments.get("out") or (None, None, None))
        lead = x.shape[:-1]
        heads = (arguments["size_splits"][0] // cache.shape[3], cache.shape[2], cache.shape[2])
        for i, n in enumerate(heads):
            if out[i] is None and (i == 0 or arguments["kv_output"]):
                out[i] = np.empty((*lead, n, cache.shape[3]), arguments["cos"].dtype)
        executor = Executor(library, {**arguments, "out": tuple(out)}, isa)
        assert executor.status == OK, message(library)
        if ranges:
            status = library.kvquant_prepare(executor.workspace, executor.size, executor.pointer, byref(executor.data()))
            cut, end = int(np.prod(lead)) // 3, 1 << 40
            for first, last in ((cut, end), (-5, cut)):
                library.kvquant_run(executor.workspace, executor.pointer, first, last)
        else:
            status = executor.run()
        assert status == OK, message(library)
        empty = np.zeros(0, arguments["cos"].dtype)
        return (*(empty if array is None else array for array in out), cache, arguments["v_cache"])

    return function


@pytest.mark.parametrize("ranges", [False, True], ids=["one piece", "ranges"])
def test_numbers(library, pair, isa, ranges, executed):
    """Any two values of any two options together, against the reference."""
    rng = np.random.default_rng(PAIRS.index(pair))
    rows = all_pairs({"dim": (2, 16, 34, 64), "tokens": (0, 1, 7, 33), **OPTIONS}, [], rng)
    done = 0
    for seed, row in enumerate(rows):
        case = Case(pair=pair, seed=seed, **row)
        built = build(case)
        if not all(in_elements(array) for array in arrays_of(built.arguments)):
            continue
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        got = built.run(through_c(library, isa, ranges))
        assert difference(expected, got) is None, f"{isa}: {case}: {difference(expected, got)}"
        done += 1
    assert done >= 30
    executed("C8", isa, pair)


def small_call(**changed):
    """Three tokens int32 -> float16, page mode, all operands; operands of its own at each call."""
    case = Case(tokens=3, rank=3, cache_mode="page", bias="float32", activation_scale=True, offsets="both", kv_output=True,
                out="contiguous")  # fmt: skip
    arguments = build(case).arguments
    arguments.pop("num_threads")
    return {**arguments, **changed}


def snapshot(arguments):
    return [array.tobytes() for array in arrays_of(arguments)]


FAULTS = {
    "x dtype": lambda a: a.update(x=a["x"].astype(np.float32)),
    "x width": lambda a: a.update(x=a["x"][..., :-1]),
    "caches differ": lambda a: a.update(v_cache=a["v_cache"][:1]),
    "odd D": lambda a: a.update(k_cache=a["k_cache"][..., :3], v_cache=a["v_cache"][..., :3]),
    "size_splits": lambda a: a.update(size_splits=[16, 16, 16]),
    "unit stride": lambda a: a.update(cos=np.repeat(a["cos"], 2, -1)[..., ::2]),
    "overlap": lambda a: a.update(v_cache=a["k_cache"]),
    "index": lambda a: a.update(indices=np.array([0, 99999, 1], np.int32)),
    "negative index": lambda a: a.update(indices=np.array([0, 1, -1], np.int32)),
    "duplicate": lambda a: a.update(indices=np.array([0, 1, 0], np.int32)),
    "scale": lambda a: a.update(scale_k=np.zeros(1, np.float32)),
    "offset": lambda a: a.update(offset_v=np.full(1, np.inf, np.float32)),
    "vendor limits": lambda a: a.update(vendor_limits=True, indices=a["indices"].astype(np.int64)),
}


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_errors_in_the_words_of_python(library, plant):
    arguments = small_call()
    plant(arguments)
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        kvquant.dequant_rope_quant_kvcache(**arguments)
    before = snapshot(arguments)
    executor = Executor(library, arguments)
    status = executor.status or executor.run()
    assert status == INVALID
    assert message(library) == str(caught.value)
    assert snapshot(arguments) == before
    assert Executor(library, small_call()).run() == OK  # the next call works


@pytest.mark.parametrize("name, axis", [("x", 0), ("x", 1), *(("k_cache", axis) for axis in range(4))])
def test_the_most_negative_length(library, name, axis):
    class Shaped(np.ndarray):  # NumPy has no arrays of negative lengths
        @property
        def shape(self):
            return (*super().shape[:axis], -(2**63), *super().shape[axis + 1 :])

    arguments = small_call()
    arguments["out"] = tuple(np.array(array) for array in arguments["out"])
    arguments[name] = arguments[name].view(Shaped)
    assert Executor(library, arguments).status == INVALID
    assert message(library) == f"{name}: axis {axis}: expected at least 0, got {-(2**63)}"


@pytest.mark.parametrize("name", INPUTS + OUTPUTS)
def test_null_data(library, name):
    arguments = small_call()
    before = snapshot(arguments)
    executor = Executor(library, arguments)
    assert executor.run(**{name: None}) == NULL_POINTER
    assert message(library) == f"{name}: required, got nothing"
    assert snapshot(arguments) == before


def test_null_tensors(library):
    for name in INPUTS:
        executor = Executor(library, small_call(**{name: None}))
        optional = name in ("offset_k", "offset_v", "activation_scale", "bias")
        assert executor.status == (OK if optional else NULL_POINTER), name
        assert optional or message(library) == f"{name}: required, got nothing"
        assert bool(executor.pointer) == optional
    assert library.kvquant_prepare(None, 0, executor.pointer, None) == NULL_POINTER


def test_changed_data(library):
    """One executor and workspace: new values in the same arrays; more tokens than there is room for; no tokens."""
    arguments = small_call()
    executor = Executor(library, arguments)
    for step in range(3):
        arguments["x"][...] += step
        arguments["indices"][...] = np.arange(3) + step
        fresh = {"k_cache": arguments["k_cache"].copy(), "v_cache": arguments["v_cache"].copy(), "out": None}
        expected = kvquant.reference.dequant_rope_quant_kvcache(**{**arguments, **fresh})
        assert executor.run() == OK, message(library)
        for array, other in zip((*arguments["out"], arguments["k_cache"], arguments["v_cache"]), expected):
            assert array.tobytes() == other.tobytes()
    batch, sequence = arguments["x"].shape[:2]
    assert library.kvquant_workspace_size(executor.pointer, batch, sequence) == executor.size
    assert executor.run(batch=9, sequence=9) == INVALID
    assert message(library).startswith("workspace: expected ")
    before = snapshot(arguments)
    assert executor.run(batch=0, sequence=sequence) == OK
    assert snapshot(arguments) == before


def test_structures_of_another_size(library):
    arguments = small_call()
    executor = Executor(library, arguments)

    def prepare(data):
        return library.kvquant_prepare(executor.workspace, executor.size, executor.pointer, byref(data))

    assert prepare(executor.data(NewerData)) == OK
    assert prepare(executor.data(NewerData, later=1)) == INVALID
    assert "that this library does not know" in message(library)
    assert prepare(executor.data(size=16)) == INVALID
    assert message(library) == f"data: expected size {ctypes.sizeof(Data)}, got 16"
    for options in (Options(size=8), Options(size=ctypes.sizeof(Options), reserved=1), Options(size=1 << 40)):
        assert Executor(library, arguments, options=options).status == INVALID
        assert message(library).startswith("options: expected ")


def test_message_per_thread(library):
    names = (INPUTS + OUTPUTS) * 20

    def fail(name):
        return Executor(library, small_call()).run(**{name: None}), message(library)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(fail, names))
    assert results == [(NULL_POINTER, f"{name}: required, got nothing") for name in names]


def test_one_executor_many_threads(library):
    """The same executor from eight threads at once, each with a workspace and arrays of its own."""
    shared, alone = Executor(library, small_call()), Executor(library, small_call())
    assert alone.run() == OK
    expected = snapshot(alone.arguments)

    def call(_):
        own = Executor(library, small_call())
        status = library.kvquant_dequant_rope_quant_kvcache(own.workspace, own.size, shared.pointer, byref(own.data()))
        return status, snapshot(own.arguments)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(result == (OK, expected) for result in threads.map(call, range(64)))


def test_version(library):
    assert library.kvquant_version().decode() == kvquant.__version__
    assert library.kvquant_abi() == 1
