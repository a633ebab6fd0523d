// Q of bfloat16 x on AVX512_BF16: replaces the common kernel where half a head is a multiple of 32 columns, and falls back to
// it otherwise and for tokens that its guard refuses. Included inside an anonymous namespace after kernel.inl.hpp.
//
// 32 columns at a time: two shuffles widen them and one instruction narrows the results. cos and sin stay in registers over
// all heads.
//
// The product of two bfloat16 values is exact in float32 unless it leaves the normal range, so a fused multiply-add gives
// C1's bits there. Whether a product left it is seen at the results:
// - A product that overflowed is at least 2^128. Products have at most 16 significant bits, so that the sum of one such and
//   any other is at least 2^112, infinite or NaN, fused or not.
// - A product below 2^-126 carries an error of at most 2^-150, which can change the bits of a result below 2^-100 only.
// Results with 2^-63 <= |o| < 2^65 are therefore right; a bfloat16 is in that range exactly if its bits 14 and 13 differ.
// vcvtne2ps2bf16 meets no subnormal and no NaN there.

struct Wide {
  F low, high;  // columns 0-15 and 16-31
};
inline Wide load_32(const char* p) { return {load(Bfloat16{}, p), load(Bfloat16{}, p + 32)}; }
inline __m512i narrow_32(F low, F high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)); }
// Keeps bit 14 of `ok` only where bits 14 and 13 of `bits` differ.
inline __m512i check_range(__m512i ok, __m512i bits) {
  return _mm512_ternarylogic_epi32(ok, bits, _mm512_add_epi16(bits, bits), 0x60);  // ok & (bits ^ 2*bits)
}
inline void put(char* p, __m512i value, bool stream_it) {
  if (stream_it) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), value);
  else _mm512_storeu_si512(p, value);
}

// False: the guard refused; the token's output is then to be computed anew.
inline bool rotate_token(const Part& p, const Token& token) {
  const std::int64_t half_bytes = p.dim, table_half = 2 * p.table_half;  // bytes
  __m512i ok = _mm512_set1_epi16(0x4000);
  for (std::int64_t j = 0; j < half_bytes; j += 64) {
    const Wide cos_a = load_32(token.cos + j), cos_b = load_32(token.cos + j + table_half);
    const Wide sin_a = load_32(token.sin + j), sin_b = load_32(token.sin + j + table_half);
    const char* x = token.x + j;
    char* out = token.out + j;
    for (std::int64_t h = 0; h < p.heads; ++h, x += p.x_head, out += p.out_head) {
      const Wide a = load_32(x), b = load_32(x + half_bytes);
      const __m512i low = narrow_32(multiply_subtract(a.low, cos_a.low, mul(b.low, sin_a.low)),
                                    multiply_subtract(a.high, cos_a.high, mul(b.high, sin_a.high)));
      const __m512i high = narrow_32(multiply_add(b.low, cos_b.low, mul(a.low, sin_b.low)),
                                     multiply_add(b.high, cos_b.high, mul(a.high, sin_b.high)));
      ok = check_range(check_range(ok, low), high);
      put(out, low, p.stream_out);
      put(out + half_bytes, high, p.stream_out);
    }
  }
  return _mm512_testn_epi16_mask(ok, _mm512_set1_epi16(0x4000)) == 0;
}

std::int64_t rotate_out_bfloat16(const Part& part, const Token* tokens, std::int64_t count) {
  const Part p = part;  // a copy that no store can alias
  for (std::int64_t t = 0; t < count; ++t)
    if (p.dim % 64 != 0 || !rotate_token(p, tokens[t])) kernel<Bfloat16Source, Bfloat16, true, false, true, false>(p, tokens + t, 1);
  return 0;
}
