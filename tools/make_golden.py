"""Makes cpp/tests/data/golden.bin: small calls of the operator and what kvquant/reference.py answers to them.

The C++ tests replay the file on every target, which ties machines without Python to the reference. Decides the calls and
the file's layout; knows nothing of the compiled operator. The same bytes on any machine: values are drawn by integer
arithmetic, and the reference is elementwise IEEE arithmetic.

    python tools/make_golden.py            write the file
    python tools/make_golden.py --check    make it in memory, exit 1 if its bytes differ from the file

Layout, little endian, nothing aligned:

    file     8 bytes "KVQGOLD1", u32 number of cases, the cases
    case     text name; u8 cache_mode, u8 numerics (numbers of kvquant::CacheMode and Numerics), u8 kv_output,
             u8 skip_padding, u8 allow_duplicates; u32 size_splits[3]; u8 number of operands, the operands
    operand  text name (as kvquant::name gives it), u8 dtype (number of kvquant::DType), u8 ndim, u8 written,
             u32 shape[ndim]; u32 number of elements stored, these elements; if written, all elements after the call
    text     u8 length, ASCII characters

Operands are contiguous. Element i before the call is stored element i modulo the number stored, so that a long operand
may be short in the file.
"""

import importlib.util
import struct

import made_file
import ml_dtypes
import numpy as np

kRoot = made_file.kRoot
kFile = kRoot / "cpp" / "tests" / "data" / "golden.bin"
kTypes = {  # name -> number of kvquant::DType, NumPy type
    "int8": (1, np.dtype(np.int8)),
    "int32": (2, np.dtype(np.int32)),
    "int64": (3, np.dtype(np.int64)),
    "float16": (4, np.dtype(np.float16)),
    "bfloat16": (5, np.dtype(ml_dtypes.bfloat16)),
    "float32": (6, np.dtype(np.float32)),
}
kPairs = (
    ("int32", "float16"), ("int32", "bfloat16"), ("int32", "float32"),
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"),
)  # fmt: skip
kDims = (2, 6, 18, 34, 66)  # half a head: tails alone, one block and a tail, two blocks and a tail
kBiases = (None, "int32", "float32", "float16", "bfloat16")
kScaleShapes = ("heads_dim", "flat", "per_head", "one", "scalar")
kData = ("plain", "special", "ties")

# Bit patterns at which something changes.
kSpecial = {
    "float32": (
        0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x387FE000, 0x387FEFFF,
        0x38800000, 0x477FEFFF, 0x477FF000, 0xC77FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
        0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x3E89CCD5, 0x3E888000, 0x3E898000, 0x3F801000, 0x3F803000,
    ),
    "float16": (
        0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFE00, 0x7FFF, 0x3C01, 0x5BF8,
    ),
    "bfloat16": (
        0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0x3F81, 0x7F00,
        0x1F80, 0x5F80,
    ),
    "int32": (0, 2**31 - 1, -(2**31), 1 - 2**31, 16777217, -16777217, 16777219, 2147483584, 2147483583, -2147483583),
}  # fmt: skip
kSpecialScales = (0x00000001, 0x80400000, 0x00800000, 0x7F7FFFFF, 0x3DCCCCCD, 0x3C010204, 0xBDCCCCCD, 0x40400000)
kSpecialOffsets = (0x80000000, 0x00000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x42FF0000, 0xC3008000)


class Random:
    """splitmix64: unlike NumPy's distributions, the same sequence for ever."""

    def __init__(self, seed):
        self.state = seed

    def bits(self):
        mask = 2**64 - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    def below(self, limit):
        return (self.bits() >> 32) % limit

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def uniform(self, low, high):
        return low + (high - low) * (self.below(2**24) / 2**24)


class Call:
    """One call: per operand what is stored of it and its shape, and the options."""

    def __init__(self, name, pair, *, lead, heads, dim, cache, options):
        self.name, self.options = name, options
        self.lead, self.heads, self.dim = lead, heads, dim
        self.width = (heads[0] + 2 * heads[1]) * dim
        self.x_type, self.output = pair
        self.operands = {}
        # Old cache rows and outputs are patterns that show where nothing, or only a part, was written.
        for operand in ("k_cache", "v_cache"):
            self.put(operand, "int8", (*cache, heads[1], dim), np.arange(-90, 91, 7))
        outputs = [heads[0]] + ([heads[1]] * 2 if options["kv_output"] else [])
        for operand, count in zip("qkv", outputs):
            self.put(operand, self.output, (*lead, count, dim), [1.5])

    def put(self, name, type_name, shape, values):
        """`values`: numbers of the type, or its bits where they are unsigned integers."""
        kind = kTypes[type_name][1]
        values = np.asarray(values)
        stored = values.astype(f"u{kind.itemsize}").view(kind) if values.dtype.kind == "u" else values.astype(kind)
        self.operands[name] = (type_name, tuple(shape), stored)

    def put_tables(self, cos, sin):
        shape = (*self.lead, 1, self.dim) if len(self.lead) == 2 else (*self.lead, self.dim)
        self.put("cos", self.output, shape, cos)
        self.put("sin", self.output, shape, sin)

    def encode(self, reference):
        """The call in the file's layout, with what the reference answers."""
        arrays = {name: np.resize(stored, shape) for name, (_, shape, stored) in self.operands.items()}
        inputs = {name: array for name, array in arrays.items() if name not in "qkv"}
        kv = self.heads[1] * self.dim
        splits = [self.heads[0] * self.dim, kv, kv]
        out = tuple(arrays.get(name) for name in "qkv")
        reference.dequant_rope_quant_kvcache(**inputs, size_splits=splits, out=out, **self.options)

        o = self.options
        parts = [text(self.name), bytes([o["cache_mode"] == "page", o["numerics"] == "ascend", o["kv_output"]])]
        parts += [bytes([o["padding_index"] is not None, o["allow_duplicates"]]), struct.pack("<3I", *splits)]
        parts.append(bytes([len(self.operands)]))
        for name, (type_name, shape, stored) in self.operands.items():
            written = name in ("k_cache", "v_cache", "q", "k", "v")
            parts += [text(name), bytes([kTypes[type_name][0], len(shape), written])]
            parts.append(struct.pack(f"<{len(shape) + 1}I", *shape, stored.size))
            parts += [little_endian(stored)] + ([little_endian(arrays[name])] if written else [])
        return b"".join(parts)


def text(name):
    return bytes([len(name)]) + name.encode("ascii")


def little_endian(array):
    words = array.view(f"u{array.itemsize}")
    return words.astype(words.dtype.newbyteorder("<")).tobytes()


def floats(random, type_name, count, data, scale):
    """Bits of `count` values of about this magnitude."""
    kind = kTypes[type_name][1]
    values = [random.uniform(-scale, scale) for _ in range(count)]
    if data == "ties":
        values = [(random.below(17) - 8) / 2 for _ in range(count)]
    bits = np.asarray(values, np.float32).astype(kind).view(f"u{kind.itemsize}")
    if data == "special":
        for i in range(count):
            if random.below(4) == 0:
                bits[i] = random.pick(kSpecial[type_name])
    return bits


def integers(random, count, data, limit):
    values = [random.below(2 * limit + 1) - limit for _ in range(count)]
    if data == "special":
        values = [random.pick(kSpecial["int32"]) if random.below(4) == 0 else value for value in values]
    return np.asarray(values, np.int32)


def scales(random, count, data):
    values = [random.uniform(0.01, 0.4) * random.pick((1, 1, 1, -1)) for _ in range(count)]
    if data == "ties":
        values = [random.pick((1, -1, 2, 0.5, 0.25)) for _ in range(count)]
    bits = np.asarray(values, np.float32).view(np.uint32)
    if data == "special":
        for i in range(count):
            if random.below(4) == 0:
                bits[i] = random.pick(kSpecialScales)
    return bits


def offsets(random, count, data):
    bits = floats(random, "float32", count, "ties" if data == "ties" else "plain", 20)
    if data == "special":
        for i in range(count):
            if random.below(4) == 0:
                bits[i] = random.pick(kSpecialOffsets)
    return bits


def drawn(pair_number, number):
    """One call of the grid: dim and numerics in all combinations, the other choices in turn or drawn."""
    pair, dim = kPairs[pair_number], kDims[number % 5]
    random = Random(100 * pair_number + number)
    page = (number // 2 + pair_number) % 2 == 0
    padding, duplicates = random.below(2) == 0, page and random.below(2) == 0
    lead = random.pick(((2, 2), (1, 3), (3, 1), (3,), (5,)) if dim < 18 else ((2, 1), (1, 2), (2,)))
    tokens = int(np.prod(lead))
    heads = random.pick(((2, 1), (1, 2), (0, 2)) if dim < 34 else ((1, 1), (0, 2)) if dim < 66 else ((1, 1), (0, 1)))
    cache = (3, 3) if page else (lead[0], 1 + (lead[1] if len(lead) == 2 else 1))
    data = kData[(number + pair_number + pair_number // 3) % 3]
    numerics, bias = ("fp32", "ascend")[number % 2], kBiases[(number + number // 5) % 5]
    options = {
        "cache_mode": "page" if page else "contiguous", "numerics": numerics, "kv_output": random.below(2) == 0,
        "padding_index": -1 if padding else None, "allow_duplicates": duplicates,
    }  # fmt: skip
    name = f"{pair[0]} to {pair[1]}, dim {dim}, {options['cache_mode']}, {numerics}, {data}, case {number}"
    call = Call(name, pair, lead=lead, heads=heads, dim=dim, cache=cache, options=options)

    x_shape = (*lead, call.width)
    if pair[0] == "int32":
        call.put("x", "int32", x_shape, integers(random, tokens * call.width, data, 20 if data == "ties" else 20000))
        weight = [random.uniform(1e-4, 1e-3) for _ in range(call.width)]
        if data == "ties":
            weight = [random.pick((0.25, 0.5, 1)) for _ in range(call.width)]
        call.put("weight_scale", "float32", (call.width,), np.asarray(weight))
        if bias is not None:
            values = integers(random, call.width, data, 2000) if bias == "int32" else floats(random, bias, call.width, data, 2)
            call.put("bias", bias, (call.width,), values)
        if random.below(2) == 0:
            values = [random.uniform(0.5, 2) for _ in range(tokens)]
            call.put("activation_scale", "float32", (tokens,), np.asarray(values))
    else:
        call.put("x", pair[0], x_shape, floats(random, pair[0], tokens * call.width, data, 6))
    tables = [floats(random, pair[1], tokens * dim, data, 1) for _ in range(2)]
    call.put_tables(*tables)

    kv = heads[1] * dim
    shapes = {"heads_dim": (heads[1], dim), "flat": (kv,), "per_head": (heads[1], 1), "one": (1,), "scalar": ()}
    for i, operand in enumerate(("scale_k", "scale_v", "offset_k", "offset_v")):
        if i >= 2 and random.below(3) == 0:
            continue
        shape = shapes[kScaleShapes[(number + i * pair_number) % 5]]
        count = int(np.prod(shape))
        call.put(operand, "float32", shape, (scales if i < 2 else offsets)(random, count, data))

    limit = 9 if page else 2  # rows of the cache in page mode; positions at which S tokens fit in contiguous mode
    count = tokens if page else lead[0]
    rows = list(range(limit))
    indices = [random.below(limit) if duplicates or not page else rows.pop(random.below(len(rows))) for _ in range(count)]
    if padding:
        indices[random.below(count)] = -1
    call.put("indices", random.pick(("int32", "int64")), (count,), np.asarray(indices))
    return call


def long_rows(pair, tokens, dim, bias):
    """Rows long enough for the kernels to work on four tokens at a time."""
    random = Random(dim)
    heads = 3072 // (2 * dim) + 1
    options = {
        "cache_mode": "page", "numerics": "fp32", "kv_output": False, "padding_index": None, "allow_duplicates": False,
    }  # fmt: skip
    name = f"{pair[0]} to {pair[1]}, dim {dim}, {heads} heads, long rows"
    call = Call(name, pair, lead=(tokens,), heads=(0, heads), dim=dim, cache=(1, tokens), options=options)
    call.put("x", "int32", (tokens, call.width), integers(random, 509, "plain", 20000))
    call.put("weight_scale", "float32", (call.width,), np.asarray([random.uniform(1e-4, 1e-3) for _ in range(251)]))
    call.put("bias", bias, (call.width,), [random.below(4001) - 2000 if bias == "int32" else random.uniform(-2, 2) for _ in range(241)])
    call.put("activation_scale", "float32", (tokens,), [0.5, 1.25, 2, 0.75, 1.5][:tokens])
    call.put_tables(floats(random, pair[1], 127, "plain", 1), floats(random, pair[1], 113, "plain", 1))
    for operand in ("scale_k", "scale_v"):
        call.put(operand, "float32", (heads, dim), scales(random, 239, "plain"))
        call.put(operand.replace("scale", "offset"), "float32", (heads, dim), offsets(random, 233, "plain"))
    call.put("indices", "int64", (tokens,), [3, 0, 2, 1, 4][:tokens])
    return call


def tempting():
    """Values at which a tempting alternative to a clause of docs/contract.md gives other bytes: the same in all columns."""

    def one(name, pair, numerics="fp32", *, x=(0,), bias=None, bias_type="float32", cos=(1,), sin=(0,), scale=0x3F800000):
        dim = 66
        options = {
            "cache_mode": "contiguous", "numerics": numerics, "kv_output": True, "padding_index": None, "allow_duplicates": False,
        }  # fmt: skip
        call = Call(name, pair, lead=(1,), heads=(1, 1), dim=dim, cache=(1, 1), options=options)
        # Two values: one for each half of a head.
        call.put("x", pair[0], (1, call.width), np.repeat(np.asarray(x), dim // 2))
        call.put_tables(np.asarray(cos), np.asarray(sin))
        for operand in ("scale_k", "scale_v"):
            call.put(operand, "float32", (1,), np.asarray([scale], np.uint32))
        if pair[0] == "int32":
            call.put("weight_scale", "float32", (call.width,), [-1.0])  # 0 * -1 + bias is the bias, -0 included
            call.put("bias", bias_type, (call.width,), np.asarray(bias))
        call.put("indices", "int32", (1,), [0])
        return call

    def word(*values):
        return np.asarray(values, np.uint32)

    half, brain, single = kPairs[3:]
    yield one("C6: true division", single, x=word(0x41426666), scale=0x3DCCCCCD)
    yield one("C4: products are rounded", single, x=word(0xBE039E97, 0xBF2A4A33), cos=word(0x3FAEE846), sin=word(0x3EB3F921), scale=0x3CBEA8E3)
    yield one("C5: bfloat16 is rounded", kPairs[1], bias=word(0x3E89CCD5))
    yield one("C5: bfloat16 keeps subnormals", kPairs[1], bias=word(0x00018000))
    yield one("C5: float16 keeps subnormals", kPairs[0], bias=word(0x33C00000))
    yield one("C5: float16 overflow", kPairs[0], bias=word(0x477FF000))
    yield one("C1: a product may overflow", brain, x=word(0x7F00), cos=(2,), sin=(1,))
    yield one("C5: NaN is positive", half, x=word(0x7C00), cos=(0,))
    yield one("C5: NaN is positive", brain, x=word(0xFF80), cos=(0,))
    yield one("C5: NaN is positive", single, x=word(0xFF800001), cos=(1,))
    yield one("C2: int32 addition wraps", kPairs[2], x=(2**31 - 1,), bias=(1,), bias_type="int32")
    yield one("C7: products are rounded to float16", half, "ascend", x=word(0x3C01, 0x3C03), cos=word(0x3C01), sin=word(0x3BFF), scale=0x3A000000)
    yield one("C7: a product may overflow", half, "ascend", x=word(0x7800, 0x7800), cos=(2,), sin=(1,))


def make():
    spec = importlib.util.spec_from_file_location("reference", kRoot / "kvquant" / "reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    calls = [drawn(pair, number) for pair in range(6) for number in range(10)]
    calls += tempting()
    calls += [long_rows(kPairs[0], 5, 98, "float32"), long_rows(kPairs[1], 4, 34, "int32")]
    return b"KVQGOLD1" + struct.pack("<I", len(calls)) + b"".join(call.encode(reference) for call in calls)


if __name__ == "__main__":
    made_file.main(__doc__, kFile, make)
