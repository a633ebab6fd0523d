// The one algorithm: source -> rotation -> sink over pairs of 16-lane blocks. Knows no ISA (simd/*.hpp does), no index,
// no cache layout and no padding (prepare.cpp has turned those into pointers).
//
// Each target includes this file inside its own anonymous namespace after its simd header, with its own compiler flags: the
// linker must never merge these functions with those of another target, so there is nothing here with external linkage.

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

template <class T>
inline void store_blocks(T type, char* p, F first, F second, bool stream_it) {
  if (stream_it) stream(type, p, first, second);
  else store(type, p, first, second);
}

// Block i of the two halves of a head: columns 16 i and half + 16 i from where the pointers are. n: of the last block.
struct Block {
  std::int64_t a, b;
  int n;
};
template <class T, bool kTail>
inline Pair load_pair(T type, const char* p, const Block& c) {
  return {load_block<T, kTail>(type, p + c.a * kSize<T>, c.n), load_block<T, kTail>(type, p + c.b * kSize<T>, c.n)};
}

// Sources: columns(p, c) loads what all tokens share, load(...) gives the float32 pair (C2, C3).
template <class T, bool kTail>
struct FloatSource {
  template <class Other> static constexpr bool kIs = is_same<T, Other>;
  using Type = T;
  static constexpr bool kBlocked = false;  // nothing that tokens could share
  static inline void prefetch(const char*, const Block&, std::int64_t) {}
  struct Columns {};
  static inline Columns columns(const Part&, const Block&) { return {}; }
  static inline Pair load(const Columns&, const Token& t, const Block& c) { return load_pair<T, kTail>(T{}, t.x, c); }
};

// int32 x is the most of what a call reads, and one head after the other is more than the processor's own prefetchers keep up
// with: rows from memory (W3) take half the time with it. Past the end of a row lie the next part and the next token. `ahead`
// is in bytes; the less a token takes, the further it must reach.
inline void prefetch_int32(const char* x, const Block& c, std::int64_t ahead) {
  __builtin_prefetch(x + c.a * 4 + ahead);
  __builtin_prefetch(x + c.b * 4 + ahead);
}

template <bool kTail>
struct FloatBiasSource {
  template <class Other> static constexpr bool kIs = is_same<Int32, Other>;
  using Type = Int32;
  static constexpr bool kBlocked = true;
  static inline void prefetch(const char* x, const Block& c, std::int64_t ahead) { prefetch_int32(x, c, ahead); }
  struct Columns {
    Pair scale, bias;
  };
  static inline Columns columns(const Part& p, const Block& c) {
    return {load_pair<Float32, kTail>(Float32{}, p.weight_scale, c), load_pair<Float32, kTail>(Float32{}, p.bias, c)};
  }
  static inline Pair load(const Columns& k, const Token& t, const Block& c) {
    const F activation = broadcast(t.activation_scale);
    const Pair x = load_pair<Int32, kTail>(Int32{}, t.x, c);
    return {add(mul(mul(x.a, k.scale.a), activation), k.bias.a), add(mul(mul(x.b, k.scale.b), activation), k.bias.b)};
  }
};

template <bool kTail>
struct IntBiasSource {
  template <class Other> static constexpr bool kIs = is_same<Int32, Other>;
  using Type = Int32;
  static constexpr bool kBlocked = true;
  static inline void prefetch(const char* x, const Block& c, std::int64_t ahead) { prefetch_int32(x, c, ahead); }
  struct Columns {
    Pair scale;
    const char* bias;
  };
  static inline Columns columns(const Part& p, const Block& c) {
    return {load_pair<Float32, kTail>(Float32{}, p.weight_scale, c), p.bias};
  }
  static inline F sum(const char* x, const char* bias, std::int64_t column, int n) {
    if constexpr (kTail) return load_sum_n(x + column * 4, bias + column * 4, n);
    else return load_sum(x + column * 4, bias + column * 4);
  }
  static inline Pair load(const Columns& k, const Token& t, const Block& c) {
    const F activation = broadcast(t.activation_scale);
    return {mul(mul(sum(t.x, k.bias, c.a, c.n), k.scale.a), activation),
            mul(mul(sum(t.x, k.bias, c.b, c.n), k.scale.b), activation)};
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

// cos and sin of one block of columns, widened to float32.
struct CosSin {
  Pair cos, sin;
};
template <class OutT, bool kTail>
inline CosSin load_cos_sin(const Token& token, const Block& c) {
  return {load_pair<OutT, kTail>(OutT{}, token.cos, c), load_pair<OutT, kTail>(OutT{}, token.sin, c)};
}

// The same of all blocks of a chunk of half a head, for tokens whose heads are outside: cos[j], cos[j + dim/2], sin[j],
// sin[j + dim/2].
constexpr std::int64_t kChunk = 128;
struct Rotation {
  alignas(64) char values[4][kChunk * 4];
  inline CosSin at(std::int64_t in_chunk) const {
    const auto value = [&](int k) { return load(Float32{}, values[k] + in_chunk * 4); };
    return {{value(0), value(1)}, {value(2), value(3)}};
  }
  inline void set(std::int64_t in_chunk, const CosSin& block) {
    const F all[4] = {block.cos.a, block.cos.b, block.sin.a, block.sin.b};
    KVQUANT_UNROLL
    for (int k = 0; k < 4; ++k) store_raw(values[k] + in_chunk * 4, all[k]);
  }
};

// What is done to a part, at compile time. kDivide: by the scale itself, not by means of its reciprocal.
template <template <bool> class SourceT, class OutT, bool kRotateIt, bool kCacheIt, bool kOutIt, bool kAscendIt, bool kDivideIt>
struct Task {
  template <bool kTail> using Source = SourceT<kTail>;
  using Out = OutT;
  static constexpr bool kRotate = kRotateIt, kCache = kCacheIt, kOut = kOutIt, kAscend = kAscendIt, kDivide = kDivideIt;
  static constexpr int kBlocks = kCacheIt ? kWideRow : kWide;  // of a tile
};

// Moves what is per column by `columns` columns, what is per token by that or to the next head.
template <class TaskT>
inline void move_columns(Part& p, std::int64_t columns) {
  using T = typename TaskT::template Source<false>::Type;
  if constexpr (is_same<T, Int32>) {
    p.weight_scale += columns * 4;
    p.bias += columns * 4;
  }
  if constexpr (TaskT::kCache) {
    p.scale += columns * 4;
    p.offset += columns * 4;
    if constexpr (!TaskT::kDivide) p.reciprocal += columns * 4;
  }
}
template <class TaskT>
inline void move_token(Token& token, std::int64_t columns) {
  token.x += columns * kSize<typename TaskT::template Source<false>::Type>;
  if constexpr (TaskT::kOut) token.out += columns * kSize<typename TaskT::Out>;
  if constexpr (TaskT::kCache) token.row += columns;
}
template <class TaskT>
inline void next_head(const Part& p, Token& token) {
  token.x += p.x_head;
  if constexpr (TaskT::kOut) token.out += p.out_head;
  if constexpr (TaskT::kCache) token.row += p.row_head;
}

// The outputs of kBlocks neighbouring blocks in both halves of a head; p: the first of the lower half, `half` bytes apart.
template <class T, bool kTail, int kBlocks>
__attribute__((always_inline)) inline void put_out(char* p, std::int64_t half, const Pair (&value)[kBlocks], int n,
                                                   bool stream_it) {
  if constexpr (kBlocks == 1) {
    store_block<T, kTail>(T{}, p, value[0].a, n, stream_it);
    store_block<T, kTail>(T{}, p + half, value[0].b, n, stream_it);
  } else {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; i += 2) store_blocks(T{}, p + i * kLanes * kSize<T>, value[i].a, value[i + 1].a, stream_it);
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; i += 2) store_blocks(T{}, p + half + i * kLanes * kSize<T>, value[i].b, value[i + 1].b, stream_it);
  }
}

template <bool kTail, int kBlocks>
__attribute__((always_inline)) inline void put_bytes(char* p, const Words (&words)[kBlocks], int n, bool stream_it) {
  if constexpr (kBlocks == 1) store_block<Int8, kTail>(Int8{}, p, narrow(words[0]), n, stream_it);
  if constexpr (kBlocks == 2) store_block<Int8, false>(Int8{}, p, narrow(words[0], words[1]), n, stream_it);
  if constexpr (kBlocks == 4) store_block<Int8, false>(Int8{}, p, narrow(words[0], words[1], words[2], words[3]), n, stream_it);
}

// C6 of kBlocks neighbouring blocks in both halves of a head, from column j on.
template <bool kDivide, bool kTail, int kBlocks>
__attribute__((always_inline)) inline void put_row(const Part& p, char* row, std::int64_t j, const Pair (&value)[kBlocks],
                                                   int n) {
  const std::int64_t half = p.dim / 2;
  const auto columns = [&](const char* vector, int i) {
    return load_pair<Float32, kTail>(Float32{}, vector, {j + i * kLanes, half + j + i * kLanes, n});
  };
  Words a[kBlocks], b[kBlocks];
  const auto divide = [&] {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const Pair scale = columns(p.scale, i), offset = columns(p.offset, i);
      a[i] = whole(value[i].a, add(div(value[i].a, scale.a), offset.a));
      b[i] = whole(value[i].b, add(div(value[i].b, scale.b), offset.b));
    }
  };
  if constexpr (kDivide) {
    divide();
  } else if (__builtin_expect(!estimate(value, p, j, Count<kTail>{n}, a, b), 0)) {
    if constexpr (kBlocks > 1) return divide_again(value, p, j, row);
    else divide();
  }
  put_bytes<kTail>(row + j, a, n, p.stream_rows);
  put_bytes<kTail>(row + half + j, b, n, p.stream_rows);
}

// N tokens of kBlocks neighbouring blocks of columns in both halves of one head, j columns from where the pointers in p and
// in the tokens are; turn(t, i) gives cos and sin. The column vectors are loaded once for all tokens. Two blocks make narrowing
// cheaper. Inlined by force: called out of line, it would take the address of everything kept in registers.
template <class TaskT, bool kTail, int N, int kBlocks, class Turn>
__attribute__((always_inline)) inline void tile(const Part& p, const Token* tokens, const Turn& turn,
                                                std::int64_t j, int n) {
  static_assert(kBlocks == 1 || !kTail);
  using SourceT = typename TaskT::template Source<kTail>;
  using OutT = typename TaskT::Out;
  const std::int64_t half = p.dim / 2;
  typename SourceT::Columns columns[kBlocks];
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) columns[i] = SourceT::columns(p, {j + i * kLanes, half + j + i * kLanes, n});
  const auto one_token = [&](int t) __attribute__((always_inline)) {
    Pair value[kBlocks];
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const Block c{j + i * kLanes, half + j + i * kLanes, n};
      SourceT::prefetch(tokens[t].x, c, N == 1 ? 5120 : 2560);
      value[i] = SourceT::load(columns[i], tokens[t], c);
    }
    if constexpr (TaskT::kRotate) {
      KVQUANT_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        const CosSin by = turn(t, i);
        value[i] = rotate<TaskT::kAscend, SourceT::template kIs<Float16>>(value[i], by.cos, by.sin);
      }
    }
    if constexpr (TaskT::kOut) put_out<OutT, kTail>(tokens[t].out + j * kSize<OutT>, half * kSize<OutT>, value, n, p.stream_out);
    if constexpr (TaskT::kCache) put_row<TaskT::kDivide, kTail>(p, reinterpret_cast<char*>(tokens[t].row), j, value, n);
  };
  if constexpr (TaskT::kCache) {  // unrolled, it would be long, and no faster
    KVQUANT_ROLL
    for (int t = 0; t < N; ++t) one_token(t);
  } else {
    KVQUANT_UNROLL
    for (int t = 0; t < N; ++t) one_token(t);
  }
}

// kBlocks blocks of columns, from column j on, of all heads of one token; cos and sin in registers.
template <class TaskT, bool kTail, int kBlocks>
__attribute__((always_inline)) inline void all_heads(const Part& part, const Token& token, std::int64_t j, int n) {
  CosSin block[kBlocks];
  if constexpr (TaskT::kRotate) {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      block[i] = load_cos_sin<typename TaskT::Out, kTail>(token, {j + i * kLanes, part.table_half + j + i * kLanes, n});
  }
  Part p = part;
  Token at = token;
  move_columns<TaskT>(p, j);
  move_token<TaskT>(at, j);
  for (std::int64_t h = 0; h < p.heads; ++h) {
    tile<TaskT, kTail, 1, kBlocks>(p, &at, [&](int, int i) { return block[i]; }, 0, n);
    move_columns<TaskT>(p, p.dim);
    next_head<TaskT>(p, at);
  }
}

// What is left of half a head behind whole tiles. A function of its own, so that it is there only once.
template <class TaskT>
__attribute__((noinline)) void rest(const Part& p, const Token& token, std::int64_t j) {
  const std::int64_t half = p.dim / 2;
  if (j + kLanes <= half) {
    all_heads<TaskT, false, 1>(p, token, j, kLanes);
    j += kLanes;
  }
  if (j < half) all_heads<TaskT, true, 1>(p, token, j, static_cast<int>(half - j));
}

// N tokens at a time, heads outside: what the tokens share is loaded once, and x is read in order. Where rows are cached, half a
// head must be whole tiles.
template <class TaskT, int N>
inline std::int64_t token_blocks(const Part& part, const Token* tokens, std::int64_t count) {
  constexpr int kColumns = TaskT::kBlocks * kLanes;
  const std::int64_t half = part.dim / 2, whole = half - half % kColumns;
  Rotation rotations[TaskT::kRotate ? N : 1];
  std::int64_t t = 0;
  for (; t + N <= count; t += N) {
    for (std::int64_t begin = 0; begin < whole; begin += kChunk) {
      const std::int64_t columns = begin + kChunk < whole ? kChunk : whole - begin;
      Part p = part;
      Token at[N];
      move_columns<TaskT>(p, begin);
      KVQUANT_UNROLL
      for (int i = 0; i < N; ++i) {
        at[i] = tokens[t + i];
        move_token<TaskT>(at[i], begin);
        if constexpr (TaskT::kRotate)
          for (std::int64_t j = 0; j < columns; j += kLanes)
            rotations[i].set(j, load_cos_sin<typename TaskT::Out, false>(at[i], {begin + j, begin + p.table_half + j, kLanes}));
      }
      for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t j = 0; j < columns; j += kColumns)
          tile<TaskT, false, N, TaskT::kBlocks>(p, at, [&](int i, int k) { return rotations[i].at(j + k * kLanes); }, j, kLanes);
        move_columns<TaskT>(p, p.dim);
        KVQUANT_UNROLL
        for (int i = 0; i < N; ++i) next_head<TaskT>(p, at[i]);
      }
    }
    if constexpr (!TaskT::kCache)
      if (whole < half)
        for (int i = 0; i < N; ++i) rest<TaskT>(part, tokens[t + i], whole);
  }
  return t;
}

template <class TaskT>
inline std::int64_t all_tokens(const Part& part, const Token* tokens, std::int64_t count) {
  constexpr int kColumns = TaskT::kBlocks * kLanes;
  const Part p = part;  // a copy that no store can alias
  const std::int64_t half = p.dim / 2;
  std::int64_t t = 0;
  if constexpr (TaskT::template Source<false>::kBlocked && kBlock > 1) {
    if (p.order == kTokenBlocks && (!TaskT::kCache || half % kColumns == 0)) t = token_blocks<TaskT, kBlock>(p, tokens, count);
    if constexpr (!TaskT::kCache)
      if (p.order == kHeadsOutside) t = token_blocks<TaskT, 1>(p, tokens, count);
  }
  for (; t < count; ++t) {
    std::int64_t j = 0;
    for (; j + kColumns <= half; j += kColumns) all_heads<TaskT, false, TaskT::kBlocks>(p, tokens[t], j, kLanes);
    if constexpr (TaskT::kBlocks > kWide)
      for (; j + kWide * kLanes <= half; j += kWide * kLanes) all_heads<TaskT, false, kWide>(p, tokens[t], j, kLanes);
    if (j < half) rest<TaskT>(p, tokens[t], j);
  }
  return TaskT::kCache ? count : 0;
}

template <template <bool> class SourceT, class OutT, bool kRotate, bool kCacheIt, bool kOutIt, bool kAscend>
std::int64_t kernel(const Part& p, const Token* tokens, std::int64_t count) {
  if constexpr (kReciprocals && kCacheIt)
    if (p.reciprocal) return all_tokens<Task<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, false>>(p, tokens, count);
  return all_tokens<Task<SourceT, OutT, kRotate, kCacheIt, kOutIt, kAscend, true>>(p, tokens, count);
}

// Without its sign, a float32 that is not finite carries into bit 31 when 00800000 is added; zero, when zero_is_bad = 1 is
// subtracted.
bool copy_checked(const char* from, char* to, std::int64_t count, std::uint32_t zero_is_bad) {
  using Words = std::uint32_t __attribute__((vector_size(__BIGGEST_ALIGNMENT__)));  // the widest register
  constexpr std::int64_t kWords = sizeof(Words) / 4;
  const auto copy = [&](std::int64_t i, auto bits) {
    __builtin_memcpy(&bits, from + i * 4, sizeof(bits));
    __asm__ volatile("" : : : "memory");  // what was read is what is checked: it may have changed since
    __builtin_memcpy(to + i * 4, &bits, sizeof(bits));
    return ((bits & 0x7FFFFFFFu) + 0x00800000u) | ((bits & 0x7FFFFFFFu) - zero_is_bad);
  };
  Words found = {};
  std::int64_t i = 0;
  for (; i + kWords <= count; i += kWords) found |= copy(i, Words{});
  std::uint32_t any = 0;
  for (; i < count; ++i) any |= copy(i, std::uint32_t{0});
  for (int k = 0; k < kWords; ++k) any |= found[k];
  return any >> 31 == 0;
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
  table.copy_checked = copy_checked;
  table.writes_whole_lines = kWideRow * kLanes == 64;
  return table;
}
