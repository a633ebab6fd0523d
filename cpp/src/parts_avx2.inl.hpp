// Parts on AVX2 for which the common kernel, with its 16 lanes in two registers, needs more registers than there are: replaces
// it where half a head is a multiple of 16 columns. Included inside an anonymous namespace after kernel.inl.hpp.
//
// 16 columns of both halves at a time, eight of them in a register: cos and sin stay in eight registers over all heads, and
// the rest of the work needs no more than the other eight. C6 is in fixed point (fixed_point.hpp).
//
// Outputs are not written non-temporally: 16 columns of two bytes are half a cache line, and one half now and the other one
// later takes longer than ordinary stores do.

inline __m256 load_ps(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline __m256 load_eight(Float16, const char* p) { return _mm256_cvtph_ps(load_128(p)); }
inline __m256 load_eight(Bfloat16, const char* p) { return widen(load_128(p)); }
inline __m256 load_eight(Float32, const char* p) { return load_ps(p); }

// Eight columns of a source (C2, C3), beside the common kernel's.
template <class T>
struct FloatEight {
  using Type = T;
  static inline __m256 load(const char* x, const Part&, std::int64_t, __m256) { return load_eight(T{}, x); }
};
struct FloatBiasEight {
  using Type = Int32;
  static inline __m256 load(const char* x, const Part& p, std::int64_t column, __m256 activation) {
    const __m256 value = _mm256_cvtepi32_ps(load_256(x));
    const __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(value, load_ps(p.weight_scale + column)), activation);
    return _mm256_add_ps(scaled, load_ps(p.bias + column));
  }
};
struct IntBiasEight {
  using Type = Int32;
  static inline __m256 load(const char* x, const Part& p, std::int64_t column, __m256 activation) {
    const __m256 value = _mm256_cvtepi32_ps(_mm256_add_epi32(load_256(x), load_256(p.bias + column)));
    return _mm256_mul_ps(_mm256_mul_ps(value, load_ps(p.weight_scale + column)), activation);
  }
};

// cos and sin of 16 columns in both halves.
struct Turns {
  __m256 cos_a[2], cos_b[2], sin_a[2], sin_b[2];
};
template <class OutT>
KVQUANT_INLINE Turns load_turns(const Part& p, const Token& token, std::int64_t j) {
  constexpr std::int64_t kItem = kSize<OutT>;
  Turns turns;
  KVQUANT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const std::int64_t low = (j + 8 * i) * kItem, high = low + p.table_half * kItem;
    turns.cos_a[i] = load_eight(OutT{}, token.cos + low);
    turns.cos_b[i] = load_eight(OutT{}, token.cos + high);
    turns.sin_a[i] = load_eight(OutT{}, token.sin + low);
    turns.sin_b[i] = load_eight(OutT{}, token.sin + high);
  }
  return turns;
}

template <bool kAscend>
inline __m256 rounded_eight(__m256 value) {
  if constexpr (kAscend) return _mm256_cvtph_ps(narrow_half(value));
  else return value;
}
// C4 and C7 of eight columns in both halves.
template <bool kAscend>
inline void rotate_eight(__m256& a, __m256& b, __m256 cos_a, __m256 cos_b, __m256 sin_a, __m256 sin_b) {
  const auto product = [](__m256 value, __m256 by) { return rounded_eight<kAscend>(_mm256_mul_ps(value, by)); };
  const __m256 x_a = rounded_eight<kAscend>(a), x_b = rounded_eight<kAscend>(b);
  a = rounded_eight<kAscend>(_mm256_sub_ps(product(x_a, cos_a), product(x_b, sin_a)));
  b = rounded_eight<kAscend>(_mm256_add_ps(product(x_b, cos_b), product(x_a, sin_b)));
}

// C6 as it is written, of 16 columns in both halves: values[4][8], float32. Out of line and through memory, so that it takes no
// register from those who need it in one of 200 steps at most.
__attribute__((noinline, cold)) void divide_sixteen(const char* values, const Part& p, std::int64_t low, std::int64_t high,
                                                    char* row) {
  const auto divide = [&](const char* from, std::int64_t column) {
    const F value = load(Float32{}, from);
    const F scaled = add(div(value, load(Float32{}, p.scale + column)), load(Float32{}, p.offset + column));
    return narrow(whole(value, scaled));
  };
  store(Int8{}, row, divide(values, low));
  store(Int8{}, row + p.dim / 2, divide(values + 64, high));
}

// kDim: the columns of a head, or 0 for as many as the part says. A constant leaves more general registers to the pointers.
template <class SourceT, class OutT, bool kRotate, bool kCache, bool kOut, bool kAscend, std::int64_t kDim>
inline void part_of_token(const Part& p, const Token& token) {
  constexpr std::int64_t kItem = kSize<typename SourceT::Type>, kOutItem = kSize<OutT>;
  const std::int64_t dim = kDim ? kDim : p.dim, half = dim / 2;
  const std::int64_t head = dim * 4, end = p.heads * head;  // bytes of float32 columns
  const __m256 activation = _mm256_set1_ps(token.activation_scale);
  for (std::int64_t j = 0; j < half; j += 16) {
    [[maybe_unused]] Turns turns;
    if constexpr (kRotate) turns = load_turns<OutT>(p, token, j);
    const char* x = token.x + j * kItem;
    char* out = kOut ? token.out + j * kOutItem : nullptr;
    std::int8_t* row = kCache ? token.row + j : nullptr;
    for (std::int64_t low = j * 4, high = low + half * 4; low < end; low += head, high += head) {
      __m256 a[2], b[2];
      KVQUANT_UNROLL
      for (int i = 0; i < 2; ++i) {
        a[i] = SourceT::load(x + 8 * i * kItem, p, low + 32 * i, activation);
        b[i] = SourceT::load(x + (half + 8 * i) * kItem, p, high + 32 * i, activation);
        if constexpr (kRotate)
          rotate_eight<kAscend>(a[i], b[i], turns.cos_a[i], turns.cos_b[i], turns.sin_a[i], turns.sin_b[i]);
      }
      if constexpr (kItem == 4) {  // one cache line of each half; behind the row lies the next token, as a rule
        __builtin_prefetch(x + 2560);
        __builtin_prefetch(x + half * 4 + 2560);
      }
      if constexpr (kOut) {
        store_canonical(OutT{}, out, {a[0], a[1]});
        store_canonical(OutT{}, out + half * kOutItem, {b[0], b[1]});
      }
      if constexpr (kCache) {
        const auto fixed = [&](__m256 value, std::int64_t column) {
          return _mm256_cvtps_epi32(_mm256_fmadd_ps(value, load_ps(p.reciprocal + column), load_ps(p.fixed_offset + column)));
        };
        const auto pack = [](__m256i first, __m256i second) {
          return _mm256_packs_epi32(_mm256_srai_epi32(first, 16), _mm256_srai_epi32(second, 16));
        };
        const __m256i a_0 = fixed(a[0], low), a_1 = fixed(a[1], low + 32), b_0 = fixed(b[0], high), b_1 = fixed(b[1], high + 32);
        const __m256i least = _mm256_min_epu16(_mm256_min_epu16(a_0, a_1), _mm256_min_epu16(b_0, b_1));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works per 128-bit half
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(pack(a_0, a_1), pack(b_0, b_1)), order);
        store(Int8{}, reinterpret_cast<char*>(row), _mm256_castsi256_si128(bytes));
        store(Int8{}, reinterpret_cast<char*>(row + half), _mm256_extracti128_si256(bytes, 1));
        const __m256i doubtful = _mm256_subs_epu16(_mm256_set1_epi32(kDoubtful + 1), least);  // of the lower halves only
        if (__builtin_expect(!_mm256_testz_si256(doubtful, doubtful), 0)) {
          if constexpr (kOut) {
            store_canonical(OutT{}, out, canonical({a[0], a[1]}));
            store_canonical(OutT{}, out + half * kOutItem, canonical({b[0], b[1]}));
          }
          alignas(32) char values[128];
          store_raw(values, {a[0], a[1]});
          store_raw(values + 64, {b[0], b[1]});
          divide_sixteen(values, p, low, high, reinterpret_cast<char*>(row));
        }
        row += p.row_head;
      }
      x += p.x_head;
      if constexpr (kOut) out += p.out_head;
    }
  }
}

template <class SourceT, template <bool> class CommonSource, class OutT, bool kRotate, bool kOut, bool kAscend>
std::int64_t cache_part(const Part& part, const Token* tokens, std::int64_t count) {
  const Part p = part;  // a copy that no store can alias
  if (!p.reciprocal || p.dim % 32 != 0) return kernel<CommonSource, OutT, kRotate, true, kOut, kAscend>(p, tokens, count);
  for (std::int64_t t = 0; t < count; ++t)
    if (p.dim == 128) part_of_token<SourceT, OutT, kRotate, true, kOut, kAscend, 128>(p, tokens[t]);
    else part_of_token<SourceT, OutT, kRotate, true, kOut, kAscend, 0>(p, tokens[t]);
  return count;
}

// Q of int32 x. A NaN can come from weight_scale, bias, activation_scale, cos and sin only. With the second and third of them
// below 2^32 and the others below 2, a dequantised value is below 2^65 and a result below 2^67: neither infinite nor NaN. Looked
// at once per call and once per token, that costs less than looking at each result (C5).
inline bool bias_below_2_32(const char* p, std::int64_t bytes) {
  __m256i largest[2] = {};
  for (std::int64_t i = 0; i < bytes; i += 64) {
    KVQUANT_UNROLL
    for (int k = 0; k < 2; ++k) {
      const __m256i bits = load_256(p + i + 32 * k);
      largest[k] = _mm256_max_epu32(largest[k], _mm256_add_epi32(bits, bits));
    }
  }
  const __m256i last = _mm256_set1_epi32(static_cast<int>(((127u + 32) << 24) - 1));
  const __m256i all = _mm256_max_epu32(_mm256_max_epu32(largest[0], largest[1]), last);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(all, last)) == -1;
}
// The uppermost bit of an exponent tells, in each of the three formats. `upper_bit` of each item.
inline bool below_2(const char* p, std::int64_t bytes, __m256i upper_bit) {
  __m256i any = _mm256_setzero_si256();
  for (std::int64_t i = 0; i < bytes; i += 32) any = _mm256_or_si256(any, load_256(p + i));
  return _mm256_testz_si256(any, upper_bit);
}
inline bool ordinary(const Part& p, const Token& token) {
  const __m256i upper_bit = _mm256_set1_epi16(0x4000);
  const std::int64_t bytes = p.table_half ? p.dim * 2 : p.dim;
  return below_2(token.cos, bytes, upper_bit) && below_2(token.sin, bytes, upper_bit) && token.activation_scale < 0x1p32f &&
         token.activation_scale > -0x1p32f;
}

template <class SourceT, template <bool> class CommonSource, class OutT>
std::int64_t rotate_int32(const Part& part, const Token* tokens, std::int64_t count) {
  const Part p = part;  // a copy that no store can alias
  const std::int64_t bytes = p.heads * p.dim * 4;
  const bool fits = p.dim % 32 == 0 && p.order != kTokenBlocks && below_2(p.weight_scale, bytes, _mm256_set1_epi32(0x40000000)) &&
                    (is_same<SourceT, IntBiasEight> || bias_below_2_32(p.bias, bytes));
  if (!fits) return kernel<CommonSource, OutT, true, false, true, false>(p, tokens, count);
  for (std::int64_t t = 0; t < count; ++t)
    if (!ordinary(p, tokens[t])) kernel<CommonSource, OutT, true, false, true, false>(p, tokens + t, 1);
    else part_of_token<SourceT, OutT, true, false, true, false, 0>(p, tokens[t]);
  return 0;
}

template <class SourceT, template <bool> class CommonSource, class OutT, bool kAscend>
constexpr void fill_avx2(Kernel (&jobs)[kJobs]) {
  jobs[kRotateCache] = cache_part<SourceT, CommonSource, OutT, true, false, kAscend>;
  jobs[kRotateCacheOut] = cache_part<SourceT, CommonSource, OutT, true, true, kAscend>;
  jobs[kCache] = cache_part<SourceT, CommonSource, OutT, false, false, false>;
  jobs[kCacheOut] = cache_part<SourceT, CommonSource, OutT, false, true, false>;
}
template <class OutT, template <bool> class FloatSourceT, bool kAscend>
constexpr void fill_avx2_output(Kernel (&sources)[kSources][kOutputs][kJobs], Output output) {
  fill_avx2<FloatBiasEight, FloatBiasSource, OutT, kAscend>(sources[kInt32FloatBias][output]);
  fill_avx2<IntBiasEight, IntBiasSource, OutT, kAscend>(sources[kInt32IntBias][output]);
  fill_avx2<FloatEight<OutT>, FloatSourceT, OutT, kAscend>(sources[kFloat][output]);
  if constexpr (kSize<OutT> == 2 && !kAscend) {
    sources[kInt32FloatBias][output][kRotateOut] = rotate_int32<FloatBiasEight, FloatBiasSource, OutT>;
    sources[kInt32IntBias][output][kRotateOut] = rotate_int32<IntBiasEight, IntBiasSource, OutT>;
  }
}

constexpr KernelTable make_avx2_table() {
  KernelTable table = make_table();
  for (int numerics = 0; numerics < 2; ++numerics) {
    auto& kernels = table.kernels[numerics];
    if (numerics == 0) fill_avx2_output<Float16, Float16Source, false>(kernels, kFloat16);
    else fill_avx2_output<Float16, Float16Source, true>(kernels, kFloat16);
    fill_avx2_output<Bfloat16, Bfloat16Source, false>(kernels, kBfloat16);
    fill_avx2_output<Float32, Float32Source, false>(kernels, kFloat32);
    kernels[kFloat][kBfloat16][kRotateOut] = rotate_out_bfloat16;
  }
  table.fixed_point = FixedPoint::everywhere;
  return table;
}
