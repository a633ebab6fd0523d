// The one algorithm: source -> rotation -> sink over pairs of 16-lane blocks. Knows no ISA (simd/*.hpp does), no index,
// no cache layout and no padding (prepare.cpp has turned those into pointers).
//
// Each target includes this file inside its own anonymous namespace after its simd header, with its own compiler flags: the
// linker must never merge these functions with those of another target, so there is nothing here with external linkage.

// Loops over tokens and blocks must be unrolled, or what they index stays in memory; GCC does that at -O3 only, which
// multiplies code elsewhere.
#if defined(__clang__)
#define KVQUANT_UNROLL _Pragma("unroll")
#else
#define KVQUANT_UNROLL _Pragma("GCC unroll 4")
#endif

// The first `kLanes` or, in the last block of a half head, the first n elements.
template <class T, bool kTail>
inline F load_block(T type, const char* p, int n) {
  if constexpr (kTail) return load_n(type, p, n);
  else return load(type, p);
}
// stream_it: non-temporal, for data that no cache will hold anyway; prepare.cpp grants it for aligned rows only.
template <class T, bool kTail, class Value>
inline void store_block(T type, char* p, Value value, int n, bool stream_it) {
  if constexpr (kTail) store_n(type, p, value, n);
  else if (stream_it) stream(type, p, value);
  else store(type, p, value);
}

// Where a block of columns lies: byte offsets are these times the item size.
struct Column {
  std::int64_t a, b;  // in the part's packed per-column arrays
  std::int64_t in_a, in_b;  // within one head
  int n;
};

// Sources: columns(c) loads what all tokens share, load(...) gives the float32 pair (C2, C3).
template <class T, bool kTail>
struct FloatSource {
  template <class Other> static constexpr bool kIs = is_same<T, Other>;
  static constexpr int kTokens = 1;  // nothing that tokens could share
  struct Columns {};
  static inline Columns columns(const Part&, const Column&) { return {}; }
  static inline Pair load(const Columns&, const Token&, const char* x, const Column& c) {
    return {load_block<T, kTail>(T{}, x + c.in_a * kSize<T>, c.n), load_block<T, kTail>(T{}, x + c.in_b * kSize<T>, c.n)};
  }
};

template <bool kTail>
struct FloatBiasSource {
  template <class Other> static constexpr bool kIs = is_same<Int32, Other>;
  static constexpr int kTokens = kBlock;
  struct Columns {
    Pair scale, bias;
  };
  static inline Columns columns(const Part& p, const Column& c) {
    return {{load_block<Float32, kTail>(Float32{}, p.weight_scale + c.a * 4, c.n),
             load_block<Float32, kTail>(Float32{}, p.weight_scale + c.b * 4, c.n)},
            {load_block<Float32, kTail>(Float32{}, p.bias + c.a * 4, c.n),
             load_block<Float32, kTail>(Float32{}, p.bias + c.b * 4, c.n)}};
  }
  static inline Pair load(const Columns& k, const Token& t, const char* x, const Column& c) {
    const F activation = broadcast(t.activation_scale);
    return {add(mul(mul(load_block<Int32, kTail>(Int32{}, x + c.in_a * 4, c.n), k.scale.a), activation), k.bias.a),
            add(mul(mul(load_block<Int32, kTail>(Int32{}, x + c.in_b * 4, c.n), k.scale.b), activation), k.bias.b)};
  }
};

template <bool kTail>
struct IntBiasSource {
  template <class Other> static constexpr bool kIs = is_same<Int32, Other>;
  static constexpr int kTokens = kBlock;
  struct Columns {
    Pair scale;
    const char *bias_a, *bias_b;
  };
  static inline Columns columns(const Part& p, const Column& c) {
    return {{load_block<Float32, kTail>(Float32{}, p.weight_scale + c.a * 4, c.n),
             load_block<Float32, kTail>(Float32{}, p.weight_scale + c.b * 4, c.n)},
            p.bias + c.a * 4, p.bias + c.b * 4};
  }
  static inline F sum(const char* x, const char* bias, int n) {
    if constexpr (kTail) return load_sum_n(x, bias, n);
    else return load_sum(x, bias);
  }
  static inline Pair load(const Columns& k, const Token& t, const char* x, const Column& c) {
    const F activation = broadcast(t.activation_scale);
    return {mul(mul(sum(x + c.in_a * 4, k.bias_a, c.n), k.scale.a), activation),
            mul(mul(sum(x + c.in_b * 4, k.bias_b, c.n), k.scale.b), activation)};
  }
};

// C4, and C7 where kAscend: there each product and each sum is rounded to float16.
template <bool kAscend>
inline F rounded(F value) {
  if constexpr (kAscend) return round_float16(value);
  else return value;
}
template <bool kAscend, bool kExactProducts>
inline Pair rotate(Pair x, Pair cos, Pair sin) {
  // Products of two float16 values are exact in float32, so that fusing them with the sum gives the same bits.
  if constexpr (kExactProducts && !kAscend)
    return {multiply_subtract(x.a, cos.a, mul(x.b, sin.a)), multiply_add(x.b, cos.b, mul(x.a, sin.b))};
  const F a = rounded<kAscend>(x.a), b = rounded<kAscend>(x.b);
  return {rounded<kAscend>(sub(rounded<kAscend>(mul(a, cos.a)), rounded<kAscend>(mul(b, sin.a)))),
          rounded<kAscend>(add(rounded<kAscend>(mul(b, cos.b)), rounded<kAscend>(mul(a, sin.b))))};
}

// cos and sin of one token, widened to float32 once for all heads. The blocks of a chunk of half a head lie at
// [0] cos[j], [1] cos[j + dim/2], [2] sin[j], [3] sin[j + dim/2]; lanes past the end are 0.
constexpr std::int64_t kChunk = 128;
struct Rotation {
  alignas(64) char values[4][kChunk * 4];
};
template <class OutT>
inline void widen_rotation(Rotation& rotation, const Token& token, std::int64_t begin, std::int64_t end, std::int64_t half) {
  const char* const sources[4] = {token.cos, token.cos + half * kSize<OutT>, token.sin, token.sin + half * kSize<OutT>};
  std::int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) {
    KVQUANT_UNROLL
    for (int i = 0; i < 4; ++i) store_raw(rotation.values[i] + (j - begin) * 4, load(OutT{}, sources[i] + j * kSize<OutT>));
  }
  if (j < end)
    for (int i = 0; i < 4; ++i)
      store_raw(rotation.values[i] + (j - begin) * 4, load_n(OutT{}, sources[i] + j * kSize<OutT>, static_cast<int>(end - j)));
}

// What quantising needs of one block of columns.
struct Channels {
  Pair scale, reciprocal, offset;
};

// N tokens of kBlocks neighbouring blocks of columns in both halves of one head (the tokens' pointers are at that head). The
// column vectors are loaded once for all tokens. Two blocks make narrowing to int8 cheaper.
// Inlined by force: called out of line, it would take the address of everything kept in registers.
template <class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend, bool kTail, int N, int kBlocks>
__attribute__((always_inline)) inline void tile(const Part& p, const Token* tokens, const Rotation* rotations,
                                                std::int64_t first, std::int64_t j, std::int64_t in_chunk, int n) {
  static_assert(kBlocks == 1 || !kTail);
  const std::int64_t half = p.dim / 2;
  Column c[kBlocks];
  typename SourceT::Columns columns[kBlocks];
  Channels channels[kBlocks];
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    const std::int64_t at = j + i * kLanes;
    c[i] = {first + at, first + at + half, at, at + half, n};
    columns[i] = SourceT::columns(p, c[i]);
    if constexpr (kCacheIt) {
      const auto load_pair = [&](const char* values) -> Pair {
        return {load_block<Float32, kTail>(Float32{}, values + c[i].a * 4, n),
                load_block<Float32, kTail>(Float32{}, values + c[i].b * 4, n)};
      };
      channels[i].scale = load_pair(p.scale);
      channels[i].offset = load_pair(p.offset);
      if (p.reciprocal) channels[i].reciprocal = load_pair(p.reciprocal);
    }
  }
  KVQUANT_UNROLL
  for (int t = 0; t < N; ++t) {
    Pair value[kBlocks], scaled[kBlocks];
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      value[i] = SourceT::load(columns[i], tokens[t], tokens[t].x, c[i]);
      if constexpr (kRotate) {
        const auto at = [&](int k) { return load(Float32{}, rotations[t].values[k] + (in_chunk + i * kLanes) * 4); };
        value[i] = rotate<kAscend, SourceT::template kIs<Float16>>(value[i], {at(0), at(1)}, {at(2), at(3)});
      }
      if constexpr (kOutIt) {
        store_block<OutT, kTail>(OutT{}, tokens[t].out + c[i].in_a * kSize<OutT>, value[i].a, n, p.stream_out);
        store_block<OutT, kTail>(OutT{}, tokens[t].out + c[i].in_b * kSize<OutT>, value[i].b, n, p.stream_out);
      }
      if constexpr (kCacheIt) {
        const Channels& k = channels[i];
        if (p.reciprocal)
          scaled[i] = {divide(value[i].a, k.scale.a, k.reciprocal.a), divide(value[i].b, k.scale.b, k.reciprocal.b)};
        else
          scaled[i] = {div(value[i].a, k.scale.a), div(value[i].b, k.scale.b)};
        scaled[i] = {add(scaled[i].a, k.offset.a), add(scaled[i].b, k.offset.b)};
      }
    }
    if constexpr (kCacheIt) {
      char* const row = reinterpret_cast<char*>(tokens[t].row);
      if constexpr (kBlocks == 2) {
        store_block<Int8, false>(Int8{}, row + c[0].in_a, quantise(value[0].a, scaled[0].a, value[1].a, scaled[1].a), n, p.stream_rows);
        store_block<Int8, false>(Int8{}, row + c[0].in_b, quantise(value[0].b, scaled[0].b, value[1].b, scaled[1].b), n, p.stream_rows);
      } else {
        store_block<Int8, kTail>(Int8{}, row + c[0].in_a, quantise(value[0].a, scaled[0].a), n, p.stream_rows);
        store_block<Int8, kTail>(Int8{}, row + c[0].in_b, quantise(value[0].b, scaled[0].b), n, p.stream_rows);
      }
    }
  }
}

// Tokens t, t + N, ... of a part. The copy of Part is one that no store can alias.
template <template <bool> class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend, int N>
inline std::int64_t all_tokens(const Part p, const Token* tokens, std::int64_t t, std::int64_t count) {
  const std::int64_t half = p.dim / 2, columns = p.heads * p.dim;
  Rotation rotations[kRotate ? N : 1];
  for (; t + N <= count; t += N)
    for (std::int64_t begin = 0; begin < half; begin += kChunk) {
      const std::int64_t end = begin + kChunk < half ? begin + kChunk : half, whole = end - (end - begin) % kLanes;
      Token at[N];
      KVQUANT_UNROLL
      for (int i = 0; i < N; ++i) {
        at[i] = tokens[t + i];
        if constexpr (kRotate) widen_rotation<OutT>(rotations[i], at[i], begin, end, half);
      }
      for (std::int64_t first = 0; first < columns; first += p.dim) {
        std::int64_t j = begin;
        if constexpr (N == 1 && kTwoBlocks)
          for (; j + 2 * kLanes <= whole; j += 2 * kLanes)
            tile<SourceT<false>, OutT, kRotate, kCacheIt, kOutIt, kAscend, false, N, 2>(p, at, rotations, first, j, j - begin, kLanes);
        for (; j < whole; j += kLanes)
          tile<SourceT<false>, OutT, kRotate, kCacheIt, kOutIt, kAscend, false, N, 1>(p, at, rotations, first, j, j - begin, kLanes);
        KVQUANT_UNROLL
        for (int i = 0; i < N; ++i) {
          if (whole < end)
            tile<SourceT<true>, OutT, kRotate, kCacheIt, kOutIt, kAscend, true, 1, 1>(
                p, at + i, rotations + (kRotate ? i : 0), first, whole, whole - begin, static_cast<int>(end - whole));
          at[i].x += p.x_head;
          if constexpr (kOutIt) at[i].out += p.out_head;
          if constexpr (kCacheIt) at[i].row += p.row_head;
        }
      }
    }
  return t;
}

template <template <bool> class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend>
std::int64_t kernel(const Part& p, const Token* tokens, std::int64_t count) {
  constexpr int kTokens = SourceT<false>::kTokens;
  std::int64_t t = 0;
  if (kTokens > 1 && p.block_tokens) t = all_tokens<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, kTokens>(p, tokens, t, count);
  all_tokens<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, 1>(p, tokens, t, count);
  return kCacheIt ? count : 0;
}

template <bool kTail> using Float16Source = FloatSource<Float16, kTail>;
template <bool kTail> using Bfloat16Source = FloatSource<Bfloat16, kTail>;
template <bool kTail> using Float32Source = FloatSource<Float32, kTail>;

// The table of a target, filled in one place.
template <template <bool> class SourceT, class OutT, bool kAscend>
constexpr void fill(Kernel (&jobs)[kJobs]) {
  jobs[kRotateOut] = kernel<SourceT, OutT, true, false, true, kAscend>;
  jobs[kRotateCache] = kernel<SourceT, OutT, true, true, false, kAscend>;
  jobs[kRotateCacheOut] = kernel<SourceT, OutT, true, true, true, kAscend>;
  // V is not rotated: its value, cached or not, is the unrounded one in both numerics (C7).
  jobs[kCache] = kernel<SourceT, OutT, false, true, false, false>;
  jobs[kCacheOut] = kernel<SourceT, OutT, false, true, true, false>;
  jobs[kOut] = kernel<SourceT, OutT, false, false, true, false>;
}

template <class OutT, template <bool> class FloatSourceT, bool kAscend>
constexpr void fill_output(Kernel (&sources)[kSources][kOutputs][kJobs], Output output) {
  fill<FloatBiasSource, OutT, kAscend>(sources[kInt32FloatBias][output]);
  fill<IntBiasSource, OutT, kAscend>(sources[kInt32IntBias][output]);
  fill<FloatSourceT, OutT, kAscend>(sources[kFloat][output]);
}

constexpr KernelTable make_table() {
  KernelTable table{};
  for (int numerics = 0; numerics < 2; ++numerics) {
    if (numerics == 0) fill_output<Float16, Float16Source, false>(table.kernels[numerics], kFloat16);
    else fill_output<Float16, Float16Source, true>(table.kernels[numerics], kFloat16);
    fill_output<Bfloat16, Bfloat16Source, false>(table.kernels[numerics], kBfloat16);
    fill_output<Float32, Float32Source, false>(table.kernels[numerics], kFloat32);
  }
  return table;
}
