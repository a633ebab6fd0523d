// The physical limit of a call: kernels that move just its bytes, with its access pattern, and compute nothing.
// x, cos and sin are read once; q, k, v and the cache rows are written once. Elements are truncated, not converted. The vectors
// that all tokens share (scales, bias) stay in the first-level cache and are left out.
#pragma once

#include <cstdint>

extern "C" {

// Strides in bytes; x is packed [tokens, (heads_q + 2*heads_kv)*dim], outputs are contiguous. Mirrored in limit.py.
struct LimitCall {
  std::int64_t tokens, heads_q, heads_kv, dim;
  std::int64_t x_item;           // bytes of an element of x, 2 or 4; an element of cos, sin, q, k and v has 2
  std::int64_t head_stride;      // from one head of a token's cache row to the next
  const std::int32_t* rows;      // [tokens], where a token's row begins in either cache, in units of dim bytes
  const char *x, *cos, *sin;
  char *q, *k, *v;               // k and v null: no kv_output
  char *k_cache, *v_cache;
};

// Which stores are non-temporal. Non-temporal ones need 64-byte aligned outputs and rows that are multiples of 64 bytes.
enum LimitStores : std::int32_t { kOrdinary = 0, kStreamRows = 1, kStreamAll = 2 };

// 1 if this call and this machine admit such stores.
int kvquant_limit_admits(const LimitCall* call, int stores);

// Goes through calls[0..count) in turn, beginning at *position, on `threads` threads. Each of `samples` results is the mean
// seconds per call over `repeats` calls.
void kvquant_limit_time(const LimitCall* calls, std::int64_t count, std::int64_t* position, int stores, int threads,
                        std::int64_t samples, std::int64_t repeats, double* seconds);
}
