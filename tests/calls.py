"""Calls written by hand, and the two ways to make one: a result that both implementations agree on, or a refusal by both.

The shared vocabulary of test_numbers.py, test_safety.py and their neighbours; random calls are in cases.py.
"""

import kvquant
import numpy as np
import pytest
from cases import narrow

# Operands -----------------------------------------------------------------------------------------------------------


def f32(bits):
    """float32 from its bits."""
    return np.array(bits, np.uint32).view(np.float32)


def hex32(text):
    """float32 values from their bits in hexadecimal, as one array."""
    return np.array([f32(int(word, 16)) for word in text.split()])


def bits(array):
    """The bits of any array, as a list of integers."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}").tolist()


def one_token(pair, k, v=None, q=None, *, cos=1.0, sin=0.0, scale_k=1.0, scale_v=1.0, **options):
    """A call with one token and one head each for q, k and v, whose dequantised values are exactly these.

    int32 x: each x is 1 and weight_scale holds the values; float x holds them itself. k stands in for a missing q or v.
    """
    x_type, output = pair
    k = np.asarray(k, np.float32)
    row = np.concatenate([np.asarray(part, np.float32) for part in (k if q is None else q, k, k if v is None else v)])
    dim = k.size
    if x_type == "int32":
        options = {"weight_scale": row} | options
        x = np.ones((1, row.size), np.int32)
    else:
        x = narrow(row, x_type)[None]
        assert np.array_equal(x[0].astype(np.float32), row, equal_nan=True), "not a value of this type"
    return dict(
        x=x,
        cos=narrow(np.broadcast_to(np.float32(cos), (1, dim)), output),
        sin=narrow(np.broadcast_to(np.float32(sin), (1, dim)), output),
        k_cache=np.full((1, 1, 1, dim), 77, np.int8),
        v_cache=np.full((1, 1, 1, dim), 77, np.int8),
        indices=np.zeros(1, np.int32),
        scale_k=np.broadcast_to(np.float32(scale_k), (1, dim)).copy(),
        scale_v=np.broadcast_to(np.float32(scale_v), (1, dim)).copy(),
        size_splits=[dim, dim, dim],
        **options,
    )


def tokens_of_codes(pair, codes, cache_shape, indices, *, rank=2, **options):
    """A call whose token t stores codes[t] in every K element and -codes[t] in every V element (scales 1, cos 1, sin 0).

    cache_shape: [C1,C2,Nkv,D]; one head of q. `rank` 3 makes x [1,T,H]; a tuple (B,S) makes it [B,S,H].
    """
    x_type, output = pair
    codes = np.asarray(codes)
    kv_heads, dim = cache_shape[2:]
    row = np.repeat([1, 1, -1], [dim, kv_heads * dim, kv_heads * dim])
    lead = (codes.size,) if rank == 2 else (1, codes.size) if rank == 3 else rank
    x = (codes[:, None] * row).reshape(*lead, row.size)
    table = (*lead, dim) if rank == 2 else (*lead, 1, dim)
    if x_type == "int32":
        options = {"weight_scale": np.ones(row.size, np.float32)} | options
    return dict(
        x=narrow(x, x_type),
        cos=narrow(np.ones(table), output),
        sin=narrow(np.zeros(table), output),
        k_cache=np.full(cache_shape, 77, np.int8),
        v_cache=np.full(cache_shape, 77, np.int8),
        indices=np.asarray(indices, np.int64),
        scale_k=np.ones(1, np.float32),
        scale_v=np.ones(1, np.float32),
        size_splits=[dim, kv_heads * dim, kv_heads * dim],
        **options,
    )


# Calling -------------------------------------------------------------------------------------------------------------


def copies(arguments):
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def call(arguments, isa, **more):
    """The compiled result on copies of the operands, after the reference gave the same bytes on other copies."""
    results = []
    for function, extra in (
        (kvquant.reference.dequant_rope_quant_kvcache, {}),
        (kvquant.dequant_rope_quant_kvcache, {"isa": isa}),
    ):
        results.append(function(**copies(arguments), **more, **extra))
    for name, expected, got in zip(("q", "k", "v", "k_cache", "v_cache"), *results):
        assert expected.dtype == got.dtype and expected.shape == got.shape, name
        assert expected.tobytes() == got.tobytes(), f"{name}: reference {expected.ravel()}, {isa} {got.ravel()}"
    return results[1]


def codes(result):
    """K and V codes of a one-token call."""
    return result[3].ravel().tolist(), result[4].ravel().tolist()


def refused(error, name, arguments, isa, **more):
    """Both implementations raise this error, name the argument first and leave every operand as it was."""
    for function, extra in (
        (kvquant.reference.dequant_rope_quant_kvcache, {}),
        (kvquant.dequant_rope_quant_kvcache, {"isa": isa}),
    ):
        given = {**arguments, **more}
        before = {key: value.tobytes() for key, value in given.items() if isinstance(value, np.ndarray)}
        with pytest.raises(error, match=name):
            function(**given, **extra)
        assert before == {key: value.tobytes() for key, value in given.items() if isinstance(value, np.ndarray)}


def the_one(values):
    """The value that all of these are."""
    assert len(set(values)) == 1, values
    return values[0]


def rows(cache):
    """One number per cache row; all elements of a row are equal in these calls."""
    assert (cache == cache[:, :, :1, :1]).all()
    return cache[:, :, 0, 0].tolist()
