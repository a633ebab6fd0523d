// The 16-lane block as four q registers (AArch64 baseline, little endian). Knows no operator. Included inside an anonymous
// namespace.

constexpr int kWide = 1;  // two blocks would share no instruction of quantise()
constexpr int kWideRow = 1;
constexpr bool kFixedPoint = false;
constexpr int kBlock = 4;  // tokens that share the column vectors where rows are long; as on AVX2, a block is 1/8 of the registers
// Four members, not an array, and no loops below: GCC keeps an array, or what a loop indexes, in memory.
struct F {
  float32x4_t v0, v1, v2, v3;
};
struct Pair {
  F a, b;  // columns j and j + dim/2 of one head
};

inline F broadcast(float value) {
  const float32x4_t v = vdupq_n_f32(value);
  return {v, v, v, v};
}
inline F add(F a, F b) {
  return {vaddq_f32(a.v0, b.v0), vaddq_f32(a.v1, b.v1), vaddq_f32(a.v2, b.v2), vaddq_f32(a.v3, b.v3)};
}
inline F sub(F a, F b) {
  return {vsubq_f32(a.v0, b.v0), vsubq_f32(a.v1, b.v1), vsubq_f32(a.v2, b.v2), vsubq_f32(a.v3, b.v3)};
}
inline F mul(F a, F b) {
  return {vmulq_f32(a.v0, b.v0), vmulq_f32(a.v1, b.v1), vmulq_f32(a.v2, b.v2), vmulq_f32(a.v3, b.v3)};
}
inline F div(F a, F b) {
  return {vdivq_f32(a.v0, b.v0), vdivq_f32(a.v1, b.v1), vdivq_f32(a.v2, b.v2), vdivq_f32(a.v3, b.v3)};
}

// For exact products only, where fused and separate rounding give the same bits.
inline F multiply_add(F a, F b, F c) {
  return {vfmaq_f32(c.v0, a.v0, b.v0), vfmaq_f32(c.v1, a.v1, b.v1), vfmaq_f32(c.v2, a.v2, b.v2),
           vfmaq_f32(c.v3, a.v3, b.v3)};
}
// FMLS is c - a*b: negated, it would turn the +0 of equal operands into -0.
inline F multiply_subtract(F a, F b, F c) { return sub(mul(a, b), c); }

// Loads and stores of bytes: the only element type for which any address is aligned.
inline uint8x16_t load_128(const char* p) { return vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)); }
inline void store_128(char* p, uint8x16_t value) { vst1q_u8(reinterpret_cast<std::uint8_t*>(p), value); }

inline F load(Float32, const char* p) {
  return {vreinterpretq_f32_u8(load_128(p)), vreinterpretq_f32_u8(load_128(p + 16)), vreinterpretq_f32_u8(load_128(p + 32)),
           vreinterpretq_f32_u8(load_128(p + 48))};
}
inline float32x4_t load_words(const char* p) { return vcvtq_f32_s32(vreinterpretq_s32_u8(load_128(p))); }
inline F load(Int32, const char* p) { return {load_words(p), load_words(p + 16), load_words(p + 32), load_words(p + 48)}; }
// FPCR.AHP would read and write infinity and NaN as numbers; the operator runs with FPCR = 0 (fp_state.hpp).
inline F widen(float16x8_t lo, float16x8_t hi) {
  return {vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)), vcvt_high_f32_f16(hi)};
}
inline F load(Float16, const char* p) {
  return widen(vreinterpretq_f16_u8(load_128(p)), vreinterpretq_f16_u8(load_128(p + 16)));
}
inline F load(Bfloat16, const char* p) {
  const uint16x8_t lo = vreinterpretq_u16_u8(load_128(p)), hi = vreinterpretq_u16_u8(load_128(p + 16));
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(lo), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(lo, 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(hi), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(hi, 16))};
}
// float32(x + bias); the sum wraps (C2), so it is formed unsigned: to GCC, vaddq_s32 is a signed +.
inline float32x4_t sum_words(const char* x, const char* bias) {
  const uint32x4_t sum = vaddq_u32(vreinterpretq_u32_u8(load_128(x)), vreinterpretq_u32_u8(load_128(bias)));
  return vcvtq_f32_s32(vreinterpretq_s32_u32(sum));
}
inline F load_sum(const char* x, const char* bias) {
  return {sum_words(x, bias), sum_words(x + 16, bias + 16), sum_words(x + 32, bias + 32), sum_words(x + 48, bias + 48)};
}

// C5: every NaN becomes the positive quiet one. Done before narrowing, where the conversions keep sign and payload.
inline float32x4_t canonical(float32x4_t a) {
  return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000)));
}
inline float16x8_t narrow_half(float32x4_t lo, float32x4_t hi) { return vcvt_high_f16_f32(vcvt_f16_f32(lo), hi); }
// Nearest even by integer arithmetic: what is added to a float32 before its lower half is dropped.
inline uint32x4_t bfloat16_bias(uint32x4_t bits) {
  return vaddq_u32(vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)), vdupq_n_u32(0x7FFF));
}
inline uint16x8_t narrow_bfloat16(float32x4_t lo, float32x4_t hi) {
  const uint32x4_t a = vreinterpretq_u32_f32(canonical(lo)), b = vreinterpretq_u32_f32(canonical(hi));
  return vaddhn_high_u32(vaddhn_u32(a, bfloat16_bias(a)), b, bfloat16_bias(b));
}

inline F round_float16(F a) { return widen(narrow_half(a.v0, a.v1), narrow_half(a.v2, a.v3)); }
inline void store_raw(char* p, F a) {
  store_128(p, vreinterpretq_u8_f32(a.v0));
  store_128(p + 16, vreinterpretq_u8_f32(a.v1));
  store_128(p + 32, vreinterpretq_u8_f32(a.v2));
  store_128(p + 48, vreinterpretq_u8_f32(a.v3));
}
inline void store(Float32, char* p, F a) {
  store_128(p, vreinterpretq_u8_f32(canonical(a.v0)));
  store_128(p + 16, vreinterpretq_u8_f32(canonical(a.v1)));
  store_128(p + 32, vreinterpretq_u8_f32(canonical(a.v2)));
  store_128(p + 48, vreinterpretq_u8_f32(canonical(a.v3)));
}
inline void store(Float16, char* p, F a) {
  store_128(p, vreinterpretq_u8_f16(narrow_half(canonical(a.v0), canonical(a.v1))));
  store_128(p + 16, vreinterpretq_u8_f16(narrow_half(canonical(a.v2), canonical(a.v3))));
}
inline void store(Bfloat16, char* p, F a) {
  store_128(p, vreinterpretq_u8_u16(narrow_bfloat16(a.v0, a.v1)));
  store_128(p + 16, vreinterpretq_u8_u16(narrow_bfloat16(a.v2, a.v3)));
}

struct Words {
  int32x4_t v0, v1, v2, v3;
};
// C6. FCVTNS rounds ties to even, saturates, and turns NaN into 0; the narrowings saturate. A NaN in `value` is one in `scaled`.
inline Words whole(F, F scaled) {
  return {vcvtnq_s32_f32(scaled.v0), vcvtnq_s32_f32(scaled.v1), vcvtnq_s32_f32(scaled.v2), vcvtnq_s32_f32(scaled.v3)};
}
inline int8x16_t narrow(Words a) {
  const int16x8_t lo = vqmovn_high_s32(vqmovn_s32(a.v0), a.v1), hi = vqmovn_high_s32(vqmovn_s32(a.v2), a.v3);
  return vqmovn_high_s16(vqmovn_s16(lo), hi);
}
inline void store(Int8, char* p, int8x16_t a) { store_128(p, vreinterpretq_u8_s8(a)); }

// Streaming is a hint. STNP, which takes it, has no intrinsic.
template <class T, class Value>
inline void stream(T type, char* p, Value value) {
  store(type, p, value);
}
