// The 16-lane block as two ymm registers (AVX2 + F16C). Knows no operator. Included inside an anonymous namespace.

constexpr int kBlock = 4;  // tokens that share the column vectors where rows are long

struct F {
  __m256 lo, hi;
};

inline F broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }

inline __m128i load_128(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load_256(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_256(char* p, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), value); }

inline F load(Float32, const char* p) { return {_mm256_castsi256_ps(load_256(p)), _mm256_castsi256_ps(load_256(p + 32))}; }
inline F load(Int32, const char* p) { return {_mm256_cvtepi32_ps(load_256(p)), _mm256_cvtepi32_ps(load_256(p + 32))}; }
inline F load(Float16, const char* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 16))}; }
inline __m256 widen(__m128i bfloat16) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bfloat16), 16)); }
inline F load(Bfloat16, const char* p) { return {widen(load_128(p)), widen(load_128(p + 16))}; }
// float32(x + bias); the sum wraps (C2).
inline F load_sum(const char* x, const char* bias) {
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(load_256(x), load_256(bias))),
          _mm256_cvtepi32_ps(_mm256_add_epi32(load_256(x + 32), load_256(bias + 32)))};
}

// C5: every NaN becomes the positive quiet one. Done before narrowing, where the conversions keep sign and payload.
inline __m256 canonical(__m256 a) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline __m128i narrow_half(__m256 a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Nearest even by integer arithmetic; the result is in the upper half of each 32-bit lane.
inline __m256i round_bfloat16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(canonical(a));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

inline F round_float16(F a) { return {_mm256_cvtph_ps(narrow_half(a.lo)), _mm256_cvtph_ps(narrow_half(a.hi))}; }
inline void store(Float32, char* p, F a) {
  store_256(p, _mm256_castps_si256(canonical(a.lo)));
  store_256(p + 32, _mm256_castps_si256(canonical(a.hi)));
}
inline void store(Float16, char* p, F a) {
  store_256(p, _mm256_set_m128i(narrow_half(canonical(a.hi)), narrow_half(canonical(a.lo))));
}
inline void store(Bfloat16, char* p, F a) {
  // packus works per 128-bit half: the permutation puts the quarters lo0 hi0 lo1 hi1 back in order.
  store_256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bfloat16(a.lo), round_bfloat16(a.hi)), 0xD8));
}
// C6. min and max return their second operand if either is NaN; the conversion of what is then -128 is masked to 0.
inline __m256i quantise(__m256 a) {
  const __m256 clamped = _mm256_max_ps(_mm256_min_ps(a, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-128.0f));
  return _mm256_and_si256(_mm256_cvtps_epi32(clamped), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_ORD_Q)));
}
inline void store(Int8, char* p, F a) {
  const __m256i words = _mm256_packs_epi32(quantise(a.lo), quantise(a.hi));  // quarters lo0 hi0 lo1 hi1
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
