"""The workloads of workloads.toml as operands: deterministic inputs, states of the memory, useful bytes, the check of results.

Knows nothing of clocks. An operand set is a dict that holds the operator's arrays by their names, the outputs q, k and v
included, and `positions` for peers that look cos and sin up in a table.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

DTYPES = {name: np.dtype(name) for name in ("int32", "float16", "float32")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
WRITTEN = ("q", "k", "v", "k_cache", "v_cache")
POSITIONAL = ("x", "cos", "sin", "k_cache", "v_cache", "indices", "scale_k", "scale_v")
OPTIONAL = ("offset_k", "offset_v", "weight_scale", "activation_scale", "bias")
STATES = ("hot", "rows", "cold")
ROW_SETS = 1024                       # rows: other cache rows at each of so many calls
COLD_BYTES, COLD_SETS = 160e6, 8192   # cold: sets of at least so many useful bytes together, but not more sets than this
ROPE_THETA = 500000.0


@dataclass(frozen=True)
class Workload:
    """One table of workloads.toml; the comment at its head says what the values mean."""

    name: str
    title: str
    batch: int
    sequence: int
    heads_q: int
    heads_kv: int
    dim: int
    x: str
    output: str
    bias: str
    offsets: bool
    kv_output: bool
    cache_mode: str
    cache: tuple[int, int]
    layout: str
    calls: int

    @property
    def tokens(self):
        return self.batch * self.sequence

    @property
    def size_splits(self):
        return [self.heads_q * self.dim, self.heads_kv * self.dim, self.heads_kv * self.dim]


def load(names=None):
    """The workloads named in the string "W1,W5", or all of them. Raises ValueError for an unknown name."""
    tables = tomllib.loads(Path(__file__).with_name("workloads.toml").read_text())
    chosen = names.split(",") if names else list(tables)
    unknown = [name for name in chosen if name not in tables]
    if unknown:
        raise ValueError(f"unknown workload {unknown[0]!r}; there are {', '.join(tables)}")
    return [Workload(name=name, **tables[name]) for name in chosen]


def arguments(w, operands):
    """(positional, keyword) arguments of kvquant.dequant_rope_quant_kvcache, without out."""
    options = {name: operands[name] for name in OPTIONAL if name in operands}
    return (*(operands[name] for name in POSITIONAL), w.size_splits), {
        **options, "kv_output": w.kv_output, "cache_mode": w.cache_mode}


def out(w, operands):
    """The out= argument that belongs to arguments()."""
    return (operands["q"], operands["k"], operands["v"]) if w.kv_output else (operands["q"], None, None)


def rows(w, indices):
    """(block, slot) of each token in its cache [C1, C2, Nkv, D]."""
    if w.cache_mode == "page":
        return np.divmod(indices.astype(np.int64), w.cache[1])
    first = indices.astype(np.int64)[:, None] + np.arange(w.sequence)
    return np.repeat(np.arange(w.batch), w.sequence), first.reshape(-1)


def useful_bytes(w, operands):
    """Every byte that must be read or written, counted once."""
    read = [name for name in (*POSITIONAL, *OPTIONAL) if name in operands and not name.endswith("_cache")]
    written = ("q", "k", "v") if w.kv_output else ("q",)
    return sum(operands[name].nbytes for name in (*read, *written)) + 2 * w.tokens * w.heads_kv * w.dim


def operand_sets(w, state):
    """The operand sets that calls go through in turn: one (hot), others by their indices (rows), or wholly others (cold).
    All share one pair of caches."""
    first = _operands(w, 0)
    if state == "hot":
        return [first]
    if state == "rows":
        return [first] + [first | {"indices": _aligned(_indices(w, i))} for i in range(1, ROW_SETS)]
    count = w.calls or min(max(math.ceil(COLD_BYTES / useful_bytes(w, first)), 3), COLD_SETS)
    return [first] + [_operands(w, i, first) for i in range(1, count)]


def states(w):
    """The states that mean something: a prefill writes other rows by nature."""
    return STATES if w.sequence == 1 else ("hot", "cold")


def edge_operands(w, operands):
    """A copy whose values are infinite, NaN, subnormal, at the limits and oddly scaled in places. Shares the caches."""
    copy = {name: array if name.endswith("_cache") else array.copy() for name, array in operands.items()}
    floats = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-42, 1e-39, 6e-8, 65520.0, 3.4e38], np.float32)
    with np.errstate(over="ignore"):
        for name, step in (("x", 101), ("weight_scale", 37), ("bias", 41), ("activation_scale", 7)):
            if name in copy:
                place = copy[name].reshape(-1)[::step]
                limits = np.array([-(2**31), 2**31 - 1, 0, 2**24 + 1], np.int32)
                place[...] = np.resize(limits if place.dtype == np.int32 else floats.astype(place.dtype), place.shape)
    for name in ("scale_k", "scale_v"):
        place = copy[name].reshape(-1)[::5]
        place[...] = np.resize(np.array([-0.02, 1e-40, 3e38, 0.1, 1 / 3], np.float32), place.shape)
    return copy


def differing_bytes(w, call, operands):
    """Runs `call`, which works on `operands`, and returns how many bytes of its outputs and caches differ from what
    kvquant.reference writes. Arrays that call returns in a dict count instead of those in `operands`."""
    import kvquant.reference

    for name in WRITTEN:
        operands[name].fill(0)
    result = call()
    got = operands | (result if isinstance(result, dict) else {})
    want = operands | {name: np.zeros_like(operands[name]) for name in WRITTEN}
    positional, options = arguments(w, want)
    kvquant.reference.dequant_rope_quant_kvcache(*positional, **options, out=out(w, want))
    return sum(int((_bytes(got[name]) != _bytes(want[name])).sum()) for name in WRITTEN)


def _bytes(array):
    return array.view(np.uint8)


def _aligned(array):
    """A copy that begins at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _indices(w, seed):
    random, (blocks, slots) = np.random.default_rng([1, seed]), w.cache
    if w.cache_mode == "contiguous":
        return random.integers(0, slots - w.sequence + 1, w.batch, dtype=np.int32)
    if w.sequence == 1:  # each sequence writes into a block of its own
        return (random.permutation(blocks)[: w.batch] * slots + random.integers(0, slots, w.batch)).astype(np.int32)
    token = (seed * w.tokens + np.arange(w.tokens)) % (blocks * slots)  # blocks are filled one after another, wherever they lie
    return (np.random.default_rng(1).permutation(blocks)[token // slots] * slots + token % slots).astype(np.int32)


def _cache(w):
    (blocks, slots), zeros = w.cache, np.zeros
    if w.layout == "HND":
        return _aligned(zeros((blocks, w.heads_kv, slots, w.dim), np.int8)).transpose(0, 2, 1, 3)
    return _aligned(zeros((blocks, slots, w.heads_kv, w.dim), np.int8))


def _operands(w, seed, share=None):
    random = np.random.default_rng([0, seed])
    b, s, d, width, output = w.batch, w.sequence, w.dim, sum(w.size_splits), DTYPES[w.output]
    a = {}
    if w.x == "int32":
        a["x"] = random.integers(-20000, 20000, (b, s, width), dtype=np.int32)
        a["weight_scale"] = random.uniform(0.5e-4, 2e-4, width).astype(np.float32)
        a["activation_scale"] = random.uniform(0.5, 1.5, w.tokens).astype(np.float32)
        if w.bias != "none":
            a["bias"] = random.normal(0, 0.1, width).astype(DTYPES[w.bias])
    else:
        a["x"] = random.standard_normal((b, s, width), np.float32).astype(DTYPES[w.x])
    if s == 1:
        a["positions"] = random.integers(0, 4096, (b, 1))
    else:
        a["positions"] = np.tile(np.arange(s) + (seed * s if w.calls else 0), (b, 1))
    a["cos"], a["sin"] = (table[:, :, None] for table in cos_sin(w, a["positions"]))
    for n in "kv":
        a["scale_" + n] = random.uniform(0.01, 0.03, (w.heads_kv, d)).astype(np.float32)
        if w.offsets:
            a["offset_" + n] = random.integers(-8, 8, (w.heads_kv, d)).astype(np.float32)
    a["indices"] = _indices(w, seed)
    a["q"] = np.zeros((b, s, w.heads_q, d), output)
    a["k"], a["v"] = np.zeros((2, b, s, w.heads_kv, d), output)
    a = {name: _aligned(array) for name, array in a.items()}
    return a | {name: share[name] if share else _cache(w) for name in ("k_cache", "v_cache")}


def cos_sin(w, positions):
    """cos and sin of the output type for positions of any shape, with a last axis of D."""
    angle = positions[..., None] / ROPE_THETA ** (np.arange(0, w.dim, 2) / w.dim)
    angle = np.concatenate([angle, angle], -1)
    return np.cos(angle).astype(np.float32).astype(DTYPES[w.output]), np.sin(angle).astype(np.float32).astype(DTYPES[w.output])
