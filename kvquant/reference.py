"""The operator in plain NumPy: what every compiled kernel is compared with, byte for byte.

Written clause by clause from docs/contract.md (C1..C8 for numbers, I1..I10 for indices and safety) and never
optimised. It needs NumPy only and shares no code with the compiled operator.

Limits: NumPy computes in the caller's floating-point state, so C1's promise of independence from it does not hold
here: call it under round-to-nearest with subnormals on (the default of every process). `num_threads` is checked and
otherwise without effect; `isa` is not looked at.
"""

from types import SimpleNamespace

import numpy as np

__all__ = ["dequant_rope_quant_kvcache"]

_OUTPUT_TYPES = ("float16", "bfloat16", "float32")
_OVERLAP_WORK = 1_000_000  # bound of I5a's exact search; a search that exceeds it counts as an overlap


def dequant_rope_quant_kvcache(
    x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *,
    offset_k=None, offset_v=None, weight_scale=None, activation_scale=None, bias=None, positions=None, quant_mode=0,
    input_layout="BSND", kv_output=False, cache_mode="contiguous", numerics="fp32", padding_index=None,
    allow_duplicates=False, vendor_limits=False, out=None, num_threads=None, isa=None,
):  # fmt: skip
    """Dequantise x, split it, rotate q and k, quantise k and v to int8 and write them into the two caches.

    With T = B*S tokens and H = (Nq + 2*Nkv)*D, shapes are (3-D x, then 2-D x):

    x                       [B,S,H] or [B,H]        int32 or the output type (the dtype of cos)
    cos, sin                [B,S,1,D] or [B,D]      float16, bfloat16 or float32
    k_cache, v_cache        [C1,C2,Nkv,D]           int8, written in place
    indices                 page: [T]; contiguous: [B]; int32 or int64
    scale_*, offset_*       [Nkv,D], [Nkv*D], [Nkv,1], [1] or 0-d, float32
    weight_scale, bias      [H]; float32, and int32 or any output type
    activation_scale        [T] float32
    positions               [T], int32 or int64: cos and sin are then tables [P,D] or [P,D/2]
    size_splits             [Nq*D, Nkv*D, Nkv*D]

    Returns (q, k, v, k_cache, v_cache); k and v have shape (0,) unless kv_output. Raises TypeError, ValueError or
    IndexError before anything is written.
    """
    given = SimpleNamespace(**locals())
    _check_options(given)
    call = _check_operands(given)
    if given.vendor_limits:
        _check_vendor_limits(given, call)
    outputs = _check_outputs(given, call)
    _check_memory(given, call, outputs)
    values = _read_values(given, call)

    # Nothing below can fail (I4).
    with np.errstate(all="ignore"):
        q, k, v = _split(_dequantise(call, values), call)
        rounding = _round_to_half if given.numerics == "ascend" and call.output == "float16" else _no_rounding
        cos, sin = (_rotation_rows(table, call, values) for table in (call.cos, call.sin))
        q = _rotate(rounding(q), cos, sin, rounding)
        k = _rotate(rounding(k), cos, sin, rounding)
        k_codes = _quantise(k, values["scale_k"], values["offset_k"])
        v_codes = _quantise(v, values["scale_v"], values["offset_v"])
    _store_narrowed(outputs["q"], q)
    if given.kv_output:
        _store_narrowed(outputs["k"], k)
        _store_narrowed(outputs["v"], v)
    _scatter(call, values["indices"], k_codes, v_codes)
    return outputs["q"], outputs["k"], outputs["v"], k_cache, v_cache


# Arithmetic: C1 to C7 -----------------------------------------------------------------------------------------------


def _dequantise(call, values):
    """C2 for int32 x, C3 for float x: [T,H] float32."""
    x = call.x.reshape(call.tokens, call.width)
    if call.x_type != "int32":
        return _widen(x)  # C3
    bias = values["bias"]
    if bias is not None and bias.dtype == np.int32:
        x, bias = x + bias, None  # C2: int32 addition, wraps
    f = x.astype(np.float32) * values["weight_scale"]
    if values["activation_scale"] is not None:
        f = f * values["activation_scale"][:, None]
    if bias is not None:
        f = f + _widen(bias)
    return f


def _split(f, call):
    """[T,H] to q [T,Nq,D], k and v [T,Nkv,D]."""
    heads = f.reshape(call.tokens, call.q_heads + 2 * call.kv_heads, call.dim)
    return np.split(heads, [call.q_heads, call.q_heads + call.kv_heads], axis=1)


def _rotation_rows(table, call, values):
    """cos or sin of each token, [T,1,D] float32; I10 where there are positions."""
    if values["positions"] is not None:
        table = table[values["positions"]]
        if table.shape[1] == call.dim // 2:
            table = np.concatenate([table, table], axis=1)
    return _widen(table).reshape(call.tokens, 1, call.dim)


def _rotate(x, cos, sin, rounding):
    """C4; `rounding` is C7's, applied to each product and each sum."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    first = rounding(rounding(a * cos[..., :half]) - rounding(b * sin[..., :half]))
    second = rounding(rounding(b * cos[..., half:]) + rounding(a * sin[..., half:]))
    return np.concatenate([first, second], axis=-1)


def _no_rounding(f):
    return f


def _round_to_half(f):
    """C7: to the nearest float16, back in float32."""
    return f.astype(np.float16).astype(np.float32)


def _quantise(f, scale, offset):
    """C6: float32 [T,Nkv,D] to int8; NaN to 0, infinities to the limits."""
    code = f / scale
    if offset is not None:
        code = code + offset
    code = np.clip(np.rint(code), -128, 127)
    return np.where(np.isnan(code), np.float32(0), code).astype(np.int8)


def _widen(array):
    """Any output type to float32, exactly; bfloat16 is the upper half of a float32."""
    if array.dtype.name == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _store_narrowed(target, f):
    """C5: narrow once to target's type, nearest even, every NaN the positive quiet one; any strides of target."""
    nan = np.isnan(f)
    name = target.dtype.name
    if name == "float16":
        with np.errstate(all="ignore"):
            bits, quiet_nan = f.astype(np.float16).view(np.uint16), 0x7E00
    elif name == "float32":
        bits, quiet_nan = f.view(np.uint32), 0x7FC00000
    else:
        wide = f.view(np.uint32)
        bits, quiet_nan = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16), 0x7FC0
    bits = np.where(nan, bits.dtype.type(quiet_nan), bits)
    np.asarray(target).view(bits.dtype)[...] = bits.reshape(target.shape)


def _scatter(call, indices, k_codes, v_codes):
    """I1 to I3: in token order, so that the last of several equal indices wins (I2)."""
    for token in range(call.tokens):
        batch, step = divmod(token, call.steps)
        index = int(indices[token] if call.page else indices[batch])
        if index == -1:  # I3: left only where padding_index allows it
            continue
        row = divmod(index, call.k_cache.shape[1]) if call.page else (batch, index + step)
        call.k_cache[row] = k_codes[token]
        call.v_cache[row] = v_codes[token]


# Checks of metadata: I5 to I8 ---------------------------------------------------------------------------------------


def _require(good, error, name, expected, got):
    """I6: every message names argument, expected and got."""
    if not good:
        raise error(f"{name}: expected {expected}, got {got}")


def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_options(given):
    """Options of a wrong value or a wrong Python type: ValueError (I6)."""

    def require(name, good, expected):
        _require(good, ValueError, name, expected, repr(getattr(given, name)))

    def one_of(name, *choices):
        value = getattr(given, name)
        require(name, isinstance(value, str) and value in choices, " or ".join(map(repr, choices)))

    for name in ("kv_output", "allow_duplicates", "vendor_limits"):
        require(name, isinstance(getattr(given, name), (bool, np.bool_)), "True or False")
    mode = given.quant_mode
    static = mode == "static" if isinstance(mode, str) else _is_int(mode) and mode == 0
    require("quant_mode", static, "0 or 'static'")
    one_of("input_layout", "BSND")
    one_of("cache_mode", "contiguous", "page")
    one_of("numerics", "fp32", "ascend")
    padding, threads, out = given.padding_index, given.num_threads, given.out
    require("padding_index", padding is None or (_is_int(padding) and padding == -1), "None or -1")
    require("num_threads", threads is None or (_is_int(threads) and threads >= 1), "None or an integer >= 1")
    require("out", out is None or (isinstance(out, (tuple, list)) and len(out) == 3), "None or (q, k, v)")


def _array(name, value, *types):
    """I6: an ndarray (not a masked one) in native byte order of one of these types, as a plain ndarray."""
    plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    _require(plain, TypeError, name, f"a numpy.ndarray of {' or '.join(types)}", type(value).__name__)
    good = value.dtype.isnative and value.dtype.name in types
    _require(good, TypeError, name, f"{' or '.join(types)} in native byte order", value.dtype)
    return np.asarray(value)


def _require_shape(name, array, *shapes):
    _require(array.shape in shapes, ValueError, name, f"shape {' or '.join(map(str, shapes))}", array.shape)


def _require_unit_stride(name, array):
    """I5; an axis of size 1 and an array of no elements (I7) have no address to get wrong."""
    good = array.size == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize
    _require(good, ValueError, name, f"unit stride ({array.itemsize} bytes) on the last axis", array.strides)


def _check_operands(given):
    """Types, shapes and strides of all operands but outputs; returns what the rest of the call needs."""
    call = SimpleNamespace(page=given.cache_mode == "page")
    call.cos = _array("cos", given.cos, *_OUTPUT_TYPES)
    call.output = call.cos.dtype.name
    call.sin = _array("sin", given.sin, call.output)
    call.x = _array("x", given.x, "int32", call.output)
    call.x_type = call.x.dtype.name
    call.k_cache = _array("k_cache", given.k_cache, "int8")
    call.v_cache = _array("v_cache", given.v_cache, "int8")
    shape = call.k_cache.shape
    _require(len(shape) == 4, ValueError, "k_cache", "4 dimensions [C1,C2,Nkv,D]", shape)
    _require(call.x.ndim in (2, 3), ValueError, "x", "2 or 3 dimensions", call.x.shape)
    good = min(shape) >= 1 and shape[3] % 2 == 0
    _require(good, ValueError, "k_cache", "C1, C2, Nkv >= 1 and D even, >= 2", shape)

    c1, _, call.kv_heads, call.dim = shape
    _require_shape("v_cache", call.v_cache, call.k_cache.shape)
    call.batches, call.width = call.x.shape[0], call.x.shape[-1]
    call.steps = call.x.shape[1] if call.x.ndim == 3 else 1
    call.tokens = call.batches * call.steps
    call.q_heads = _check_size_splits(given.size_splits, call)
    call.lead = call.x.shape[:-1]
    call.vectors = {}
    if given.positions is None:
        rows = (*call.lead, 1, call.dim) if call.x.ndim == 3 else (*call.lead, call.dim)
        _require_shape("cos", call.cos, rows)
    else:  # I10
        good = call.cos.ndim == 2 and call.cos.shape[1] in (call.dim, call.dim // 2)
        _require(good, ValueError, "cos", f"shape [P,{call.dim}] or [P,{call.dim // 2}]", call.cos.shape)
        call.vectors["positions"] = _array("positions", given.positions, "int32", "int64")
        _require_shape("positions", call.vectors["positions"], (call.tokens,))
    _require_shape("sin", call.sin, call.cos.shape)
    for name in ("x", "cos", "sin", "k_cache", "v_cache"):
        _require_unit_stride(name, getattr(call, name))
    _require(call.page or c1 >= call.batches, ValueError, "k_cache", f"C1 >= {call.batches} batches", c1)  # I1

    call.vectors["indices"] = _array("indices", given.indices, "int32", "int64")
    _require_shape("indices", call.vectors["indices"], (call.tokens if call.page else call.batches,))
    for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
        value = getattr(given, name)
        if name.startswith("scale") or value is not None:
            call.vectors[name] = _array(name, value, "float32")
            heads, dim = call.kv_heads, call.dim
            _require_shape(name, call.vectors[name], (heads, dim), (heads * dim,), (heads, 1), (1,), ())
    if call.x_type == "int32":  # C3: with float x these three are not looked at
        call.vectors["weight_scale"] = _array("weight_scale", given.weight_scale, "float32")
        _require_shape("weight_scale", call.vectors["weight_scale"], (call.width,))
        if given.activation_scale is not None:
            call.vectors["activation_scale"] = _array("activation_scale", given.activation_scale, "float32")
            _require_shape("activation_scale", call.vectors["activation_scale"], (call.tokens,))
        if given.bias is not None:
            call.vectors["bias"] = _array("bias", given.bias, "int32", *_OUTPUT_TYPES)
            _require_shape("bias", call.vectors["bias"], (call.width,))
    return call


def _check_size_splits(splits, call):
    """Three integers that agree with the cache and with x; returns Nq."""
    name, expected = "size_splits", "a list, tuple or 1-D array of 3 integers"
    if isinstance(splits, np.ndarray) and splits.ndim == 1 and splits.dtype.kind in "iu":
        splits = list(splits)
    _require(isinstance(splits, (list, tuple)), TypeError, name, expected, type(splits).__name__)
    _require(all(map(_is_int, splits)), TypeError, name, expected, splits)
    _require(len(splits) == 3, ValueError, name, expected, f"{len(splits)} of them")
    splits = [int(value) for value in splits]
    kv = call.kv_heads * call.dim
    good = splits[1:] == [kv, kv] and splits[0] >= 0 and splits[0] % call.dim == 0 and sum(splits) == call.width
    _require(good, ValueError, name, f"[Nq*{call.dim}, {kv}, {kv}] with sum {call.width} (last axis of x)", splits)
    return splits[0] // call.dim


def _check_vendor_limits(given, call):
    """I8, apart from the strides of outputs."""

    def refuse(bad, error, name, expected, got):
        _require(not bad, error, name, f"{expected} (vendor_limits)", got)

    refuse(call.output == "float32", TypeError, "cos", "float16 or bfloat16", "float32")
    indices = call.vectors["indices"]
    refuse(indices.dtype.name == "int64", TypeError, "indices", "int32", "int64")
    refuse(call.width > 4096 or call.width % 64, ValueError, "x", "H <= 4096, a multiple of 64", call.width)
    refuse(call.dim % 16, ValueError, "k_cache", "D a multiple of 16", call.dim)
    refuse(given.positions is not None, ValueError, "positions", "None", "an array")
    refuse(given.padding_index is not None, ValueError, "padding_index", "None", given.padding_index)
    refuse(given.allow_duplicates, ValueError, "allow_duplicates", "False", given.allow_duplicates)
    for name, other in (("offset_k", "offset_v"), ("offset_v", "offset_k")):
        alone = other in call.vectors and name not in call.vectors
        refuse(alone, ValueError, name, f"an array, as {other} is given", "None")
    for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
        if name in call.vectors:
            shape, heads, dim = call.vectors[name].shape, call.kv_heads, call.dim
            good = shape in ((heads, dim), (heads * dim,))
            refuse(not good, ValueError, name, f"shape {(heads, dim)} or {(heads * dim,)}", shape)
    for name in ("k_cache", "v_cache"):
        refuse(not getattr(call, name).flags.c_contiguous, ValueError, name, "a contiguous array", "a strided one")


def _check_outputs(given, call):
    """q, k and v: those of `out`, checked, else new ones."""
    shapes = {"q": (*call.lead, call.q_heads, call.dim)}
    shapes["k"] = shapes["v"] = (*call.lead, call.kv_heads, call.dim) if given.kv_output else (0,)
    outputs = dict(zip("qkv", given.out or (None,) * 3))
    for name, array in outputs.items():
        if array is None:
            outputs[name] = np.empty(shapes[name], call.cos.dtype)
            continue
        label = f"out {name}"
        _require(name == "q" or given.kv_output, ValueError, label, "None without kv_output", type(array).__name__)
        array = _array(label, array, call.output)
        _require_shape(label, array, shapes[name])
        _require_unit_stride(label, array)
        good = array.flags.c_contiguous or not given.vendor_limits
        _require(good, ValueError, label, "a contiguous array (vendor_limits)", array.strides)
    return outputs


def _check_memory(given, call, outputs):
    """Writeability and overlap of everything that the call writes (I5a)."""
    written = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    written |= {f"out {name}": np.asarray(array) for name, array in outputs.items()}
    read = {"x": call.x, "cos": call.cos, "sin": call.sin, **call.vectors}
    for name, array in written.items():
        _require(array.flags.writeable, ValueError, name, "a writeable array", "a read-only one")
        got = f"shape {array.shape} with strides {array.strides}"
        _require(_axes_nest(array), ValueError, name, "axes that nest, no two elements sharing a byte", got)
    names = list(written) if call.tokens else []  # I7: nothing is written, so nothing can clash
    for position, name in enumerate(names):
        for other in names[position + 1 :] + list(read):
            clash = _overlap(written[name], read[other] if other in read else written[other])
            _require(not clash, ValueError, name, f"no overlap with {other}", "memory that both use")


def _axes_nest(array):
    """I5a: sorted by stride, each stride is at least the bytes of all axes inside it; size-1 axes do not count."""
    inside = array.itemsize
    axes = sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape) if size > 1)
    for stride, size in axes if array.size else []:
        if stride < inside:
            return False
        inside += stride * (size - 1)
    return True


def _overlap(a, b):
    """I5a: byte intervals first, then exactly; arrays of no elements overlap nothing."""
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


# Checks of values: I1 to I4, C6 -------------------------------------------------------------------------------------


def _read_values(given, call):
    """Each vector is copied once (I4) and the copy checked; without tokens nothing is checked (I7)."""
    values = dict.fromkeys(("offset_k", "offset_v", "activation_scale", "bias", "positions"))
    values |= {name: array.copy() for name, array in call.vectors.items()}
    if call.tokens:
        _check_positions(values["positions"], call)
        _check_indices(values["indices"], given, call)
    for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
        if values[name] is not None:
            if call.tokens:
                _check_scale(name, values[name])
            if values[name].shape == (call.kv_heads * call.dim,):
                values[name] = values[name].reshape(call.kv_heads, call.dim)
    return values


def _check_positions(positions, call):
    """I10: rows of the tables."""
    for token, position in enumerate([] if positions is None else positions.tolist()):
        good, limit = 0 <= position < call.cos.shape[0], call.cos.shape[0]
        _require(good, IndexError, f"positions[{token}]", f"0 <= position < {limit}", position)


def _check_indices(indices, given, call):
    """I1 to I3: forward over the positions; the first bad or repeated index is reported."""
    c1, c2 = call.k_cache.shape[:2]
    limit = c1 * c2 if call.page else c2 - call.steps + 1
    first_use = {}
    for position, index in enumerate(indices.tolist()):
        if index == -1 and given.padding_index is not None:
            continue
        where = f"indices[{position}]"
        _require(0 <= index < limit, IndexError, where, f"0 <= index < {limit}", index)
        unique = not call.page or given.allow_duplicates or index not in first_use
        got = f"{index}, also at position {first_use.get(index)}"
        _require(unique, ValueError, where, "an index not used before", got)
        first_use[index] = position


def _check_scale(name, array):
    """C6: scales finite and not zero, offsets finite; by their bits, which no flush-to-zero setting can hide."""
    values = array.reshape(-1)
    magnitude = values.view(np.uint32) & 0x7FFFFFFF
    bad, expected = magnitude >= 0x7F800000, "a finite float32"
    if name.startswith("scale"):
        bad, expected = bad | (magnitude == 0), "a finite, non-zero float32"
    for position in np.flatnonzero(bad)[:1]:
        _require(False, ValueError, f"{name}[{position}]", expected, values[position])
