// See limit.hpp. Built with -march=native: a limit is the limit of the machine that it is measured on.
#include "limit.hpp"

#include <chrono>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// 64 bytes, in as many registers as the machine needs for them.
typedef std::int64_t Block __attribute__((vector_size(64)));

Block load(const char* p) {
  Block block;
  std::memcpy(&block, p, sizeof block);
  return block;
}

template <bool Stream>
void store(char* p, Block block) {
#if defined(__AVX512F__)
  if constexpr (Stream) return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), reinterpret_cast<__m512i>(block));
#elif defined(__AVX__)
  if constexpr (Stream) {
    __m256i half[2];
    std::memcpy(half, &block, sizeof block);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), half[0]);
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(p + 32), half[1]);
  }
#endif
  std::memcpy(p, &block, sizeof block);
}

#if defined(__AVX512BW__)
// GCC 12 does not find these instructions in the loop of narrow(), and a block that is put together in memory costs more than
// all the rest: hence registers only.
template <class From, class To>
__m256i half(const char* from) {
  const __m512i low = _mm512_loadu_si512(from);
  if constexpr (sizeof(From) == 2) return _mm512_cvtepi16_epi8(low);
  else if constexpr (sizeof(To) == 2) return _mm512_cvtepi32_epi16(low);
  else {
    const __m512i high = _mm512_loadu_si512(from + 64);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(low)), _mm512_cvtepi32_epi8(high), 1);
  }
}
#endif

// The low parts, of the size of To, of 64 / sizeof(To) elements of type From.
template <class From, class To>
Block narrow(const char* from) {
  if constexpr (sizeof(From) == sizeof(To)) return load(from);
  else {
#if defined(__AVX512BW__)
    const __m256i low = half<From, To>(from), high = half<From, To>(from + 32 * sizeof(From) / sizeof(To));
    return reinterpret_cast<Block>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#else
    constexpr std::size_t kCount = 64 / sizeof(To);
    From wide[kCount];
    To narrowed[kCount];
    std::memcpy(wide, from, sizeof wide);
    for (std::size_t i = 0; i < kCount; ++i) narrowed[i] = static_cast<To>(wide[i]);
    return load(reinterpret_cast<const char*>(narrowed));
#endif
  }
}

// Counts are at least a block (a head has at least 64 elements); the last block may overlap the one before.
template <class From, class To, bool Stream>
void move_elements(const char* from, char* to, std::int64_t count) {
  constexpr std::int64_t kCount = 64 / sizeof(To), kFrom = sizeof(From), kTo = sizeof(To);
  for (std::int64_t i = 0; i + kCount <= count; i += kCount) store<Stream>(to + kTo * i, narrow<From, To>(from + kFrom * i));
  if (count % kCount != 0) store<false>(to + kTo * (count - kCount), narrow<From, To>(from + kFrom * (count - kCount)));
}

Block read(const char* p, std::int64_t bytes, Block seen) {
  for (std::int64_t i = 0; i + 64 <= bytes; i += 64) seen |= load(p + i);
  return bytes % 64 == 0 ? seen : seen | load(p + bytes - 64);
}

template <class X, bool Stream>
void move_row(const LimitCall& call, const char* x, char* row) {
  constexpr std::int64_t kItem = sizeof(X);
  const std::int64_t dim = call.dim;
  if (call.head_stride == dim) return move_elements<X, std::int8_t, Stream>(x, row, call.heads_kv * dim);
  for (std::int64_t h = 0; h < call.heads_kv; ++h)
    move_elements<X, std::int8_t, Stream>(x + kItem * h * dim, row + h * call.head_stride, dim);
}

template <class X, bool StreamOutputs, bool StreamRows>
void move(const LimitCall& call, std::int64_t first, std::int64_t last) {
  constexpr std::int64_t kItem = sizeof(X);
  const std::int64_t q = call.heads_q * call.dim, kv = call.heads_kv * call.dim, table = 2 * call.dim;
  Block seen = {};
  for (std::int64_t t = first; t < last; ++t) {
    const char* x = call.x + t * (q + 2 * kv) * kItem;
    seen = read(call.sin + t * table, table, read(call.cos + t * table, table, seen));
    move_elements<X, std::int16_t, StreamOutputs>(x, call.q + 2 * t * q, q);
    if (call.k != nullptr) {
      move_elements<X, std::int16_t, StreamOutputs>(x + kItem * q, call.k + 2 * t * kv, kv);
      move_elements<X, std::int16_t, StreamOutputs>(x + kItem * (q + kv), call.v + 2 * t * kv, kv);
    }
    const std::int64_t row = call.rows[t] * call.dim;
    move_row<X, StreamRows>(call, x + kItem * q, call.k_cache + row);
    move_row<X, StreamRows>(call, x + kItem * (q + kv), call.v_cache + row);
  }
  // The compiler must believe that somebody wants what was read.
  const std::int64_t all = seen[0] | seen[1] | seen[2] | seen[3] | seen[4] | seen[5] | seen[6] | seen[7];
  asm volatile("" : : "r"(all));
#if defined(__x86_64__)
  if (StreamOutputs || StreamRows) _mm_sfence();
#endif
}

using Mover = void (*)(const LimitCall&, std::int64_t, std::int64_t);

Mover mover(std::int64_t item, int stores) {
  static constexpr Mover kMovers[2][3] = {
      {move<std::int16_t, false, false>, move<std::int16_t, false, true>, move<std::int16_t, true, true>},
      {move<std::int32_t, false, false>, move<std::int32_t, false, true>, move<std::int32_t, true, true>}};
  return kMovers[item == 4][stores];
}

void run(Mover f, const LimitCall& call, int threads) {
  if (threads == 1 || call.tokens == 1) return f(call, 0, call.tokens);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; ++i) f(call, call.tokens * i / threads, call.tokens * (i + 1) / threads);
}

}  // namespace

int kvquant_limit_admits([[maybe_unused]] const LimitCall* call, int stores) {
  if (stores == kOrdinary) return 1;
#if defined(__AVX__)
  const bool dense = call->head_stride == call->dim;
  const std::int64_t row = dense ? call->heads_kv * call->dim : call->dim;
  if (row % 64 != 0 || (!dense && call->head_stride % 64 != 0)) return 0;
  return stores == kStreamRows || (call->heads_q * call->dim % 32 == 0 && call->heads_kv * call->dim % 32 == 0);
#else
  return 0;
#endif
}

void kvquant_limit_time(const LimitCall* calls, std::int64_t count, std::int64_t* position, int stores, int threads,
                        std::int64_t samples, std::int64_t repeats, double* seconds) {
  using Clock = std::chrono::steady_clock;
  const Mover f = mover(calls[0].x_item, stores);
  for (std::int64_t i = 0; i < samples; ++i) {
    const Clock::time_point start = Clock::now();
    for (std::int64_t j = 0; j < repeats; ++j) {
      run(f, calls[*position], threads);
      if (++*position == count) *position = 0;
    }
    seconds[i] = std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(repeats);
  }
}
