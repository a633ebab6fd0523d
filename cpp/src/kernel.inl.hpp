// The one algorithm: source -> rotation -> sink over pairs of 16-lane blocks. Knows no ISA (simd/*.hpp does), no index,
// no cache layout and no padding (operator.cpp has turned those into pointers).
//
// Each target includes this file inside its own anonymous namespace after its simd header, with its own compiler flags: the
// linker must never merge these functions with those of another target, so there is nothing here with external linkage.

struct Pair {
  F a, b;  // columns j and j + dim/2 of one head
};

// The first `kLanes` or, in the last block of a half head, the first n elements.
template <class T, bool kTail>
inline F load_block(T type, const char* p, int n) {
  if constexpr (kTail) return load_n(type, p, n);
  else return load(type, p);
}
template <class T, bool kTail>
inline void store_block(T type, char* p, F value, int n) {
  if constexpr (kTail) store_n(type, p, value, n);
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
  struct Columns {};
  static inline Columns columns(const Part&, const Column&) { return {}; }
  static inline Pair load(const Columns&, const Token&, const char* x, const Column& c) {
    return {load_block<T, kTail>(T{}, x + c.in_a * kSize<T>, c.n), load_block<T, kTail>(T{}, x + c.in_b * kSize<T>, c.n)};
  }
};

template <bool kTail>
struct FloatBiasSource {
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
template <bool kAscend>
inline Pair rotate(Pair x, Pair cos, Pair sin) {
  const F a = rounded<kAscend>(x.a), b = rounded<kAscend>(x.b);
  return {rounded<kAscend>(sub(rounded<kAscend>(mul(a, cos.a)), rounded<kAscend>(mul(b, sin.a)))),
          rounded<kAscend>(add(rounded<kAscend>(mul(b, cos.b)), rounded<kAscend>(mul(a, sin.b))))};
}

// N tokens of one block of columns, over all heads. cos and sin are widened once a token, the column vectors loaded once
// for N tokens.
template <class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend, bool kTail, int N>
inline void tile(const Part& p, const Token* tokens, std::int64_t j, int n) {
  const std::int64_t half = p.dim / 2;
  Pair cos[N], sin[N];
  if constexpr (kRotate) {
    for (int t = 0; t < N; ++t) {
      cos[t] = {load_block<OutT, kTail>(OutT{}, tokens[t].cos + j * kSize<OutT>, n),
                load_block<OutT, kTail>(OutT{}, tokens[t].cos + (j + half) * kSize<OutT>, n)};
      sin[t] = {load_block<OutT, kTail>(OutT{}, tokens[t].sin + j * kSize<OutT>, n),
                load_block<OutT, kTail>(OutT{}, tokens[t].sin + (j + half) * kSize<OutT>, n)};
    }
  }
  for (std::int64_t h = 0; h < p.heads; ++h) {
    const std::int64_t first = h * p.dim + j;
    const Column c{first, first + half, j, j + half, n};
    const auto columns = SourceT::columns(p, c);
    Pair scale, offset;
    if constexpr (kCacheIt) {
      scale = {load_block<Float32, kTail>(Float32{}, p.scale + c.a * 4, n), load_block<Float32, kTail>(Float32{}, p.scale + c.b * 4, n)};
      offset = {load_block<Float32, kTail>(Float32{}, p.offset + c.a * 4, n),
                load_block<Float32, kTail>(Float32{}, p.offset + c.b * 4, n)};
    }
    for (int t = 0; t < N; ++t) {
      Pair value = SourceT::load(columns, tokens[t], tokens[t].x + h * p.x_head, c);
      if constexpr (kRotate) value = rotate<kAscend>(value, cos[t], sin[t]);
      if constexpr (kOutIt) {
        char* out = tokens[t].out + h * p.out_head;
        store_block<OutT, kTail>(OutT{}, out + c.in_a * kSize<OutT>, value.a, n);
        store_block<OutT, kTail>(OutT{}, out + c.in_b * kSize<OutT>, value.b, n);
      }
      if constexpr (kCacheIt) {
        char* row = reinterpret_cast<char*>(tokens[t].row) + h * p.row_head;
        store_block<Int8, kTail>(Int8{}, row + c.in_a, add(div(value.a, scale.a), offset.a), n);
        store_block<Int8, kTail>(Int8{}, row + c.in_b, add(div(value.b, scale.b), offset.b), n);
      }
    }
  }
}

template <template <bool> class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend, int N>
inline void all_columns(const Part& p, const Token* tokens) {
  const std::int64_t half = p.dim / 2, whole = half - half % kLanes;
  for (std::int64_t j = 0; j < whole; j += kLanes)
    tile<SourceT<false>, OutT, kRotate, kCacheIt, kOutIt, kAscend, false, N>(p, tokens, j, kLanes);
  if (whole < half)
    for (int t = 0; t < N; ++t)
      tile<SourceT<true>, OutT, kRotate, kCacheIt, kOutIt, kAscend, true, 1>(p, tokens + t, whole, static_cast<int>(half - whole));
}

template <template <bool> class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend>
std::int64_t kernel(const Part& p, const Token* tokens, std::int64_t count) {
  std::int64_t t = 0;
  if (p.block_tokens)
    for (; t + kBlock <= count; t += kBlock)
      all_columns<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, kBlock>(p, tokens + t);
  for (; t < count; ++t) all_columns<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, 1>(p, tokens + t);
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
