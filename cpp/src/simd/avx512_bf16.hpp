// What AVX512_BF16 adds to avx512.hpp: native narrowing and, for bfloat16 x, a rotation of its own, both behind guards that
// send what they can't do exactly to the common path. Included inside an anonymous namespace.

// vcvtneps2bf16 rounds to nearest even but flushes subnormals and keeps a NaN's sign: those blocks take the integer path.
inline __m256i narrow(Bfloat16, F a) {
  constexpr int kNanOrSubnormal = 0x01 | 0x80 | 0x20;
  if (_mm512_fpclass_ps_mask(a.v, kNanOrSubnormal)) return round_bfloat16(a);
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
}
