// Q of bfloat16 x on AVX512_BF16: replaces the common kernel where half a head is a multiple of 32 columns, and falls back to
// it otherwise and for tokens that its guard refuses. Included inside an anonymous namespace after kernel.inl.hpp.
//
// 32 columns at a time: three shuffles widen them and one instruction narrows the results. cos and sin stay in registers over
// all heads.
//
// The guard asks for 2^-64 <= |x| < 2^64 and 2^-46 <= |cos|, |sin| < 2^18. Then
// - products have 16 significant bits and lie in [2^-110, 2^82): exact in float32, so that a fused multiply-add gives C1's bits;
// - sums are multiples of 2^-124 below 2^83: +0 or normal, neither infinite nor NaN, which is what vcvtne2ps2bf16 rounds as
//   C5 wants.
// It looks at the operands, not at the results, because one result in 70 000 or so is 0.

inline __m512i load_words(const char* p) { return _mm512_loadu_si512(p); }
inline __m512i narrow_32(F low, F high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)); }
inline void put(char* p, __m512i value, bool stream_it) {
  if (stream_it) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), value);
  else _mm512_storeu_si512(p, value);
}

// Added to a bfloat16, they bring the first of its admitted exponents to 128: then bit 14 is set and, in the first 64, bit 13 not.
constexpr short kAddToX = (128 - (127 - 64)) << 7, kAddToTable = (128 - (127 - 46)) << 7;

// cos or sin at one block of columns; what is seen of them goes into the guard's two sums.
inline Wide load_table(const char* p, __m512i& all, __m512i& any) {
  const __m512i words = load_words(p), moved = _mm512_add_epi16(words, _mm512_set1_epi16(kAddToTable));
  all = _mm512_and_si512(all, moved);
  any = _mm512_or_si512(any, moved);
  return widen(words);
}

// False: the guard refused; the token's output is then to be computed anew.
inline bool rotate_token(const Part& p, const Token& token) {
  const std::int64_t half_bytes = p.dim, table_half = 2 * p.table_half;  // bytes
  __m512i all = _mm512_set1_epi16(0x4000), any = _mm512_setzero_si512();
  for (std::int64_t j = 0; j < half_bytes; j += 64) {
    const Wide cos_a = load_table(token.cos + j, all, any), cos_b = load_table(token.cos + j + table_half, all, any);
    const Wide sin_a = load_table(token.sin + j, all, any), sin_b = load_table(token.sin + j + table_half, all, any);
    const char* x = token.x + j;
    char* out = token.out + j;
    for (std::int64_t h = 0; h < p.heads; ++h, x += p.x_head, out += p.out_head) {
      const __m512i words_a = load_words(x), words_b = load_words(x + half_bytes), add = _mm512_set1_epi16(kAddToX);
      all = _mm512_ternarylogic_epi32(all, _mm512_add_epi16(words_a, add), _mm512_add_epi16(words_b, add), 0x80);  // and
      const Wide a = widen(words_a), b = widen(words_b);
      put(out, narrow_32(multiply_subtract(a.low, cos_a.low, mul(b.low, sin_a.low)),
                         multiply_subtract(a.high, cos_a.high, mul(b.high, sin_a.high))), p.stream_out);
      put(out + half_bytes, narrow_32(multiply_add(b.low, cos_b.low, mul(a.low, sin_b.low)),
                                      multiply_add(b.high, cos_b.high, mul(a.high, sin_b.high))), p.stream_out);
    }
  }
  const __m512i outside = _mm512_or_si512(_mm512_andnot_si512(all, _mm512_set1_epi16(0x4000)),
                                          _mm512_and_si512(any, _mm512_set1_epi16(0x2000)));
  return _mm512_test_epi16_mask(outside, outside) == 0;
}

std::int64_t rotate_out_bfloat16(const Part& part, const Token* tokens, std::int64_t count) {
  const Part p = part;  // a copy that no store can alias
  for (std::int64_t t = 0; t < count; ++t)
    if (p.dim % 64 != 0 || !rotate_token(p, tokens[t])) kernel<Bfloat16Source, Bfloat16, true, false, true, false>(p, tokens + t, 1);
  return 0;
}
