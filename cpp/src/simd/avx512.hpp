// The 16-lane block as one zmm register (AVX-512 F, BW, VL, DQ). Knows no operator. Included inside an anonymous namespace.

constexpr int kWide = 2;  // neighbouring blocks at once: narrowing shares instructions
constexpr int kWideRow = 4;  // the same where a cache row is written: whole lines
constexpr bool kFixedPoint = true;  // of cache rows, with fixed_point.hpp
constexpr int kBlock = 4;  // tokens that share the column vectors where rows are long; 8 was not better, 16 worse

struct F {
  __m512 v;
};
struct Pair {
  F a, b;  // columns j and j + dim/2 of one head
};

inline F broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
// For exact products, where fused and separate rounding give the same bits, or where fixed_point.hpp says that it doesn't matter.
inline F multiply_add(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F multiply_subtract(F a, F b, F c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
// Each 16-bit value to the upper half of a 32-bit lane, with zeros below.
inline F widen(__m256i bfloat16) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16))}; }
// 32 values: three shuffles. vpermw could do it by two, of two steps each on Intel. Unpacking works per 128-bit quarter: quarter i
// is to hold values 4i..4i+3 and 16+4i..16+4i+3.
struct Wide {
  F low, high;  // values 0-15 and 16-31
};
inline Wide widen(__m512i bfloat16) {
  const __m512i words = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bfloat16);
  return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), words))},
          {_mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), words))}};
}

inline F load(Float32, const char* p) { return {_mm512_loadu_ps(p)}; }
inline F load(Int32, const char* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
inline F load(Float16, const char* p) { return {_mm512_cvtph_ps(_mm256_loadu_epi16(p))}; }
inline F load(Bfloat16, const char* p) { return widen(_mm256_loadu_epi16(p)); }
inline void load_two(Bfloat16, const char* p, F& first, F& second) {
  const Wide wide = widen(_mm512_loadu_si512(p));
  first = wide.low;
  second = wide.high;
}
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
inline __m256i narrow(Bfloat16, F a);  // each target's own
inline __m256i narrow(Float16, F a) { return narrow_half(canonical(a)); }
// Nearest even by integer arithmetic, for every input.
inline __m256i round_bfloat16(F a) {
  const __m512i bits = _mm512_castps_si512(canonical(a));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16));
}

using Words = __m512i;
// C6. A value of at least 2^31 would convert to INT_MIN, so 127 is the upper bound before the conversion; below, INT_MIN
// saturates to -128 as it should.
inline Words whole(F scaled) { return _mm512_cvtps_epi32(_mm512_min_ps(scaled.v, _mm512_set1_ps(127.0f))); }
// Where the value is a NaN, 0 takes the quotient's place (a table as in canonical()).
inline Words whole(F value, F scaled) {
  return whole(F{_mm512_fixupimm_ps(scaled.v, value.v, _mm512_set1_epi32(0x00000088), 0)});
}
// In fixed point (fixed_point.hpp): its conversion, the least lower halves, whether one of the first n is doubtful, the codes.
inline Words fixed(F value, F reciprocal, F offset) { return _mm512_cvtps_epi32(_mm512_fmadd_ps(value.v, reciprocal.v, offset.v)); }
inline Words least(Words a, Words b) { return _mm512_min_epu16(a, b); }
inline bool doubtful(Words least, int n) {
  const __m512i lower = _mm512_and_si512(least, _mm512_set1_epi32(0xFFFF));
  return _mm512_mask_cmple_epi32_mask(first(n), lower, _mm512_set1_epi32(kDoubtful)) != 0;
}
inline Words code(Words fixed) { return _mm512_srai_epi32(fixed, 16); }
inline __m128i narrow(Words a) { return _mm512_cvtsepi32_epi8(a); }
// Neighbouring blocks at once: fewer shuffles. packs works per 128-bit quarter: quarter i then holds bytes 4i..4i+3 of block 0,
// the same of block 1, and so on.
inline __m256i narrow(Words a, Words b) {
  const __m512i words = _mm512_packs_epi32(a, b);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, words)));
}
inline __m512i narrow(Words a, Words b, Words c, Words d) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
}

inline F round_float16(F a) { return {_mm512_cvtph_ps(narrow_half(a.v))}; }
inline void store_raw(char* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store(Float32, char* p, F a) { _mm512_storeu_ps(p, canonical(a)); }
inline void store(Float16, char* p, F a) { _mm256_storeu_epi16(p, narrow(Float16{}, a)); }
inline void store(Bfloat16, char* p, F a) { _mm256_storeu_epi16(p, narrow(Bfloat16{}, a)); }
// Two neighbouring blocks at once: whole lines, which non-temporal stores want.
template <class T>
inline __m512i narrow(T half, F first, F second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(half, first)), narrow(half, second), 1);
}
inline void store(Float32 type, char* p, F first, F second) {
  store(type, p, first);
  store(type, p + 64, second);
}
template <class T> inline void store(T half, char* p, F first, F second) { _mm512_storeu_si512(p, narrow(half, first, second)); }
inline void store(Int8, char* p, __m128i a) { _mm_storeu_epi8(p, a); }
inline void store(Int8, char* p, __m256i a) { _mm256_storeu_epi8(p, a); }
inline void store(Int8, char* p, __m512i a) { _mm512_storeu_si512(p, a); }
inline void store_n(Float32, char* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), canonical(a)); }
inline void store_n(Float16, char* p, F a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(Float16{}, a)); }
inline void store_n(Bfloat16, char* p, F a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(Bfloat16{}, a)); }
inline void store_n(Int8, char* p, __m128i a, int n) { _mm_mask_storeu_epi8(p, first(n), a); }
inline void stream(Float32, char* p, F a) { _mm512_stream_ps(reinterpret_cast<float*>(p), canonical(a)); }
template <class T> inline void stream(T half, char* p, F a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(half, a)); }
inline void stream(Int8, char* p, __m128i a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), a); }
inline void stream(Int8, char* p, __m256i a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a); }
inline void stream(Int8, char* p, __m512i a) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), a); }
inline void stream(Float32 type, char* p, F first, F second) {
  stream(type, p, first);
  stream(type, p + 64, second);
}
template <class T>
inline void stream(T half, char* p, F first, F second) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow(half, first, second));
}
