// What AVX-512 without BF16 adds to avx512.hpp. Included inside an anonymous namespace.

inline __m256i narrow(Bfloat16, F a) { return round_bfloat16(a); }
