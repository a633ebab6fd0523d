"""I6, table-driven: one fault at a time, the right exception, the argument's name in the message, every operand and both
caches as they were (by hash), and the next call works. For the reference and for the compiled operator under each ISA."""

import hashlib
import tempfile

import kvquant
import ml_dtypes
import numpy as np
import pytest
from cases import TYPES, narrow

BATCHES, STEPS, Q_HEADS, KV_HEADS, DIM = 2, 3, 4, 2, 16
TOKENS, WIDTH = BATCHES * STEPS, (Q_HEADS + 2 * KV_HEADS) * DIM
IMPLEMENTATIONS = ("reference", *kvquant.isa.available())


def good(**changes):
    """A call that uses every operand and passes vendor_limits as well."""
    rng = np.random.default_rng(5)

    def floats(*shape):
        return rng.uniform(0.5, 2, shape).astype(np.float32)

    heads = (BATCHES, STEPS, KV_HEADS, DIM)
    return {
        "x": rng.integers(-99, 99, (BATCHES, STEPS, WIDTH), np.int32),
        "cos": floats(BATCHES, STEPS, 1, DIM).astype(np.float16),
        "sin": floats(BATCHES, STEPS, 1, DIM).astype(np.float16),
        "k_cache": rng.integers(-128, 128, (3, 4, KV_HEADS, DIM), np.int8),
        "v_cache": rng.integers(-128, 128, (3, 4, KV_HEADS, DIM), np.int8),
        "indices": rng.permutation(12)[:TOKENS].astype(np.int32),
        "scale_k": floats(KV_HEADS, DIM),
        "scale_v": floats(KV_HEADS, DIM),
        "size_splits": [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM],
        "offset_k": floats(KV_HEADS, DIM),
        "offset_v": floats(KV_HEADS, DIM),
        "weight_scale": floats(WIDTH),
        "activation_scale": floats(TOKENS),
        "bias": floats(WIDTH),
        "cache_mode": "page",
        "kv_output": True,
        "out": tuple(np.zeros(shape, np.float16) for shape in ((BATCHES, STEPS, Q_HEADS, DIM), heads, heads)),
    } | changes


def run(implementation, arguments):
    if implementation == "reference":
        return kvquant.reference.dequant_rope_quant_kvcache(**arguments)
    return kvquant.dequant_rope_quant_kvcache(**arguments, isa=implementation)


def hashes(arguments):
    """SHA-256 of the whole memory behind every array of a call."""
    found = []
    for value in [*arguments.values(), *(arguments["out"] if isinstance(arguments["out"], tuple) else ())]:
        while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
            value = value.base
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            found.append(hashlib.sha256(value.tobytes()).hexdigest())
    return found


def observed(result):
    return [array.tobytes() for array in result]


EXPECTED = observed(run("reference", good()))

# Faults: (id, exception, pattern of the message, function of good arguments -> arguments to replace). -----------------

FAULTS = []
ALLOWED = {
    "x": ("int32", "float16"),
    "k_cache": ("int8",),
    "v_cache": ("int8",),
    "sin": ("float16",),
    "cos": ("float16", "bfloat16", "float32"),
    "indices": ("int32", "int64"),
    "bias": ("int32", "float16", "bfloat16", "float32"),
    **dict.fromkeys(("scale_k", "scale_v", "offset_k", "offset_v", "weight_scale", "activation_scale"), ("float32",)),
    **dict.fromkeys(("q", "k", "v"), ("float16",)),
}
OPTIONAL = ("offset_k", "offset_v", "activation_scale", "bias", "q", "k", "v")
BLOCKS = ("x", "cos", "sin", "k_cache", "v_cache", "q", "k", "v")  # the operands whose last axis must have unit stride
WRITTEN = ("k_cache", "v_cache", "q", "k", "v")
ANY_TYPE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
            "float64", "longdouble", "complex64", "bool", "object", "S4", "datetime64[s]", [("a", "f4")])  # fmt: skip


def get(arguments, name):
    return arguments["out"]["qkv".index(name)] if name in ("q", "k", "v") else arguments[name]


def put(arguments, name, value):
    """The replacement of one operand; q, k and v live in out."""
    if name not in ("q", "k", "v"):
        return {name: value}
    out = list(arguments["out"])
    out["qkv".index(name)] = value
    return {"out": tuple(out)}


def fault(label, error, pattern, change):
    FAULTS.append(pytest.param(error, pattern, change, id=label))


def replaced(label, error, name, make):
    """A fault in one operand, made from the good array."""
    fault(f"{name}-{label}", error, rf"\b{name}\b", lambda a: put(a, name, make(get(a, name))))


def as_type(array, type_name):
    dtype = TYPES.get(type_name) if isinstance(type_name, str) else None
    return np.zeros(array.shape, dtype or type_name)


class Impostor:
    """Something that could be converted to an array, like another library's tensor."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self.array


def in_buffer(array, strides, room=4096):
    """An array of that shape and type with these strides, all zero, in memory of its own."""
    return np.ndarray(array.shape, array.dtype, np.zeros(room, np.uint8), 0, strides)


for name, allowed in ALLOWED.items():
    if name not in OPTIONAL:
        replaced("none", TypeError, name, lambda array: None)
    replaced("list", TypeError, name, lambda array: array.tolist())
    replaced("float", TypeError, name, lambda array: 1.0)
    replaced("scalar", TypeError, name, lambda array: array.reshape(-1)[0])
    replaced("text", TypeError, name, lambda array: "array")
    replaced("bytes", TypeError, name, lambda array: array.tobytes())
    replaced("memoryview", TypeError, name, lambda array: memoryview(array))
    replaced("masked", TypeError, name, lambda array: np.ma.masked_array(array))
    replaced("impostor", TypeError, name, Impostor)
    for type_name in ANY_TYPE:
        if type_name not in allowed:
            replaced(f"as-{type_name}", TypeError, name, lambda array, t=type_name: as_type(array, t))
    for type_name in allowed:
        if type_name != "int8":
            swapped = TYPES[type_name].newbyteorder()
            replaced(f"swapped-{type_name}", TypeError, name, lambda array, t=swapped: np.zeros(array.shape, t))
for name in ("cos", "sin"):
    for type_name in ("bfloat16", "float32"):
        fault(f"{name}-differs-{type_name}", TypeError, r"\b(cos|sin|q|k|v)\b",
              lambda a, n=name, t=type_name: {n: narrow(a[n], t)})  # fmt: skip
fault("x-float-but-not-cos", TypeError, r"\bx\b", lambda a: {"x": a["x"].astype(np.float32)})
fault("x-bfloat16-but-not-cos", TypeError, r"\bx\b", lambda a: {"x": narrow(a["x"], "bfloat16")})

for name in ALLOWED:
    scale = name in ("scale_k", "scale_v", "offset_k", "offset_v")
    who = rf"\b({name}|x|v_cache|size_splits|cos|sin|indices|scale_k)\b" if name in ("x", "k_cache") else rf"\b{name}\b"
    sample = get(good(), name)
    shapes = {(1, *sample.shape), (*sample.shape, 1), (sample.size,), (sample.size + 1,), (0,), (), (1, 1, 1, 1, 1, 1)}
    for axis, size in enumerate(sample.shape):
        for wrong in (size - 1, size + 1, 0):
            shapes.add((*sample.shape[:axis], wrong, *sample.shape[axis + 1 :]))
    shapes.add(sample.shape[::-1] if sample.ndim > 1 else (1, sample.size))
    shapes.discard(sample.shape)
    if scale:
        shapes |= {(DIM,), (KV_HEADS,), (1, 1), (1, DIM), (1, KV_HEADS * DIM), (KV_HEADS, 2), (KV_HEADS, 1, 1)}
        shapes -= {(KV_HEADS * DIM,), ()}
    if name in ("k_cache", "v_cache"):  # a single cache of another page count differs from the other one
        who = r"\b(k_cache|v_cache)\b"
    for shape in sorted(shapes):
        label = "x".join(map(str, shape)) or "0-d"
        fault(f"{name}-shape-{label}", ValueError, who,
              lambda a, n=name, s=shape: put(a, n, np.zeros(s, get(a, n).dtype)))  # fmt: skip

for name in BLOCKS:
    replaced("every-second", ValueError, name, lambda array: np.repeat(array, 2, axis=-1)[..., ::2])
    replaced("backwards", ValueError, name, lambda array: array[..., ::-1])
    replaced("stride-0", ValueError, name, lambda array: in_buffer(array, (*array.strides[:-1], 0)))
    replaced(
        "stride-odd", ValueError, name, lambda array: in_buffer(array, (*array.strides[:-1], array.itemsize + 1), 9999)
    )
for name in WRITTEN:
    replaced(
        "read-only", ValueError, name, lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
    )
    for axis in range(3):

        def meet(array, axis=axis):  # one axis moves by one item only
            return in_buffer(array, tuple(array.itemsize if i == axis else s for i, s in enumerate(array.strides)))

        def still(array, axis=axis):
            return in_buffer(array, tuple(0 if i == axis else s for i, s in enumerate(array.strides)))

        replaced(f"axis-{axis}-meets", ValueError, name, meet)
        replaced(f"axis-{axis}-stride-0", ValueError, name, still)
    replaced("one-byte-short", ValueError, name,
             lambda array: in_buffer(array, tuple(s - 1 if i == 1 else s for i, s in enumerate(array.strides))))  # fmt: skip


def overlapping(written, other):
    """`written` moved into the memory of `other` (both as views of one buffer that starts together)."""

    def change(a):
        w, o = get(a, written), get(a, other)
        room = np.zeros(max(w.nbytes, o.nbytes) + 64, np.uint8)
        first = np.ndarray(o.shape, o.dtype, room)
        first[...] = o
        second = np.ndarray(w.shape, w.dtype, room, o.nbytes - 1)[...] if o.nbytes - 1 + w.nbytes <= room.size else None
        if second is None:
            second = np.ndarray(w.shape, w.dtype, room)
        changes = put(a, other, first)
        return changes | put({**a, **changes}, written, second)

    return change


for name in WRITTEN:
    for other in ALLOWED:
        if other != name:
            fault(f"{name}-over-{other}", ValueError, rf"\b({name}|{other})\b", overlapping(name, other))
fault("caches-the-same", ValueError, r"\b[kv]_cache\b", lambda a: {"v_cache": a["k_cache"]})
fault("k-and-v-the-same", ValueError, r"\b[kv]\b", lambda a: put(a, "v", a["out"][1]))


def interlaced(a):
    """Two caches in one buffer whose rows meet in one byte."""
    room = np.zeros((3, 4, KV_HEADS, 2 * DIM), np.int8)
    return {"k_cache": room[..., :DIM], "v_cache": room[..., DIM - 1 : -1]}


fault("caches-interlaced", ValueError, r"\b[kv]_cache\b", interlaced)

for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
    values = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}
    if name.startswith("scale"):
        values |= {"zero": 0.0, "minus-zero": -0.0}
    for label, value in values.items():
        for position in (0, 15, 16, 31):

            def planted(a, n=name, p=position, v=value):
                a[n].reshape(-1)[p] = v
                return {}

            fault(f"{name}-{label}-{position}", ValueError, rf"^{name}\[{position}\]: ", planted)
    bad = np.nan if name.startswith("offset") else 0
    for shape, position in (((KV_HEADS * DIM,), 31), ((KV_HEADS, 1), 1), ((1,), 0), ((), 0)):

        def reshaped(a, n=name, s=shape, v=bad):
            array = np.ones(s, np.float32)
            array[(-1,) * len(s)] = v
            return {n: array}

        fault(f"{name}-bad-{len(shape)}-{position}", ValueError, rf"^{name}\[{position}\]: ", reshaped)

for label, dtype in (("int32", np.int32), ("int64", np.int64)):
    wrong = [-1, -2, 12, 2**31 - 1, -(2**31)] + ([2**32, 2**62, -(2**63)] if label == "int64" else [])
    for position in (0, 3, 5):
        for value in wrong:

            def index(a, p=position, v=value, t=dtype):
                indices = np.array([0, 1, 2, 3, 4, 5], t)
                indices[p] = v
                return {"indices": indices}

            pattern = rf"^indices\[{position}\]: .*12.*{value}"
            fault(f"indices-{label}-{position}-{value}", IndexError, pattern, index)
fault("indices-duplicate", ValueError, r"^indices\[4\]: .*\b7\b", lambda a: {"indices": np.int32([7, 1, 2, 3, 7, 7])})
fault(
    "indices-bad-before-duplicate", IndexError, r"^indices\[1\]: ", lambda a: {"indices": np.int32([7, 99, 7, 3, 4, 5])}
)
fault(
    "indices-duplicate-before-bad", ValueError, r"^indices\[1\]: ", lambda a: {"indices": np.int32([7, 7, 99, 3, 4, 5])}
)
fault("indices-padding-is-minus-one-only", IndexError, r"^indices\[2\]: ",
      lambda a: {"indices": np.int32([0, -1, -2, 3, 4, 5]), "padding_index": -1})  # fmt: skip
for value in (-1, 2, 4, 2**31 - 1):
    fault(f"indices-contiguous-{value}", IndexError, r"^indices\[1\]: ",
          lambda a, v=value: {"indices": np.int32([0, v]), "cache_mode": "contiguous"})  # fmt: skip
fault("indices-of-page-in-contiguous", ValueError, r"\bindices\b", lambda a: {"cache_mode": "contiguous"})
fault("indices-of-contiguous-in-page", ValueError, r"\bindices\b", lambda a: {"indices": np.zeros(BATCHES, np.int32)})


def caches(*shape):
    return {name: np.zeros(shape, np.int8) for name in ("k_cache", "v_cache")}


fault("contiguous-too-few-batches", ValueError, r"\bk_cache\b",
      lambda a: {"indices": np.zeros(2, np.int32), "cache_mode": "contiguous", **caches(1, 4, KV_HEADS, DIM)})  # fmt: skip
for shape in ((3, 4, 0, DIM), (3, 4, KV_HEADS, 0), (3, 4, KV_HEADS, 15), (0, 4, KV_HEADS, DIM), (3, 0, KV_HEADS, DIM)):
    label = "x".join(map(str, shape))
    fault(f"caches-{label}", ValueError, r"\bk_cache\b", lambda a, s=shape: caches(*s))

WRONG_OPTIONS = {
    "quant_mode": (1, -1, "dynamic", None, True, False, 0.0, [0], "0"),
    "input_layout": ("BNSD", "bsnd", "", None, 0),
    "kv_output": (None, 1, 0, "True", 1.0, np.int8(1), np.array(True)),
    "allow_duplicates": (None, 1, 0, "no", []),
    "vendor_limits": (None, 1, 0, "no"),
    "cache_mode": ("paged", "PAGE", "", None, 3, b"page"),
    "numerics": ("fp16", "FP32", "", None, 0),
    "padding_index": (0, -2, True, False, -1.0, "-1", [-1], 2**70),
    "num_threads": (0, -1, 2.5, 2.0, True, "2", [2], -(2**70)),
    "out": (5, "qkv", [], (None,), (None,) * 4, {}, np.zeros(3)),
}
for name, values in WRONG_OPTIONS.items():
    for value in values:
        fault(f"{name}-{value!r}", ValueError, rf"\b{name}\b", lambda a, n=name, v=value: {n: v})
for position, name in ((1, "k"), (2, "v")):

    def unasked(a, position=position):
        out = [a["out"][0], None, None]
        out[position] = a["out"][position]
        return {"kv_output": False, "out": tuple(out)}

    fault(f"out-{name}-without-kv_output", ValueError, rf"\b{name}\b", unasked)

GOOD_SPLITS = [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
for label, error, splits in (
    ("none", TypeError, None),
    ("int", TypeError, 128),
    ("text", TypeError, "64,32,32"),
    ("floats", TypeError, [64.0, 32.0, 32.0]),
    ("bools", TypeError, [True, True, True]),
    ("float-array", TypeError, np.array(GOOD_SPLITS, np.float32)),
    ("bool-array", TypeError, np.ones(3, bool)),
    ("object-array", TypeError, np.array(GOOD_SPLITS, object)),
    ("set", TypeError, {64, 32}),
    ("none-inside", TypeError, [64, None, 32]),
    ("two", ValueError, GOOD_SPLITS[:2]),
    ("four", ValueError, [*GOOD_SPLITS, 0]),
    ("empty", ValueError, []),
    ("negative", ValueError, [-64, 32, 32]),
    ("huge", ValueError, [2**70, 32, 32]),
    ("wrapping", ValueError, [2**64 + 64, 32, 32]),
    ("kv-first", ValueError, [32, 64, 32]),
    ("uneven", ValueError, [64, 48, 16]),
    ("heads", ValueError, [4, 2, 2]),
    ("part-of-a-head", ValueError, [72, 32, 32]),
    ("sum-too-small", ValueError, [48, 32, 32]),
    ("sum-too-big", ValueError, [80, 32, 32]),
):
    who = r"\b(size_splits|x)\b" if label.startswith("sum") else r"\bsize_splits\b"  # the sum is x's last axis
    fault(f"size_splits-{label}", error, who, lambda a, s=splits: {"size_splits": s})


# I8: what vendor_limits refuses. ---


def resized(q_heads, kv_heads, dim, dtype=np.float16):
    """A call of other sizes, two tokens, without the options that would get in the way."""
    width = (q_heads + 2 * kv_heads) * dim
    flat = np.ones(kv_heads * dim, np.float32)
    return {
        "x": np.ones((2, width), np.int32),
        "cos": np.ones((2, dim), dtype),
        "sin": np.ones((2, dim), dtype),
        **caches(2, 1, kv_heads, dim),
        "indices": np.arange(2, dtype=np.int32),
        "size_splits": [q_heads * dim, kv_heads * dim, kv_heads * dim],
        "weight_scale": np.ones(width, np.float32),
        **{"scale_k": flat, "scale_v": flat, "offset_k": flat, "offset_v": flat},
        **dict.fromkeys(("activation_scale", "bias", "out")),
        "cache_mode": "page",
    }


VENDOR = {}
for label, error, pattern, change in (
    ("H-limit", ValueError, r"\bx\b", lambda a: resized(31, 1, 128)),
    ("H-multiple", ValueError, r"\bx\b", lambda a: resized(1, 1, 32)),
    ("D-multiple", ValueError, r"\b(k_cache|cos)\b", lambda a: resized(14, 1, 8)),
    ("float32-output", TypeError, r"\b(cos|x)\b", lambda a: resized(2, 1, 16, np.float32)),
    ("float32-x", TypeError, r"\b(cos|x)\b",
     lambda a: resized(2, 1, 16, np.float32) | {"x": np.ones((2, 64), np.float32)}),
    ("int64-indices", TypeError, r"\bindices\b", lambda a: {"indices": a["indices"].astype(np.int64)}),
    ("offset_k-alone", ValueError, r"\boffset_[kv]\b", lambda a: {"offset_v": None}),
    ("offset_v-alone", ValueError, r"\boffset_[kv]\b", lambda a: {"offset_k": None}),
    ("padding", ValueError, r"\bpadding_index\b", lambda a: {"padding_index": -1}),
    ("duplicates", ValueError, r"\ballow_duplicates\b", lambda a: {"allow_duplicates": True}),
):  # fmt: skip
    VENDOR[label] = (error, pattern, change)
for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
    for shape in ((KV_HEADS, 1), (1,), ()):
        VENDOR[f"{name}-shape-{shape}"] = (
            ValueError, rf"\b{name}\b", lambda a, n=name, s=shape: {n: np.ones(s, np.float32)})  # fmt: skip
for name in WRITTEN:

    def strided(a, name=name):
        array = get(a, name)
        wide = np.zeros((*array.shape[:-1], DIM + 2), array.dtype)
        return put(a, name, wide[..., :DIM])

    VENDOR[f"{name}-strided"] = (ValueError, rf"\b{name}\b", strided)
for label, (error, pattern, change) in VENDOR.items():
    fault(f"vendor-{label}", error, pattern, lambda a, c=change: {**c(a), "vendor_limits": True})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("error, pattern, change", FAULTS)
def test_fault(error, pattern, change, implementation):
    arguments = good()
    arguments |= change(arguments)
    before = hashes(arguments)
    with pytest.raises(error, match=pattern) as caught:
        run(implementation, arguments)
    assert caught.type is error  # not a subclass such as UnicodeError
    assert hashes(arguments) == before
    assert observed(run(implementation, good())) == EXPECTED


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("label", VENDOR)
def test_vendor_limits_alone_refuse_it(label, implementation):
    """The same call passes without vendor_limits, so the faults above are refused for that reason."""
    arguments = good()
    arguments |= VENDOR[label][2](arguments)
    run(implementation, arguments)


@pytest.mark.parametrize("value", ["sse9", "", 1, True, ["scalar"], b"scalar", "scalar\0"])
def test_unknown_isa(value):
    arguments = good()
    before = hashes(arguments)
    with pytest.raises(ValueError, match=r"\bisa\b"):
        kvquant.dequant_rope_quant_kvcache(**arguments, isa=value)
    assert hashes(arguments) == before
    assert observed(kvquant.dequant_rope_quant_kvcache(**good())) == EXPECTED


def test_isa_of_another_machine():
    for name in kvquant.isa.missing():
        arguments = good()
        before = hashes(arguments)
        with pytest.raises(RuntimeError, match=name):
            kvquant.dequant_rope_quant_kvcache(**arguments, isa=name)
        assert hashes(arguments) == before


def test_unknown_argument_and_too_few_arguments():
    for function in (kvquant.dequant_rope_quant_kvcache, kvquant.reference.dequant_rope_quant_kvcache):
        with pytest.raises(TypeError, match="scales"):
            function(**good(), scales=None)
        with pytest.raises(TypeError, match="size_splits|positional"):
            function(**{name: value for name, value in good().items() if name != "size_splits"})


# What must not be refused. --------------------------------------------------------------------------------------------


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def with_odd_ones(a):
    """Axes of size 1 whose strides mean nothing."""
    changes = {}
    for name in ("cos", "sin"):
        strides = list(a[name].strides)
        strides[2] = 7
        changes[name] = np.ndarray(a[name].shape, a[name].dtype, a[name].copy(), 0, strides)
    return changes


def memory_mapped(a):
    mapped = np.memmap(tempfile.TemporaryFile(), a["x"].dtype, "w+", shape=a["x"].shape)
    mapped[...] = a["x"]
    return {"x": mapped}


def moved_by_a_byte(array):
    room = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, room, 1)
    moved[...] = array
    return moved


INPUTS = [name for name in ALLOWED if name not in WRITTEN]
ACCEPTED = {
    "read-only": lambda a: {name: read_only(a[name]) for name in INPUTS},
    "unaligned": lambda a: (
        {name: moved_by_a_byte(a[name]) for name in INPUTS} | {"out": tuple(map(moved_by_a_byte, a["out"]))}
    ),
    "memory-mapped": memory_mapped,
    "odd-strides-of-size-1-axes": with_odd_ones,
    "reversed-outer-axes": lambda a: {name: a[name][::-1, ::-1].copy()[::-1, ::-1] for name in ("x", "cos", "sin")},
    "strided-vectors": lambda a: (
        {name: np.repeat(a[name], 3, axis=-1)[..., ::3] for name in INPUTS[3:]}
        | {"scale_k": np.asfortranarray(a["scale_k"]), "x": a["x"], "cos": a["cos"], "sin": a["sin"]}
    ),
    "flat-scales": lambda a: {name: a[name].reshape(-1) for name in ("scale_k", "scale_v", "offset_k", "offset_v")},
    "int64-indices": lambda a: {"indices": a["indices"].astype(np.int64)},
    "longlong-indices": lambda a: {"indices": a["indices"].astype(np.longlong)},
    "tuple-splits": lambda a: {"size_splits": tuple(a["size_splits"])},
    "numpy-splits": lambda a: {"size_splits": [np.int32(64), 32, np.uint8(32)]},
    "array-splits": lambda a: {"size_splits": np.array(a["size_splits"], np.int16)},
    "out-list": lambda a: {"out": list(a["out"])},
    "out-partly": lambda a: {"out": (None, a["out"][1], None)},
    "out-none": lambda a: {"out": None},
    "numpy-options": lambda a: {"kv_output": np.True_, "num_threads": np.int64(2), "padding_index": np.int8(-1)},
    "static": lambda a: {"quant_mode": "static", "allow_duplicates": True, "padding_index": -1},
    "many-threads": lambda a: {"num_threads": 2**70},
    "vendor-limits": lambda a: {"vendor_limits": True},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("label", ACCEPTED)
def test_accepted(label, implementation):
    arguments = good()
    arguments |= ACCEPTED[label](arguments)
    result = run(implementation, arguments)
    assert observed(result) == EXPECTED
    for given, got in zip(arguments["out"] or (), result[:3]):
        assert given is None or got is given
    assert result[3] is arguments["k_cache"] and result[4] is arguments["v_cache"]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matrix_and_shared_reads_are_arrays(implementation):
    arguments = resized(2, 1, 16, ml_dtypes.bfloat16) | {"x": np.matrix(np.full((2, 64), 3, np.int32))}
    arguments["sin"] = arguments["cos"]  # operands that are only read may be the same memory
    q, *_, k_cache, v_cache = run(implementation, arguments)
    assert q.shape == (2, 2, 16) and type(q) is np.ndarray
    assert q[:, :, :8].astype(float).max() == 0 and (q[:, :, 8:] == 6).all()
    assert k_cache[0, 0, 0].tolist() == [1] * 8 + [7] * 8 and (v_cache == 4).all()


def test_vendor_limits_take_empty_outputs():
    """NumPy gives arrays of no elements strides of 0; they are contiguous all the same."""
    scale = np.full((2, 64), 0.5, np.float32)
    caches = [np.zeros((1, 4, 2, 64), np.int8) for _ in range(2)]
    q = np.zeros((0, 2, 64), np.float16)
    result = kvquant.dequant_rope_quant_kvcache(
        np.zeros((0, 384), np.float16), *[np.zeros((0, 64), np.float16)] * 2, *caches, np.zeros(0, np.int32), scale, scale,
        [128, 128, 128], out=(q, None, None), vendor_limits=True)
    assert result[0] is q


def test_out_of_a_subclass_is_read_once():
    """A sequence that makes its items up on the way must not leave a borrowed array behind."""

    class Fresh(list):
        def __getitem__(self, index):
            return np.zeros((2, 1, 16), np.float32) if index == 0 else None

    scale = np.ones(16, np.float32)
    rotation = [np.ones((2, 16), np.float32), np.zeros((2, 16), np.float32)]
    caches = [np.zeros((2, 4, 1, 16), np.int8) for _ in range(2)]
    for _ in range(20):
        q, *_ = kvquant.dequant_rope_quant_kvcache(
            np.ones((2, 48), np.float32), *rotation, *caches, np.zeros(2, np.int32), scale, scale, [16, 16, 16],
            out=Fresh([None, None, None]))
        assert (q == 1).all()


@pytest.mark.parametrize("operator", [kvquant.dequant_rope_quant_kvcache, kvquant.reference.dequant_rope_quant_kvcache])
def test_I7_overlap_is_not_looked_at_without_tokens(operator):
    cache, scale = np.zeros((1, 4, 1, 16), np.int8), np.ones(16, np.float32)
    rotation = np.zeros((0, 16), np.float32)
    q, *_ = operator(np.zeros((0, 48), np.float32), rotation, rotation, cache, cache, np.zeros(0, np.int32), scale, scale,
                     [16, 16, 16])
    assert q.shape == (0, 1, 16)
