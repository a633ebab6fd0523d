// The 16-lane block as one zmm register (AVX-512 F, BW, VL, DQ). Knows no operator. Included inside an anonymous namespace.

constexpr int kBlock = 4;  // tokens that share the column vectors where rows are long; 8 was not better, 16 worse

struct F {
  __m512 v;
};

inline F broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F widen(__m256i bfloat16) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16))}; }

inline F load(Float32, const char* p) { return {_mm512_loadu_ps(p)}; }
inline F load(Int32, const char* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
inline F load(Float16, const char* p) { return {_mm512_cvtph_ps(_mm256_loadu_epi16(p))}; }
inline F load(Bfloat16, const char* p) { return widen(_mm256_loadu_epi16(p)); }
// float32(x + bias); the sum wraps (C2).
inline F load_sum(const char* x, const char* bias) {
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(x), _mm512_loadu_si512(bias)))};
}
inline F load_n(Float32, const char* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline F load_n(Int32, const char* p, int n) { return {_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(first(n), p))}; }
inline F load_n(Float16, const char* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p))}; }
inline F load_n(Bfloat16, const char* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline F load_sum_n(const char* x, const char* bias, int n) {
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_maskz_loadu_epi32(first(n), x), _mm512_maskz_loadu_epi32(first(n), bias)))};
}

// C5: every NaN becomes the positive quiet one. One instruction: the table takes the first operand for the classes "quiet
// NaN" and "signalling NaN" (nibbles 0 and 1) and the second for all others.
inline __m512 canonical(F a) {
  return _mm512_fixupimm_ps(_mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)), a.v, _mm512_set1_epi32(0x11111100), 0);
}
inline __m256i narrow_half(__m512 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m256i narrow(Float16, F a) { return narrow_half(canonical(a)); }
inline __m256i narrow(Bfloat16, F a) {  // nearest even by integer arithmetic: vcvtneps2bf16 flushes subnormals
  const __m512i bits = _mm512_castps_si512(canonical(a));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16));
}
// C6. A value of at least 2^31 would convert to INT_MIN, so 127 is the upper bound before the conversion; below, INT_MIN
// saturates to -128 as it should. NaN lanes are zeroed by the mask.
inline __m128i narrow(Int8, F a) {
  const __mmask16 ordered = _mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q);
  return _mm512_cvtsepi32_epi8(_mm512_maskz_cvtps_epi32(ordered, _mm512_min_ps(a.v, _mm512_set1_ps(127.0f))));
}

inline F round_float16(F a) { return {_mm512_cvtph_ps(narrow_half(a.v))}; }
inline void store(Float32, char* p, F a) { _mm512_storeu_ps(p, canonical(a)); }
inline void store(Float16, char* p, F a) { _mm256_storeu_epi16(p, narrow(Float16{}, a)); }
inline void store(Bfloat16, char* p, F a) { _mm256_storeu_epi16(p, narrow(Bfloat16{}, a)); }
inline void store(Int8, char* p, F a) { _mm_storeu_epi8(p, narrow(Int8{}, a)); }
inline void store_n(Float32, char* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), canonical(a)); }
inline void store_n(Float16, char* p, F a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(Float16{}, a)); }
inline void store_n(Bfloat16, char* p, F a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(Bfloat16{}, a)); }
inline void store_n(Int8, char* p, F a, int n) { _mm_mask_storeu_epi8(p, first(n), narrow(Int8{}, a)); }
