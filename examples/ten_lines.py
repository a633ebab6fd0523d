"""The operator in ten lines: one decode step of eight sequences into a paged int8 cache."""
import numpy as np

import kvquant

B, Nq, Nkv, D = 8, 32, 8, 128
rng = np.random.default_rng(0)
x = rng.standard_normal((B, (Nq + 2 * Nkv) * D), np.float32).astype(np.float16)      # the QKV projection's output
angle = rng.integers(0, 4096, (B, 1)) / 10000.0 ** (np.arange(D) % (D // 2) / (D // 2))
cos, sin = np.cos(angle).astype(np.float16), np.sin(angle).astype(np.float16)
k_cache, v_cache = np.zeros((2, 64, 16, Nkv, D), np.int8)                            # 64 pages of 16 tokens
slots = rng.permutation(64 * 16)[:B]                                                 # one free slot a sequence
scale = np.full(Nkv * D, 0.04, np.float32)
q, k, v, k_cache, v_cache = kvquant.dequant_rope_quant_kvcache(
    x, cos, sin, k_cache, v_cache, slots, scale, scale, [Nq * D, Nkv * D, Nkv * D], cache_mode="page", kv_output=True)

stored = k_cache.reshape(-1, Nkv, D)[slots] * np.float32(0.04)
error = np.abs(stored - k.astype(np.float32)).max()
print(f"q {q.shape} {q.dtype}, {B} rows cached by {kvquant.isa.active()}, largest error of K {error:.3f} (half a step is 0.020)")
inside = np.abs(k.astype(np.float32)) < 127 * 0.04
assert np.abs(stored - k.astype(np.float32))[inside].max() < 0.0215  # half a step, and the rounding of k to float16
