// Q, K and V of bfloat16 x together, a token at a time, on AVX512_BF16: where heads have 64, 128 or 256 columns, k and v are not
// wanted and the cache rows are divided (run.cpp). The divisions of K and V then take place while Q waits for memory, and cos and
// sin are read once. Included inside an anonymous namespace after rotate_bfloat16.inl.hpp, whose guard and reasons it shares.
//
// vdpbf16ps multiplies two pairs of bfloat16 values and adds both products to a float32, one after the other, which is a rotation
// if x[j] stands beside x[j + dim/2] and cos beside sin. It rounds to nearest even and flushes subnormals whatever the
// floating-point state is: behind the guard, products are exact, so that in whatever order they are added only the last addition
// rounds, as C1 wants. On Zen 5 it takes half a cycle, as a multiplication does; on Intel two, so that two fused operations take
// less: there rows are multiplied by reciprocals, and this kernel is not taken.

// A load of its own, which GCC would else repeat for each use.
inline __m512i load_once(const char* p) {
  __m512i words = _mm512_loadu_si512(p);
  __asm__("" : "+v"(words));
  return words;
}
// Columns first ... first + 15 of both in pairs.
inline __m512i pairs(__m512i low, __m512i high, int first) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)),
                                                            _mm512_set1_epi32(0x00010001)), _mm512_set1_epi32(32 << 16));
  return _mm512_permutex2var_epi16(low, order, high);
}
inline F products(__m512i x, __m512i by) {
  return {_mm512_dpbf16_ps(_mm512_setzero_ps(), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(by))};
}
inline __m512i and_of(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0x80); }
inline bool all_have_bit_14(__m512i words) {
  const __m512i missing = _mm512_andnot_si512(words, _mm512_set1_epi16(0x4000));
  return _mm512_test_epi16_mask(missing, missing) == 0;
}

// 32 columns of both halves of one head: columns 0-15 and 16-31 in pairs.
struct PairWords {
  __m512i low, high;
};
inline PairWords load_pair_words(const char* x, std::int64_t half_bytes, __m512i& all) {
  const __m512i a = load_once(x), b = load_once(x + half_bytes), add = _mm512_set1_epi16(kAddToX);
  all = and_of(all, _mm512_add_epi16(a, add), _mm512_add_epi16(b, add));
  return {pairs(a, b, 0), pairs(a, b, 16)};
}

// What pairs of x are multiplied by, for 32 columns of each half: cos and -sin for the lower one, sin and cos for the upper one.
struct Turn {
  __m512i low_a, high_a, low_b, high_b;
};
// j and table_half: bytes from the first column, and to the upper half. False: the guard refused.
inline bool load_turn(const Token& token, std::int64_t j, std::int64_t table_half, Turn& turn) {
  const char *cos = token.cos + j, *sin = token.sin + j;
  const __m512i cos_a = load_once(cos), cos_b = load_once(cos + table_half), add = _mm512_set1_epi16(kAddToTable);
  const __m512i sin_a = load_once(sin), sin_b = load_once(sin + table_half);
  const __m512i minus = _mm512_xor_si512(sin_a, _mm512_set1_epi16(static_cast<short>(0x8000)));
  turn = {pairs(cos_a, minus, 0), pairs(cos_a, minus, 16), pairs(sin_b, cos_b, 0), pairs(sin_b, cos_b, 16)};
  const __m512i moved[4] = {_mm512_add_epi16(cos_a, add), _mm512_add_epi16(cos_b, add), _mm512_add_epi16(sin_a, add),
                            _mm512_add_epi16(sin_b, add)};
  const __m512i all = _mm512_and_si512(and_of(moved[0], moved[1], moved[2]), moved[3]);
  const __m512i any = _mm512_or_si512(_mm512_ternarylogic_epi32(moved[0], moved[1], moved[2], 0xFE), moved[3]);
  return all_have_bit_14(_mm512_andnot_si512(_mm512_slli_epi16(any, 1), all));
}

// All heads, of 64 * kTiles columns. False: the guard refused; the output is then to be computed anew.
template <int kTiles>
KVQUANT_INLINE bool rotate_heads(const Part& p, const Token& token, const Turn (&turn)[kTiles]) {
  constexpr std::int64_t kHalf = 64 * kTiles;  // bytes
  __m512i all = _mm512_set1_epi16(0x4000);
  const char* x = token.x;
  char* out = token.out;
  for (std::int64_t h = 0; h < p.heads; ++h, x += p.x_head, out += p.out_head) {
    KVQUANT_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      const PairWords w = load_pair_words(x + 64 * i, kHalf, all);
      put(out + 64 * i, narrow_32(products(w.low, turn[i].low_a), products(w.high, turn[i].high_a)), p.stream_out);
      put(out + kHalf + 64 * i, narrow_32(products(w.low, turn[i].low_b), products(w.high, turn[i].high_b)), p.stream_out);
    }
  }
  return all_have_bit_14(all);
}

// The cache row of K, of heads of 64 * kTiles columns. False: the guard refused, before it would have written anything wrong.
template <int kTiles>
KVQUANT_INLINE bool rotate_row(const Part& p, const Token& token, const Turn (&turn)[kTiles]) {
  using TaskT = Task<Bfloat16Source, Bfloat16, true, true, false, false, true>;
  constexpr int kStep = kTiles == 1 ? 1 : 2;  // tiles at once: whole lines
  Token at = token;
  __m512i all = _mm512_set1_epi16(0x4000);
  for (std::int64_t column = 0; column < p.heads * p.dim; column += 64 * kTiles) {
    for (int i = 0; i < kTiles; i += kStep) {
      Pair value[2 * kStep];
      KVQUANT_UNROLL
      for (int k = 0; k < kStep; ++k) {
        const Turn& by = turn[i + k];
        const PairWords w = load_pair_words(at.x + 64 * (i + k), 64 * kTiles, all);
        value[2 * k] = {products(w.low, by.low_a), products(w.low, by.low_b)};
        value[2 * k + 1] = {products(w.high, by.high_a), products(w.high, by.high_b)};
      }
      if (!all_have_bit_14(all)) return false;
      put_row<true, false>(p, reinterpret_cast<char*>(at.row) + 32 * i, column + 32 * i, value, kLanes, [] {});
    }
    next_head<TaskT>(p, at);
  }
  return true;
}

template <int kTiles>
std::int64_t together(const Part* parts, const Token* const* tokens, std::int64_t count) {
  using ValueTask = Task<Bfloat16Source, Bfloat16, false, true, false, false, true>;
  constexpr int kBlocks = kTiles == 1 ? 2 : 4;
  const Part q = parts[0], k = parts[1], v = parts[2];  // copies that no store can alias
  for (std::int64_t t = 0; t < count; ++t) {
    Turn turn[kTiles];
    bool good = true;
    KVQUANT_UNROLL
    for (int i = 0; i < kTiles; ++i) good &= load_turn(tokens[0][t], 64 * i, 2 * q.table_half, turn[i]);
    if (!good || !rotate_heads(q, tokens[0][t], turn))
      kernel<Bfloat16Source, Bfloat16, true, false, true, false>(q, tokens[0] + t, 1);
    if (!good || !rotate_row(k, tokens[1][t], turn))
      kernel<Bfloat16Source, Bfloat16, true, true, false, false>(k, tokens[1] + t, 1);
    for (int j = 0; j < 32 * kTiles; j += kBlocks * kLanes) all_heads<ValueTask, false, kBlocks>(v, tokens[2][t], j, kLanes);
  }
  return 2 * count;
}
std::int64_t together_bfloat16(const Part* parts, const Token* const* tokens, std::int64_t count) {
  switch (parts[0].dim) {
    case 64: return together<1>(parts, tokens, count);
    case 128: return together<2>(parts, tokens, count);
    default: return together<4>(parts, tokens, count);  // 256: plan.cpp
  }
}
