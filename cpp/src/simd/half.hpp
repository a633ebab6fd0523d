// float16 and bfloat16 <-> float32 by integer arithmetic, one value at a time: exact, rounding to nearest even, and immune
// to the floating-point state. Included inside an anonymous namespace, so that no target's copy is merged with another's.

inline float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline std::uint32_t widen_float16(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return sign | 0x7F800000u | (magnitude & 0x3FFu) << 13;
  if (magnitude >= 0x400u) return sign | ((magnitude << 13) + (112u << 23));
  if (magnitude == 0) return sign;
  const std::uint32_t shift = static_cast<std::uint32_t>(__builtin_clz(magnitude)) - 21;  // brings the leading one to bit 10
  return sign | (113u - shift) << 23 | (magnitude << shift & 0x3FFu) << 13;
}

inline std::uint32_t narrow_float16(std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and above round to infinity
  std::uint32_t significand, shift;
  if (magnitude >= 0x38800000u) {  // normal: drop 13 bits; a carry runs into the exponent, as it should
    significand = magnitude - (112u << 23);
    shift = 13;
  } else if (magnitude >= 0x33000000u) {  // subnormal: 2^-25 and above
    significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    shift = 126u - (magnitude >> 23);
  } else {
    return sign;
  }
  const std::uint32_t half_ulp = 1u << (shift - 1);
  return sign | (significand + half_ulp - 1 + (significand >> shift & 1u)) >> shift;
}

inline std::uint32_t narrow_bfloat16(std::uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
