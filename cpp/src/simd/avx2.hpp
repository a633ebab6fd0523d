// The 16-lane block as two ymm registers (AVX2, F16C, FMA). Knows no operator. Included inside an anonymous namespace.

constexpr int kWide = 2;  // neighbouring blocks at once: narrowing shares instructions
constexpr int kWideRow = kWide;
constexpr bool kFixedPoint = false;  // parts_avx2.inl.hpp has it
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
// Each 16-bit value to the upper half of a 32-bit lane, with zeros below: one shuffle, where widening and shifting are two. It
// works per 128-bit half, so both halves get all eight values; a load does that on its way.
inline __m256 widen(__m128i bfloat16) {
  const __m256i order = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                         -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bfloat16), order));
}
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
inline F canonical(F a) { return {canonical(a.lo), canonical(a.hi)}; }
inline __m256 unordered(F a) { return _mm256_cmp_ps(a.lo, a.hi, _CMP_UNORD_Q); }  // not 0 if there is a NaN

inline __m128i narrow_half(__m256 a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Nearest even by integer arithmetic; the result is in the lower half of each 32-bit lane. Not for NaN.
inline __m256i round_bfloat16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

inline F round_float16(F a) { return {_mm256_cvtph_ps(narrow_half(a.lo)), _mm256_cvtph_ps(narrow_half(a.hi))}; }
inline void store_raw(char* p, F a) {
  _mm256_storeu_ps(reinterpret_cast<float*>(p), a.lo);
  _mm256_storeu_ps(reinterpret_cast<float*>(p) + 8, a.hi);
}
inline __m256i narrow(Bfloat16, F a) {
  // packus works per 128-bit half: the permutation puts the quarters lo0 hi0 lo1 hi1 back in order.
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bfloat16(a.lo), round_bfloat16(a.hi)), 0xD8);
}
// Of values that are no NaN, or the canonical one.
inline void store_canonical(Float32, char* p, F a) { store_raw(p, a); }
// Not by the conversion's own store: on Zen 5 that takes 2 cycles, and the two instructions together less than one.
inline void store_canonical(Float16, char* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_half(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), narrow_half(a.hi));
}
inline void store_canonical(Bfloat16 type, char* p, F a) { store_256(p, narrow(type, a)); }
inline void stream_canonical(Float32, char* p, F a) {
  _mm256_stream_ps(reinterpret_cast<float*>(p), a.lo);
  _mm256_stream_ps(reinterpret_cast<float*>(p) + 8, a.hi);
}
inline void stream_canonical(Float16, char* p, F a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_set_m128i(narrow_half(a.hi), narrow_half(a.lo)));
}
inline void stream_canonical(Bfloat16 type, char* p, F a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(type, a)); }
template <class T> inline void store(T type, char* p, F a) { store_canonical(type, p, canonical(a)); }
template <class T> inline void stream(T type, char* p, F a) { stream_canonical(type, p, canonical(a)); }

struct Words {
  __m256i lo, hi;
};
// C6. A value of at least 2^31 would convert to INT_MIN, so 127 is the upper bound before the conversion; below, INT_MIN
// saturates to -128 as it should.
inline __m256i whole(__m256 scaled) { return _mm256_cvtps_epi32(_mm256_min_ps(scaled, _mm256_set1_ps(127.0f))); }
// NaN lanes are masked to 0.
inline __m256i whole(__m256 value, __m256 scaled) {
  return _mm256_and_si256(whole(scaled), _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_ORD_Q)));
}
inline Words whole(F value, F scaled) { return {whole(value.lo, scaled.lo), whole(value.hi, scaled.hi)}; }
inline __m128i narrow(Words a) {
  // packs works per 128-bit half: quarters lo0 hi0 lo1 hi1 are put back in order.
  const __m256i ordered = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}
// Two neighbouring blocks at once: four shuffles instead of eight.
inline __m256i narrow(Words a, Words b) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a.lo, a.hi), _mm256_packs_epi32(b.lo, b.hi));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store(Int8, char* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
inline void store(Int8, char* p, __m256i a) { store_256(p, a); }

inline void stream(Int8, char* p, __m128i a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), a); }
inline void stream(Int8, char* p, __m256i a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a); }

// Two neighbouring blocks at once: one branch for both instead of three instructions for each register.
inline void canonicalise(F& first, F& second) {
  if (__builtin_expect(_mm256_movemask_ps(_mm256_or_ps(unordered(first), unordered(second))) == 0, 1)) return;
  first = canonical(first);
  second = canonical(second);
}
template <class T>
inline void store(T type, char* p, F first, F second) {
  canonicalise(first, second);
  store_canonical(type, p, first);
  store_canonical(type, p + 16 * kSize<T>, second);
}
template <class T>
inline void stream(T type, char* p, F first, F second) {
  canonicalise(first, second);
  stream_canonical(type, p, first);
  stream_canonical(type, p + 16 * kSize<T>, second);
}
