"""Builds calls of the operator for the tests: operands in every kind of memory, with every byte around them known.

Decides what a random call looks like and what is compared after it. Must not know how any implementation computes;
the only arithmetic here draws values.
"""

import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from kvquant import _core

_core.pool_always_wake(True)  # calls as small as these would not be shared among threads otherwise

TYPES = {
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
# (x, output): every pair of types the operator takes.
PAIRS = (
    ("int32", "float16"),
    ("int32", "bfloat16"),
    ("int32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
)
DIMS = (*range(2, 131, 2), 160, 192, 256, 512)
TOKENS = (0, 1, 2, 3, 7, 8, 9, 33, 64, 257)
OPTIONS = {
    "rank": (2, 3),
    "heads": ((1, 1), (4, 1), (3, 2), (0, 1), (2, 3), (5, 4), (0, 2)),
    "cache_mode": ("contiguous", "page"),
    "layout": ("contiguous", "interleaved", "rows_interleaved", "side_by_side", "head_major", "padded_page", "reversed"),
    "index_type": ("int32", "int64"),
    "tables": ("per_token", "full", "half"),
    "padding": (False, True),
    "duplicates": (False, True),
    "bias": (None, "int32", "float32", "float16", "bfloat16"),
    "activation_scale": (False, True),
    "offsets": ("none", "k", "v", "both"),
    "scale_shape": ("heads_dim", "flat", "per_head", "one", "scalar"),
    "numerics": ("fp32", "ascend"),
    "kv_output": (False, True),
    "out": (None, "contiguous", "some", "padded", "head_major", "fused"),
    "inputs": ("dense", "padded", "transposed", "reversed", "shared"),
    "vectors": ("dense", "padded", "reversed"),
    "odd": (False, True),
    "data": ("plain", "special", "ties"),
    "num_threads": (None, 1, 2),
}
# What a row of the grid says beside D, T and S (tools/make_grid.py): the options, and what only one side can vary. Threads are
# Python's; three sources instead of x, and strides of v that differ from those of k, are C++'s.
SCALE_SHAPES = {f"shape_of_{name}": OPTIONS["scale_shape"] for name in ("scale_k", "scale_v", "offset_k", "offset_v")}
GRID_COLUMNS = (
    {name: values for name, values in OPTIONS.items() if name != "scale_shape"}
    | SCALE_SHAPES
    | {
        "page_rows": (1, 2, 3, 4, 5, 16),
        "position_type": ("int32", "int64"),
        "sources": ("packed", "three"),
        "uneven": (False, True),
    }
)
GRID = Path(__file__).with_name("grid.txt")


@dataclass(frozen=True)
class Case:
    """A call, described; `build` turns it into operands."""

    pair: tuple = ("int32", "float16")
    dim: int = 16
    tokens: int = 6
    rank: int = 3
    heads: tuple = (4, 2)
    cache_mode: str = "contiguous"
    layout: str = "contiguous"
    index_type: str = "int32"
    tables: str = "per_token"  # "full", "half": [P,D], [P,D/2] with positions
    padding: bool = False
    duplicates: bool = False
    bias: object = None
    activation_scale: bool = False
    offsets: str = "none"
    scale_shape: object = "heads_dim"  # or four, of scale_k, scale_v, offset_k and offset_v
    numerics: str = "fp32"
    kv_output: bool = False
    out: object = None
    inputs: str = "dense"  # rows of x, cos and sin; "shared": one row of cos and sin for all batches, by stride 0
    vectors: str = "dense"
    odd: bool = False  # odd addresses and, on axes of size 1, strides that mean nothing
    data: str = "plain"
    num_threads: object = None
    steps: object = None  # S; None: drawn, as are the next two
    page_rows: object = None  # C2 of pages
    position_type: object = None
    seed: int = 0


class Built:
    """A call, ready to be made: `arguments` by name, and the whole memory in which its operands lie."""

    def __init__(self):
        self.arguments = {}
        self.buffers = {}
        self.before = {}

    def freeze(self):
        self.before = {name: buffer.copy() for name, buffer in self.buffers.items()}
        return self

    def restore(self):
        for name, buffer in self.buffers.items():
            buffer[...] = self.before[name]

    def run(self, function, **more):
        """Call on fresh operands; returns what `observe` sees."""
        self.restore()
        result = function(**{**self.arguments, **more})
        return self.observe(result)

    def observe(self, result):
        """Everything a call may leave behind, by name: results as (dtype, shape, bytes), buffers as bytes."""
        q, k, v, k_cache, v_cache = result
        assert k_cache is self.arguments["k_cache"] and v_cache is self.arguments["v_cache"]
        seen = {
            name: (array.dtype.name, array.shape, array.tobytes()) for name, array in (("q", q), ("k", k), ("v", v))
        }
        return seen | {f"buffer of {name}": buffer.tobytes() for name, buffer in self.buffers.items()}


def difference(expected, got):
    """None, or a sentence that says where two observations part."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        if got[name] != value:
            a, b = (item if isinstance(item, bytes) else item[2] for item in (value, got[name]))
            if len(a) != len(b) or (not isinstance(value, bytes) and value[:2] != got[name][:2]):
                return f"{name}: expected {value[:2]}, got {got[name][:2]}"
            a, b = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
            where = np.flatnonzero(a != b)
            first = where[0]
            return f"{name}: {where.size} of {a.size} bytes differ, the first at {first}: {a[first]} became {b[first]}"
    return None


# Memory --------------------------------------------------------------------------------------------------------------


def place(built, name, values, rng, *, order=None, pad=0, gap=1, base=0, flip=False, odd_ones=False):
    """Put `values` into a new buffer of random bytes and return the view.

    order: axes from outermost to innermost in memory; pad: bytes after each innermost row; gap: items between
    neighbours on the innermost axis; base: bytes before the view; flip: negative stride on the first axis;
    odd_ones: axes of size 1 get a stride that means nothing.
    """
    strides = [0] * values.ndim
    extent = values.itemsize * gap
    for position, axis in enumerate(reversed(order or range(values.ndim))):
        strides[axis] = extent
        extent = extent * max(values.shape[axis], 1) + (pad if position == 0 else 0)
        if odd_ones and values.shape[axis] == 1 and axis != values.ndim - 1:
            strides[axis] = 7
    buffer = rng.integers(0, 256, base + extent + 33, np.uint8)
    view = np.ndarray(values.shape, values.dtype, buffer, base, strides)
    if flip and values.ndim:
        view = view[::-1]
    view[...] = values
    built.buffers[name] = buffer
    return view


def _place_caches(built, case, shape, rng):
    """k_cache and v_cache of random bytes in the case's layout."""
    c1, c2, kv_heads, dim = shape
    both = {  # K and V in one buffer: the axis that tells them apart, the whole shape
        "interleaved": (1, (c1, 2, c2, kv_heads, dim)),
        "rows_interleaved": (2, (c1, c2, 2, kv_heads, dim)),
        "side_by_side": (3, (c1, c2, kv_heads, 2, dim)),
    }
    if case.layout in both:
        axis, whole = both[case.layout]
        view = place(built, "k_cache and v_cache", rng.integers(-128, 128, whole, np.int8), rng, base=5)
        return list(np.moveaxis(view, axis, 0))
    how = {
        "head_major": {"order": (0, 2, 1, 3)},
        "padded_page": {"pad": 3, "base": 1, "odd_ones": True},
    }.get(case.layout, {})
    made = [place(built, name, rng.integers(-128, 128, shape, np.int8), rng, **how) for name in ("k_cache", "v_cache")]
    return [cache[::-1, ::-1] for cache in made] if case.layout == "reversed" else made


def _place_outputs(built, case, shapes, rng):
    """out=(q, k, v), or None."""
    if case.out is None:
        return None
    dtype = TYPES[case.pair[1]]
    names = ("q", "k", "v") if case.kv_output else ("q",)
    q = shapes["q"]
    if case.out == "fused":  # all in one buffer, heads side by side
        heads = [shapes[name][-2] for name in names]
        whole = np.zeros((*q[:-2], sum(heads), q[-1]), dtype)
        view = place(built, "out", whole, rng, pad=6, base=1)
        ends = np.cumsum([0, *heads])
        made = {name: view[..., ends[i] : ends[i + 1], :] for i, name in enumerate(names)}
    else:
        skipped = ("k",) if case.out == "some" else ()
        how = {"padded": {"pad": 6, "odd_ones": True}, "head_major": {"order": (*range(len(q) - 3), -2, -3, -1)}}.get(case.out, {})
        made = {n: place(built, n, np.zeros(shapes[n], dtype), rng, **how) for n in names if n not in skipped}
    return tuple(made.get(name) for name in ("q", "k", "v"))


# Values --------------------------------------------------------------------------------------------------------------

SPECIALS = np.array(
    [
        0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFABCDEF,  # NaN: quiet, negative, signalling, with a payload
        0x7F800000, 0xFF800000, 0x00000000, 0x80000000,  # infinities and zeros
        0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,  # float32 subnormals and the smallest normal
        0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F0000, 0x7F7F8000, 0x7F7F7FFF,  # largest; bfloat16's largest and its tie
        0x477FE000, 0x477FEFFF, 0x477FF000, 0x33800000, 0x33000000, 0x33000001,  # float16's limits and ties
        0x38800000, 0x387FC000, 0x3F000000, 0x3FC00000, 0x42FF0000, 0xC3008000,  # 0.5, 1.5, 127.5, -128.5
        0x3F800000, 0xBF800000, 0x4F000000, 0xCF000001, 0x7F000000, 0x00800001,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip
_ODD_SCALES = np.array([1, 0x800000, 0x7F000000, 0x7F7FFFFF, 0x80000001, 0x3DCCCCCD, 0xBF800000], np.uint32)
ODD_SCALES = _ODD_SCALES.view(np.float32)


def ulps(values, steps):
    """float32 values moved by whole steps in their bit pattern (away from zero for positive steps)."""
    return (np.ascontiguousarray(values, np.float32).view(np.int32) + np.int32(steps)).view(np.float32)


def _sprinkle(rng, values, choices, share):
    hit = rng.random(values.shape) < share
    values[hit] = rng.choice(choices, int(hit.sum()))
    return values


class _Draw:
    """Values of one case; `special` and `ties` put them where rounding and comparison go wrong."""

    def __init__(self, case, rng):
        self.kind, self.rng = case.data, rng
        # Half the special calls have scales whose reciprocals may be used, so that special values meet those kernels too.
        self.odd_scales = case.data == "special" and rng.random() < 0.5

    def floats(self, shape, size=1.0):
        if self.kind == "ties":
            values = self.rng.integers(-520, 521, shape).astype(np.float32) / 4
            return _sprinkle(self.rng, values, ulps([0.5, 1.5, 2.5, 126.5, -0.5, -128.5], 1), 0.1)
        values = self.rng.standard_normal(shape, np.float32) * np.float32(size)
        return _sprinkle(self.rng, values, SPECIALS, 0.15) if self.kind == "special" else values

    def factors(self, shape, low, high):
        """weight_scale, activation_scale."""
        if self.kind == "ties":
            return ulps(self.rng.choice([1, 0.5, 0.25, 2], shape), self.rng.choice([-1, 0, 0, 1]))
        values = self.rng.uniform(low, high, shape).astype(np.float32)
        return _sprinkle(self.rng, values, SPECIALS, 0.1) if self.kind == "special" else values

    def integers(self, shape):
        if self.kind == "ties":
            return self.rng.integers(-300, 301, shape, np.int32)
        values = self.rng.integers(-20000, 20001, shape, np.int32)
        extremes = np.array([-(2**31), 2**31 - 1, 2**24 + 1, -(2**24) - 1, 2**30 + 64, 0], np.int32)
        return _sprinkle(self.rng, values, extremes, 0.1) if self.kind == "special" else values

    def tables(self, shape):
        if self.kind == "ties":
            cos = self.rng.choice(np.array([1, 1, -1, 0.5], np.float32), shape)
            return cos, self.rng.choice(np.array([0, 0, 1, -1], np.float32), shape)
        angle = self.rng.uniform(-7, 7, shape).astype(np.float32)
        tables = np.cos(angle), np.sin(angle)
        if self.kind == "special":
            tables = [_sprinkle(self.rng, table, SPECIALS, 0.1) for table in tables]
        return tables

    def scales(self, shape):
        if self.kind == "ties":
            values = self.rng.choice(np.array([1, 2, 0.5, -1, 0.25], np.float32), shape)
            return np.where(self.rng.random(shape) < 0.3, ulps(values, 1).reshape(shape), values)
        values = self.rng.uniform(0.01, 0.2, shape) * self.rng.choice([1, 1, 1, -1], shape)
        values = np.asarray(values, np.float32)
        return _sprinkle(self.rng, values, ODD_SCALES, 0.2) if self.odd_scales else values

    def offsets(self, shape):
        if self.kind == "ties":
            return (self.rng.integers(-8, 9, shape) / 4).astype(np.float32).reshape(shape)
        return self.rng.uniform(-20, 20, shape).astype(np.float32).reshape(shape)


def narrow(values, type_name):
    """float32 to a test operand of this type."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(TYPES[type_name])


def _indices(case, rng, shape, batches, steps):
    c1, c2 = shape[:2]
    if case.cache_mode == "page":
        indices = rng.permutation(c1 * c2)[: batches * steps]
        if case.duplicates and indices.size:
            indices = rng.choice(indices[: max(1, indices.size // 2)], indices.size)
    else:
        indices = rng.integers(0, c2 - steps + 1, batches)
    if case.padding:
        indices = np.where(rng.random(indices.size) < 0.3, -1, indices)
    return indices.astype(TYPES[case.index_type])


def build(case):
    """The operands of a case; the same case gives the same bytes each time."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    draw, built = _Draw(case, rng), Built()
    x_type, output = case.pair
    (q_heads, kv_heads), dim, tokens = case.heads, case.dim, case.tokens
    width = (q_heads + 2 * kv_heads) * dim

    if case.rank == 2:
        steps = 1
    elif case.steps is not None:
        steps = case.steps
    else:
        steps = int(rng.choice([n for n in range(1, tokens + 1) if tokens % n == 0])) if tokens else case.seed % 2 * 2
    batches = tokens // steps if steps else 2
    lead = (batches, steps) if case.rank == 3 else (batches,)
    if case.cache_mode == "page":
        c2 = case.page_rows or int(rng.choice([1, 2, 5, 16]))
        c1 = tokens // c2 + 2
    else:
        c1, c2 = max(1, batches + int(rng.integers(0, 3))), max(1, steps + int(rng.integers(0, 4)))
    cache_shape = (c1, c2, kv_heads, dim)

    odd = {"base": 1, "odd_ones": True} if case.odd else {}
    vector = odd | {"padded": {"gap": 2}, "reversed": {"gap": 3, "flip": True}}.get(case.vectors, {})
    rows = odd | {"padded": {"pad": 12}, "reversed": {"flip": True}}.get(case.inputs, {})
    swapped = case.inputs == "transposed" and case.rank == 3  # memory [S,B,...]

    a = built.arguments
    x = draw.integers((*lead, width)) if x_type == "int32" else narrow(draw.floats((*lead, width), 3), x_type)
    a["x"] = place(built, "x", x, rng, **rows, order=(1, 0, 2) if swapped else None)
    shape = (*lead, 1, dim) if case.rank == 3 else (*lead, dim)
    if case.tables != "per_token":
        table_rows = int(rng.integers(1, 10))
        shape = (table_rows, dim if case.tables == "full" else dim // 2)
        positions = rng.integers(0, table_rows, tokens).astype(TYPES[case.position_type or rng.choice(["int32", "int64"])])
        a["positions"] = place(built, "positions", positions, rng, **vector)
    once = case.inputs == "shared" and batches > 0
    order = (1, 0, 2, 3) if swapped and len(shape) == 4 else None
    for name, table in zip(("cos", "sin"), draw.tables((1, *shape[1:]) if once else shape)):
        a[name] = place(built, name, narrow(table, output), rng, **rows, order=order)
        if once:
            a[name] = np.broadcast_to(a[name], shape)
    a["k_cache"], a["v_cache"] = _place_caches(built, case, cache_shape, rng)
    a["indices"] = place(built, "indices", _indices(case, rng, cache_shape, batches, steps), rng, **vector)

    shapes = {"heads_dim": (kv_heads, dim), "flat": (kv_heads * dim,), "per_head": (kv_heads, 1), "one": (1,)}
    names = ("scale_k", "scale_v", "offset_k", "offset_v")
    chosen = (case.scale_shape,) * 4 if isinstance(case.scale_shape, str) else case.scale_shape
    for name, shape in zip(names, (shapes.get(one, ()) for one in chosen)):
        if name.startswith("scale"):
            a[name] = place(built, name, draw.scales(shape), rng, **vector)
        elif case.offsets in (name[-1], "both"):
            a[name] = place(built, name, draw.offsets(shape), rng, **vector)
    a["size_splits"] = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    if x_type == "int32":
        a["weight_scale"] = place(built, "weight_scale", draw.factors(width, 1e-4, 1e-2), rng, **vector)
    if case.activation_scale:
        a["activation_scale"] = place(built, "activation_scale", draw.factors(tokens, 0.5, 2), rng, **vector)
    if case.bias:
        bias = draw.integers(width) if case.bias == "int32" else narrow(draw.floats(width), case.bias)
        a["bias"] = place(built, "bias", bias, rng, **vector)
    shapes = {"q": (*lead, q_heads, dim), "k": (*lead, kv_heads, dim), "v": (*lead, kv_heads, dim)}
    a["out"] = _place_outputs(built, case, shapes, rng)
    a["kv_output"], a["cache_mode"], a["numerics"] = case.kv_output, case.cache_mode, case.numerics
    a["padding_index"] = -1 if case.padding else None
    a["allow_duplicates"] = case.duplicates
    a["num_threads"] = case.num_threads
    return built.freeze()


# Choosing cases ------------------------------------------------------------------------------------------------------


def word(value):
    """How the grid's file writes a value."""
    if value is None or isinstance(value, bool):
        return {None: "none", False: "no", True: "yes"}[value]
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_grid():
    """The rows of the grid's file as dicts of its columns, with dim, tokens and steps."""
    lines = iter(GRID.read_text().splitlines()[1:])
    for name, values in GRID_COLUMNS.items():
        assert next(lines).split() == [name, *map(word, values)], "the file is older than GRID_COLUMNS: tools/make_grid.py"
    rows = []
    count = next(lines)
    for line in lines:
        *shape, digits = line.split()
        chosen = {name: values[int(digit)] for digit, (name, values) in zip(digits, GRID_COLUMNS.items(), strict=True)}
        rows.append(dict(zip(("dim", "tokens", "steps"), map(int, shape), strict=True)) | chosen)
    assert count == f"rows {len(rows)}"
    return rows


def case_of(row, pair, seed):
    """A row of the grid as a case for one type pair."""
    own = {name: value for name, value in row.items() if name not in SCALE_SHAPES and name not in ("sources", "uneven")}
    return Case(pair=pair, seed=seed, scale_shape=tuple(row[name] for name in SCALE_SHAPES), **own)


def all_pairs(parameters, rows, rng):
    """Complete `rows` (dicts with some parameters set) so that every two values of any two parameters meet.

    Greedy: each row takes, parameter by parameter, the value that meets most partners for the first time. Rows are
    added until no pair is left.
    """
    names = list(parameters)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(parameters[a]))
        for y in range(len(parameters[b]))
    }
    rank = {name: position for position, name in enumerate(names)}

    def pair(a, x, b, y):
        return (a, x, b, y) if rank[a] < rank[b] else (b, y, a, x)

    def complete(row):
        for name in rng.permutation([n for n in names if n not in row]):
            scores = [sum(pair(name, x, b, y) in left for b, y in row.items()) for x in range(len(parameters[name]))]
            best = [x for x, score in enumerate(scores) if score == max(scores)]
            row[name] = best[int(rng.integers(len(best)))]
        left.difference_update(pair(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2))
        return {name: parameters[name][x] for name, x in row.items()}

    done = [complete({name: parameters[name].index(value) for name, value in row.items()}) for row in rows]
    while left:
        a, x, b, y = min(left)
        done.append(complete({a: x, b: y}))
    return done
