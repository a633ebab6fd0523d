"""One decode step and one prefill into the cache layouts of real engines; each must hold the same bytes. See docs/embedding.md."""
import numpy as np

import kvquant

heads_q, heads_kv, dim, blocks, block_size, limit = 4, 2, 64, 12, 8, 48
rng = np.random.default_rng(1)

# Three sequences. Two decode one token each, at positions 9 and 20; the third prefills positions 0 to 4. One padding token ends
# the batch. All tokens form one ragged batch: x is 2-D, one row per token.
sequence_of_token = np.array([0, 1, 2, 2, 2, 2, 2, 3])
positions = np.array([9, 20, 0, 1, 2, 3, 4, 0])
block_table = np.array([[7, 2, -1], [0, 5, 11], [3, -1, -1], [-1, -1, -1]], np.int32)  # -1: no block; the padding's row is all -1

# Where each token goes; -1 for the padding.
slots = kvquant.slots(block_table[sequence_of_token], positions, block_size)
print("slots", slots.tolist())

angle = np.outer(np.arange(limit), 10000.0 ** (-np.arange(0, dim, 2) / dim))
operands = {
    "x": rng.standard_normal((positions.size, (heads_q + 2 * heads_kv) * dim)).astype(np.float16),
    "cos": np.cos(angle).astype(np.float16),  # [P,D/2]: one table for all sequences, each value for both halves of a head
    "sin": np.sin(angle).astype(np.float16),
    "positions": positions,
    "indices": slots,
    "scale_k": np.full(1, 0.03, np.float32),
    "scale_v": np.full(1, 0.03, np.float32),
    "size_splits": [heads_q * dim, heads_kv * dim, heads_kv * dim],
    "cache_mode": "page",
    "padding_index": -1,
}


def zeros(*shape):
    return np.zeros(shape, np.int8)


# Each layout as views [blocks, block_size, Nkv, D] of what the engine allocated; nothing is copied.
kv_first = zeros(2, blocks, block_size, heads_kv, dim)
kv_second = zeros(blocks, 2, block_size, heads_kv, dim)
head_major = zeros(2, blocks, heads_kv, block_size, dim)
side_by_side = zeros(blocks, block_size, heads_kv, 2 * dim)
padded = zeros(2, blocks, block_size + 3, heads_kv, dim)
pool = zeros(2, blocks * block_size, heads_kv, dim)
layouts = {
    "[blocks,bs,heads,D], twice": (zeros(blocks, block_size, heads_kv, dim), zeros(blocks, block_size, heads_kv, dim)),
    "[2,blocks,bs,heads,D]": (kv_first[0], kv_first[1]),
    "[blocks,2,bs,heads,D]": (kv_second[:, 0], kv_second[:, 1]),
    "[blocks,heads,bs,D], head-major": tuple(head_major.transpose(0, 1, 3, 2, 4)),
    "[blocks,bs,heads,2*D], K beside V": (side_by_side[..., :dim], side_by_side[..., dim:]),
    "[blocks,bs+3,heads,D], padded pages": tuple(padded[:, :, :block_size]),
    "[slots,heads,D], a pool of slots": (pool[0][:, None], pool[1][:, None]),  # blocks of one slot
}
expected = None
for name, (k_cache, v_cache) in layouts.items():
    q, *_ = kvquant.dequant_rope_quant_kvcache(k_cache=k_cache, v_cache=v_cache, **operands)
    found = [a.reshape(-1, heads_kv, dim)[slots[:-1]].tobytes() for a in (k_cache, v_cache)] + [q.tobytes()]
    expected = expected or found
    untouched = np.count_nonzero(k_cache.any(axis=(-1, -2))) == np.count_nonzero(v_cache.any(axis=(-1, -2))) == slots.size - 1
    print(f"{name:38} {'equal' if found == expected and untouched else 'DIFFERENT'}")
    assert found == expected and untouched

# The same step through a plan, as an engine calls it for every layer and step: what changes is given to run.
plan = kvquant.plan(k_cache=kv_first[0], v_cache=kv_first[1], **operands)
print(plan.describe())
layers = [zeros(2, blocks, block_size, heads_kv, dim) for _ in range(3)]
for kv in layers:
    plan.run(k_cache=kv[0], v_cache=kv[1])
assert all(np.array_equal(kv, kv_first) for kv in layers)
one = slice(0, 1)  # another number of tokens is fine: this run has one
plan.run(slots[one], x=operands["x"][one], positions=positions[one], k_cache=layers[0][0], v_cache=layers[0][1])
assert np.array_equal(layers[0], kv_first)
