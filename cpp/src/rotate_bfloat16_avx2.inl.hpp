// Q of bfloat16 x on AVX2: replaces the common kernel where half a head is a multiple of 16 columns up to 128, and falls back
// to it otherwise and for tokens that its guard refuses. Included inside an anonymous namespace after kernel.inl.hpp.
//
// Even and odd columns are worked on apart: a shift or a mask widens them where they are, and a shift and a blend put the
// results together again. cos and sin of all columns are widened once a token.
//
// The guard asks for 2^-64 <= |x| < 2^64, 2^-46 <= |cos| < 2^46 and the same of sin, which may also be 0. Then
// - products have 16 significant bits, are 0 or at least 2^-110 and below 2^110: exact in float32, so that a fused
//   multiply-add gives C1's bits;
// - sums are multiples of 2^-124 below 2^111: +0 or normal, neither infinite nor NaN. (-0 takes two zero products.)
// A sum o is narrowed by two operations. cos and sin are taken times 2^16, which makes the rotation give 2^16 o. Let
// 2^e <= |o| < 2^(e+1); bfloat16 keeps multiples of 2^(e-7), and 2^16 o is one. s = (2^16 - 1) o = 2^16 o - o, rounded, is a
// multiple of 2^(e-7) too: it lies between 2^(e+16) and 2^(e+17), so that 2^16 o - s is o, rounded to a multiple of 2^(e-7).
// If o is half way between two of them, 2^16 o is an even multiple, so that even s means even result. Below
// 2^e (1 + 2^-15), s may be less than 2^(e+16) and rounded to a finer multiple; it then is the one that gives 2^e.

// cos and sin of 16 columns of each half, times 2^16: even columns, then odd ones.
struct EvenOdd {
  __m256 even, odd;
};
struct EvenOddBlock {
  EvenOdd cos_a, cos_b, sin_a, sin_b;
};
constexpr std::int64_t kMaxHalf = 128;  // columns of half a head; longer ones take the common kernel

inline EvenOdd widen_16(__m256i words) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))))};
}
// 2^16 o, even and odd, to o in bfloat16.
inline __m256i narrow_16(EvenOdd o) {
  const __m256 ratio = _mm256_set1_ps(65535.0f / 65536.0f);
  const __m256i even = _mm256_castps_si256(_mm256_sub_ps(o.even, _mm256_mul_ps(o.even, ratio)));
  const __m256i odd = _mm256_castps_si256(_mm256_sub_ps(o.odd, _mm256_mul_ps(o.odd, ratio)));
  return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
}
template <bool kStream>
inline void put(char* p, __m256i value) {
  if constexpr (kStream) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), value);
  else store_256(p, value);
}

// The largest |t| seen, as twice the bits, and the smallest as twice the bits less 1. 0 less 1 is 0 for cos, which refuses it,
// and wraps for sin, which admits it.
struct TableRange {
  __m256i largest, smallest;
  inline void add(__m256i twice, __m256i less_1) {
    largest = _mm256_max_epu16(largest, twice);
    smallest = _mm256_min_epu16(smallest, less_1);
  }
  inline bool good() const {
    const __m256i last = _mm256_set1_epi16(static_cast<short>(((127 + 46) << 8) - 1));
    const __m256i first = _mm256_set1_epi16(((127 - 46) << 8) - 1);
    const __m256i outside = _mm256_or_si256(_mm256_subs_epu16(largest, last), _mm256_subs_epu16(first, smallest));
    return _mm256_testz_si256(outside, outside);
  }
};
inline EvenOdd scaled_16(__m256i words) {
  const EvenOdd t = widen_16(words);
  const __m256 scale = _mm256_set1_ps(65536.0f);
  return {_mm256_mul_ps(t.even, scale), _mm256_mul_ps(t.odd, scale)};
}
inline EvenOdd load_cos(const char* p, TableRange& range) {
  const __m256i words = load_256(p), twice = _mm256_add_epi16(words, words);
  range.add(twice, _mm256_subs_epu16(twice, _mm256_set1_epi16(1)));
  return scaled_16(words);
}
inline EvenOdd load_sin(const char* p, TableRange& range) {
  const __m256i words = load_256(p), twice = _mm256_add_epi16(words, words);
  range.add(twice, _mm256_sub_epi16(twice, _mm256_set1_epi16(1)));
  return scaled_16(words);
}

// False: the guard refused; the token's output is then to be computed anew.
template <bool kStream>
inline bool rotate_token(const Part& p, const Token& token) {
  const std::int64_t half_bytes = p.dim, table_half = 2 * p.table_half;  // bytes
  EvenOddBlock blocks[kMaxHalf / kLanes];
  EvenOddBlock* const end = blocks + half_bytes / 32;
  TableRange range{_mm256_setzero_si256(), _mm256_set1_epi16(-1)};
  const char *cos = token.cos, *sin = token.sin;
  for (EvenOddBlock* block = blocks; block < end; ++block, cos += 32, sin += 32)
    *block = {load_cos(cos, range), load_cos(cos + table_half, range), load_sin(sin, range), load_sin(sin + table_half, range)};
  if (!range.good()) return false;
  // Adding 65 to the exponent field sets its upper bit exactly if it was in 63..190.
  const __m256i shift = _mm256_set1_epi16(65 << 7);
  __m256i ok = _mm256_set1_epi16(0x4000);
  const char* x_head = token.x;
  char* out_head = token.out;
  for (std::int64_t h = 0; h < p.heads; ++h, x_head += p.x_head, out_head += p.out_head) {
    const char* x = x_head;
    char* out = out_head;
    for (const EvenOddBlock* by = blocks; by < end; ++by, x += 32, out += 32) {
      const __m256i words_a = load_256(x), words_b = load_256(x + half_bytes);
      ok = _mm256_and_si256(ok, _mm256_and_si256(_mm256_add_epi16(words_a, shift), _mm256_add_epi16(words_b, shift)));
      const EvenOdd a = widen_16(words_a), b = widen_16(words_b);
      put<kStream>(out, narrow_16({_mm256_fmsub_ps(a.even, by->cos_a.even, _mm256_mul_ps(b.even, by->sin_a.even)),
                                   _mm256_fmsub_ps(a.odd, by->cos_a.odd, _mm256_mul_ps(b.odd, by->sin_a.odd))}));
      put<kStream>(out + half_bytes, narrow_16({_mm256_fmadd_ps(b.even, by->cos_b.even, _mm256_mul_ps(a.even, by->sin_b.even)),
                                                _mm256_fmadd_ps(b.odd, by->cos_b.odd, _mm256_mul_ps(a.odd, by->sin_b.odd))}));
    }
  }
  return _mm256_testc_si256(ok, _mm256_set1_epi16(0x4000));
}

std::int64_t rotate_out_bfloat16(const Part& part, const Token* tokens, std::int64_t count) {
  const Part p = part;  // a copy that no store can alias
  const bool fits = p.dim % 32 == 0 && p.dim <= 2 * kMaxHalf;
  for (std::int64_t t = 0; t < count; ++t)
    if (!fits || !(p.stream_out ? rotate_token<true> : rotate_token<false>)(p, tokens[t]))
      kernel<Bfloat16Source, Bfloat16, true, false, true, false>(p, tokens + t, 1);
  return 0;
}
