// C6 by multiplication, for targets on which a division takes longer than the rest of a value's quantisation. Included inside
// an anonymous namespace after the target's block.
//
// With r = 1/scale rounded to nearest, one fused multiply-add gives z = v*r + offset, where C6 wants t = v/scale + offset, both
// operations rounded. For |offset| <= 128, 2^-126 <= |scale| <= 2^126 (so that r is a normal number) and |z| <= 129:
//   z = ((v/scale)(1 + d1) + offset)(1 + d2),  t = ((v/scale)(1 + d3) + offset)(1 + d4),  all |d| <= 2^-24,
//   |z - t| <= 2^-23 (|v/scale| + |z|) < 2^-23 (2*129 + 128) = 4.61e-5,
// and both round to the same integer unless z is that close to the middle between two. Further out both saturate. kDoubt is
// 2 - (1/2 - 5e-5)^2, so that the square of z's distance from the nearest integer, added to it, reaches 2 if z is too close: a
// float32 of at least 2 has the uppermost bit of its exponent set, as have infinity and NaN. channels.cpp gives reciprocals only
// within these limits.
constexpr float kDoubt = 1.7500499975f;

// For column j on of both halves of a head. False: one of the values is in doubt, or a NaN; a and b then mean nothing.
template <int kBlocks, bool kTail>
inline bool estimate(const Pair (&value)[kBlocks], const Part& p, std::int64_t j, Count<kTail> count, Words (&a)[kBlocks],
                     Words (&b)[kBlocks]) {
  const auto column = [&](const char* vector, std::int64_t at) {
    if constexpr (kTail) return load_n(Float32{}, vector + at, count.n);
    else return load(Float32{}, vector + at);
  };
  Pair scaled[kBlocks];
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    const std::int64_t low = (j + i * kLanes) * 4, high = low + p.dim * 2;
    scaled[i].a = multiply_add(value[i].a, column(p.reciprocal, low), column(p.offset, low));
    scaled[i].b = multiply_add(value[i].b, column(p.reciprocal, high), column(p.offset, high));
  }
  const auto doubt = [](F z) {
    const F away = distance(z);
    return multiply_add(away, away, broadcast(kDoubt));
  };
  F doubts = broadcast(0.0f);
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) doubts = unite(doubts, doubt(scaled[i].a), doubt(scaled[i].b));
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    a[i] = whole(scaled[i].a);
    b[i] = whole(scaled[i].b);
  }
  return !any_at_least_two(doubts);
}

// C6 as it is written: values[2][blocks*16], float32; scale, offset and row from the first block's column on.
__attribute__((noinline)) void divide_rows(const char* values, int blocks, const char* scale, const char* offset, char* row,
                                           std::int64_t half) {
  for (int i = 0; i < 2 * blocks; ++i) {
    const std::int64_t column = i < blocks ? i * kLanes : half + (i - blocks) * kLanes;
    const F value = load(Float32{}, values + i * kLanes * 4);
    const F scaled = add(div(value, load(Float32{}, scale + column * 4)), load(Float32{}, offset + column * 4));
    store(Int8{}, row + column, narrow(whole(value, scaled)));
  }
}
// Through memory and out of line, so that it takes no register from those who need it in one of a hundred heads at most.
template <int kBlocks>
inline void divide_again(const Pair (&value)[kBlocks], const Part& p, std::int64_t j, char* row) {
  alignas(64) char values[2 * kBlocks * kLanes * 4];
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    store_raw(values + i * kLanes * 4, value[i].a);
    store_raw(values + (kBlocks + i) * kLanes * 4, value[i].b);
  }
  divide_rows(values, kBlocks, p.scale + j * 4, p.offset + j * 4, row + j, p.dim / 2);
}
