// The 16-lane block as two ymm registers (AVX2, F16C, FMA). Knows no operator. Included inside an anonymous namespace.

constexpr int kWide = 2;  // neighbouring blocks at once: narrowing shares instructions
constexpr bool kReciprocals = true;  // divide() gives the bits of div() where a reciprocal is known
constexpr int kBlock = 4;  // tokens that share the column vectors where rows are long
struct F {
  __m256 lo, hi;
};
struct Pair {
  F a, b;  // columns j and j + dim/2 of one head
};

inline F broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }

// For exact products only, where fused and separate rounding give the same bits.
inline F multiply_add(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F multiply_subtract(F a, F b, F c) { return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)}; }

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
inline void store_raw(char* p, F a) {
  _mm256_storeu_ps(reinterpret_cast<float*>(p), a.lo);
  _mm256_storeu_ps(reinterpret_cast<float*>(p) + 8, a.hi);
}
inline void store(Float32, char* p, F a) {
  store_256(p, _mm256_castps_si256(canonical(a.lo)));
  store_256(p + 32, _mm256_castps_si256(canonical(a.hi)));
}
inline __m256i narrow(Float16, F a) { return _mm256_set_m128i(narrow_half(canonical(a.hi)), narrow_half(canonical(a.lo))); }
inline __m256i narrow(Bfloat16, F a) {
  // packus works per 128-bit half: the permutation puts the quarters lo0 hi0 lo1 hi1 back in order.
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bfloat16(a.lo), round_bfloat16(a.hi)), 0xD8);
}
template <class T> inline void store(T half, char* p, F a) { store_256(p, narrow(half, a)); }

// See divide() in avx512.hpp for why this is the correctly rounded quotient. max and min return their second operand if
// either is NaN: the order here keeps a NaN.
inline __m256 divide(__m256 value, __m256 scale, __m256 reciprocal) {
  const __m256 v = _mm256_max_ps(_mm256_set1_ps(-0x1p60f), _mm256_min_ps(_mm256_set1_ps(0x1p60f), value));
  __m256 q = _mm256_mul_ps(v, reciprocal);
  q = _mm256_fmadd_ps(_mm256_fnmadd_ps(scale, q, v), reciprocal, q);
  return _mm256_fmadd_ps(_mm256_fnmadd_ps(scale, q, v), reciprocal, q);
}
inline F divide(F value, F scale, F reciprocal) {
  return {divide(value.lo, scale.lo, reciprocal.lo), divide(value.hi, scale.hi, reciprocal.hi)};
}
// C6. Clamping before the conversion gives the same as after it, because the limits are integers. NaN lanes are masked to 0.
inline __m256i quantise(__m256 value, __m256 scaled) {
  const __m256 clamped = _mm256_max_ps(_mm256_min_ps(scaled, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-128.0f));
  return _mm256_and_si256(_mm256_cvtps_epi32(clamped), _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_ORD_Q)));
}
inline __m128i quantise(F value, F scaled) {
  // packs works per 128-bit half: quarters lo0 hi0 lo1 hi1 are put back in order.
  const __m256i words = _mm256_packs_epi32(quantise(value.lo, scaled.lo), quantise(value.hi, scaled.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}
// Two neighbouring blocks at once: four shuffles instead of eight.
inline __m256i quantise(F value0, F scaled0, F value1, F scaled1) {
  const __m256i words0 = _mm256_packs_epi32(quantise(value0.lo, scaled0.lo), quantise(value0.hi, scaled0.hi));
  const __m256i words1 = _mm256_packs_epi32(quantise(value1.lo, scaled1.lo), quantise(value1.hi, scaled1.hi));
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words0, words1), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store(Int8, char* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
inline void store(Int8, char* p, __m256i a) { store_256(p, a); }

inline void stream(Float32, char* p, F a) {
  _mm256_stream_ps(reinterpret_cast<float*>(p), canonical(a.lo));
  _mm256_stream_ps(reinterpret_cast<float*>(p) + 8, canonical(a.hi));
}
template <class T> inline void stream(T half, char* p, F a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(half, a)); }
inline void stream(Int8, char* p, __m128i a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), a); }
inline void stream(Int8, char* p, __m256i a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a); }

template <class T>
inline void store(T type, char* p, F first, F second) {
  store(type, p, first);
  store(type, p + 16 * kSize<T>, second);
}
template <class T>
inline void stream(T type, char* p, F first, F second) {
  stream(type, p, first);
  stream(type, p + 16 * kSize<T>, second);
}
