"""The limit kernels (limit.cpp) from Python: built at first use, timed inside C++ so that no interpreter is in the figures."""
import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np

import workloads

FIELDS = ("tokens", "heads_q", "heads_kv", "dim", "x_item", "head_stride")  # struct LimitCall in limit.hpp, in its order
POINTERS = ("rows", "x", "cos", "sin", "q", "k", "v", "k_cache", "v_cache")
STORES = {"limit": 0, "limit, cache rows streamed": 1, "limit, all streamed": 2}
# -fno-ivopts: GCC 12 otherwise spends some ns of each call on addresses that it keeps in vector registers.
FLAGS = ("-O3", "-fno-ivopts", "-march=native", "-std=c++17", "-w", "-shared", "-fPIC", "-fopenmp")
SAMPLE_SECONDS = 30e-6  # a sample is the mean of as many calls as fill this


class LimitCall(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in FIELDS] + [(name, ctypes.c_void_p) for name in POINTERS]


def _library():
    source = Path(__file__).with_name("limit.cpp")
    library = source.parent.parent / "build" / "bench" / "liblimit.so"
    newest = max(path.stat().st_mtime for path in (source, source.with_suffix(".hpp")))
    if not library.exists() or library.stat().st_mtime < newest:
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([os.environ.get("CXX", "c++"), *FLAGS, source, "-o", fresh], check=True)
        fresh.replace(library)
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # waits for work in a spin, but not so long that it disturbs a neighbour
    return ctypes.CDLL(str(library))


def bursts(w, sets, threads):
    """{kind: function(seconds) -> list of µs per call}, for each kind of stores that the workload admits."""
    library = _library()
    rows = [_rows(w, operands) for operands in sets]
    calls = (LimitCall * len(sets))(*(_call(w, operands, row) for operands, row in zip(sets, rows, strict=True)))

    def burst_of(stores):
        position = ctypes.c_int64(0)

        def time(samples, repeats):
            seconds = (ctypes.c_double * samples)()
            library.kvquant_limit_time(calls, ctypes.c_int64(len(sets)), ctypes.byref(position), stores, threads,
                                       ctypes.c_int64(samples), ctypes.c_int64(repeats), seconds)
            return list(seconds)

        def burst(seconds):
            one = min(time(3, max(1, int(1e-6 * w.tokens // 100))) + time(3, 1))
            repeats = max(1, int(SAMPLE_SECONDS / one))
            return [1e6 * s for s in time(min(max(3, int(seconds / (one * repeats))), 100_000), repeats)]

        burst.keep = rows, sets
        return burst

    return {kind: burst_of(stores) for kind, stores in STORES.items() if library.kvquant_limit_admits(calls, stores)}


def _rows(w, operands):
    block, slot = workloads.rows(w, operands["indices"])
    strides = operands["k_cache"].strides
    return ((block * strides[0] + slot * strides[1]) // w.dim).astype(np.int32)


def _call(w, operands, rows):
    pointers = operands | {"rows": rows}
    absent = () if w.kv_output else ("k", "v")
    return LimitCall(w.tokens, w.heads_q, w.heads_kv, w.dim, operands["x"].itemsize, operands["k_cache"].strides[2],
                     *(None if name in absent else pointers[name].ctypes.data for name in POINTERS))
