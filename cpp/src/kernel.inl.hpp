// The one algorithm: source -> rotation -> sink over pairs of 16-lane blocks. Knows no ISA (simd/*.hpp does), no index,
// no cache layout and no padding (prepare.cpp has turned those into pointers).
//
// Each target includes this file inside its own anonymous namespace after its simd header, with its own compiler flags: the
// linker must never merge these functions with those of another target, so there is nothing here with external linkage.

#include "sources.inl.hpp"

// C4, and C7 where kAscend: there each product and each sum is rounded to float16.
template <bool kAscend>
inline F rounded(F value) {
  if constexpr (kAscend) return round_float16(value);
  else return value;
}
template <bool kAscend, bool kFuse>
inline Pair rotate(Pair x, Pair cos, Pair sin) {
  // kFuse: products of two float16 values are exact in float32, so that fusing them with the sum gives the same bits; or kFused.
  if constexpr (kFuse && !kAscend)
    return {multiply_subtract(x.a, cos.a, mul(x.b, sin.a)), multiply_add(x.b, cos.b, mul(x.a, sin.b))};
  const F a = rounded<kAscend>(x.a), b = rounded<kAscend>(x.b);
  return {rounded<kAscend>(sub(rounded<kAscend>(mul(a, cos.a)), rounded<kAscend>(mul(b, sin.a)))),
          rounded<kAscend>(add(rounded<kAscend>(mul(b, cos.b)), rounded<kAscend>(mul(a, sin.b))))};
}

// cos and sin of one block of columns, widened to float32.
struct CosSin {
  Pair cos, sin;
};
template <class OutT, bool kTail, int kBlocks>
KVQUANT_INLINE void load_cos_sin(const Token& token, const Block& c, CosSin (&block)[kBlocks]) {
  Pair cos[kBlocks], sin[kBlocks];
  load_pairs<OutT, kTail>(OutT{}, token.cos, c, cos);
  load_pairs<OutT, kTail>(OutT{}, token.sin, c, sin);
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) block[i] = {cos[i], sin[i]};
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
  // Whether products may be fused with sums although they are not exact (fixed_point.hpp).
  static constexpr bool kFused = kRotateIt && kCacheIt && !kOutIt && !kDivideIt && is_same<typename SourceT<false>::Type, Bfloat16>;
  static constexpr int kBlocks = kCacheIt ? kWideRow : kWide;  // of a tile
};

// Moves what is per token by `columns` columns, or to the next head.
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

// The outputs of kBlocks neighbouring blocks in both halves of a head; p: the first of the lower half, `half` bytes apart.
template <class T, bool kTail, int kBlocks>
KVQUANT_INLINE void put_out(char* p, std::int64_t half, const Pair (&value)[kBlocks], int n, bool stream_it) {
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
KVQUANT_INLINE void put_bytes(char* p, const Words (&words)[kBlocks], int n, bool stream_it) {
  if constexpr (kBlocks == 1) store_block<Int8, kTail>(Int8{}, p, narrow(words[0]), n, stream_it);
  if constexpr (kBlocks == 2) store_block<Int8, false>(Int8{}, p, narrow(words[0], words[1]), n, stream_it);
  if constexpr (kBlocks == 4) store_block<Int8, false>(Int8{}, p, narrow(words[0], words[1], words[2], words[3]), n, stream_it);
}

// C6 of kBlocks neighbouring blocks in both halves of a head, from `column` of the part on. Where the codes are in doubt
// (fixed_point.hpp), `divide` is called and nothing written.
template <bool kDivide, bool kTail, int kBlocks, class Divide>
KVQUANT_INLINE void put_row(const Part& p, char* row, std::int64_t column, const Pair (&value)[kBlocks],
                            int n, const Divide& divide) {
  const std::int64_t half = p.dim / 2;
  const auto columns = [&](const char* vector, int i) {
    return load_pair<Float32, kTail>(Float32{}, vector, {column + i * kLanes, half + column + i * kLanes, n});
  };
  Words a[kBlocks], b[kBlocks];
  if constexpr (kDivide) {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const Pair scale = columns(p.scale, i), offset = columns(p.offset, i);
      a[i] = whole(value[i].a, add(div(value[i].a, scale.a), offset.a));
      b[i] = whole(value[i].b, add(div(value[i].b, scale.b), offset.b));
    }
  } else {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const Pair reciprocal = columns(p.reciprocal, i), offset = columns(p.fixed_offset, i);
      a[i] = fixed(value[i].a, reciprocal.a, offset.a);
      b[i] = fixed(value[i].b, reciprocal.b, offset.b);
    }
    auto lowest = least(a[0], b[0]);
    KVQUANT_UNROLL
    for (int i = 1; i < kBlocks; ++i) lowest = least(lowest, least(a[i], b[i]));
    if (__builtin_expect(doubtful(lowest, kTail ? n : kLanes), 0)) return divide();
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      a[i] = code(a[i]);
      b[i] = code(b[i]);
    }
  }
  put_bytes<kTail>(row, a, n, p.stream_rows);
  put_bytes<kTail>(row + half, b, n, p.stream_rows);
}
// The same as it is written, through memory and out of line, so that it takes no register from those who need it in one of sixty
// steps, as a rule. values[2][blocks*16], float32; scale, offset and row from the first column on; of each block, the first n.
__attribute__((noinline)) void divide_row(const char* values, int blocks, const char* scale, const char* offset, char* row,
                                          std::int64_t half, int n) {
  for (int i = 0; i < 2 * blocks; ++i) {
    const std::int64_t column = i < blocks ? i * kLanes : half + (i - blocks) * kLanes;
    const F value = load(Float32{}, values + i * kLanes * 4);
    const F scaled = add(div(value, load_n(Float32{}, scale + column * 4, n)), load_n(Float32{}, offset + column * 4, n));
    store_n(Int8{}, row + column, narrow(whole(value, scaled)), n);
  }
}

// N tokens of kBlocks neighbouring blocks of columns in both halves of one head, from `column` of the part on and j columns from
// where the pointers in the tokens are; turn(t, i) gives cos and sin. The column vectors are loaded once for all tokens. Two blocks
// make narrowing cheaper. Inlined by force: called out of line, it would take the address of everything kept in registers.
template <class TaskT, bool kTail, int N, int kBlocks, class Turn>
KVQUANT_INLINE void tile(const Part& p, const Token* tokens, const Turn& turn, std::int64_t column, std::int64_t j, int n) {
  static_assert(kBlocks == 1 || !kTail);
  using SourceT = typename TaskT::template Source<kTail>;
  using OutT = typename TaskT::Out;
  const std::int64_t half = p.dim / 2;
  typename SourceT::Columns columns[kBlocks];
  KVQUANT_UNROLL
  for (int i = 0; i < kBlocks; ++i) columns[i] = SourceT::columns(p, {column + i * kLanes, half + column + i * kLanes, n});
  const auto one_token = [&](int t) __attribute__((always_inline)) {
    Pair value[kBlocks];
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      SourceT::prefetch(tokens[t].x, {j + i * kLanes, half + j + i * kLanes, n}, N == 1 ? 5120 : 2560);
    SourceT::load(columns, tokens[t], {j, half + j, n}, value);
    Pair turned[kBlocks];
    const auto rotate_all = [&](auto fused) __attribute__((always_inline)) {
      KVQUANT_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        if constexpr (!TaskT::kRotate) {
          turned[i] = value[i];
        } else {
          const CosSin by = turn(t, i);
          turned[i] = rotate<TaskT::kAscend, SourceT::template kIs<Float16> || fused.value>(value[i], by.cos, by.sin);
        }
      }
    };
    rotate_all(Flag<TaskT::kFused>{});
    if constexpr (TaskT::kOut) put_out<OutT, kTail>(tokens[t].out + j * kSize<OutT>, half * kSize<OutT>, turned, n, p.stream_out);
    if constexpr (TaskT::kCache) {
      char* const row = reinterpret_cast<char*>(tokens[t].row) + j;
      put_row<TaskT::kDivide, kTail>(p, row, column, turned, n, [&] {
        if constexpr (TaskT::kFused) rotate_all(Flag<false>{});
        alignas(64) char values[2 * kBlocks * kLanes * 4];
        KVQUANT_UNROLL
        for (int i = 0; i < kBlocks; ++i) {
          store_raw(values + i * kLanes * 4, turned[i].a);
          store_raw(values + (kBlocks + i) * kLanes * 4, turned[i].b);
        }
        divide_row(values, kBlocks, p.scale + column * 4, p.offset + column * 4, row, half, n);
      });
    }
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
KVQUANT_INLINE void all_heads(const Part& p, const Token& token, std::int64_t j, int n) {
  CosSin block[kBlocks];
  if constexpr (TaskT::kRotate) load_cos_sin<typename TaskT::Out, kTail>(token, {j, p.table_half + j, n}, block);
  Token at = token;
  move_token<TaskT>(at, j);
  for (std::int64_t column = j; column < p.heads * p.dim; column += p.dim) {
    tile<TaskT, kTail, 1, kBlocks>(p, &at, [&](int, int i) { return block[i]; }, column, 0, n);
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
inline std::int64_t token_blocks(const Part& p, const Token* tokens, std::int64_t count) {
  constexpr int kColumns = TaskT::kBlocks * kLanes;
  const std::int64_t half = p.dim / 2, whole = half - half % kColumns;
  Rotation rotations[TaskT::kRotate ? N : 1];
  std::int64_t t = 0;
  for (; t + N <= count; t += N) {
    for (std::int64_t begin = 0; begin < whole; begin += kChunk) {
      const std::int64_t columns = begin + kChunk < whole ? kChunk : whole - begin;
      Token at[N];
      KVQUANT_UNROLL
      for (int i = 0; i < N; ++i) {
        at[i] = tokens[t + i];
        move_token<TaskT>(at[i], begin);
        if constexpr (TaskT::kRotate)
          for (std::int64_t j = 0; j < columns; j += kLanes) {
            CosSin block[1];
            load_cos_sin<typename TaskT::Out, false>(at[i], {begin + j, begin + p.table_half + j, kLanes}, block);
            rotations[i].set(j, block[0]);
          }
      }
      for (std::int64_t column = begin; column < p.heads * p.dim; column += p.dim) {
        for (std::int64_t j = 0; j < columns; j += kColumns)
          tile<TaskT, false, N, TaskT::kBlocks>(
              p, at, [&](int i, int k) { return rotations[i].at(j + k * kLanes); }, column + j, j, kLanes);
        KVQUANT_UNROLL
        for (int i = 0; i < N; ++i) next_head<TaskT>(p, at[i]);
      }
    }
    if constexpr (!TaskT::kCache)
      if (whole < half)
        for (int i = 0; i < N; ++i) rest<TaskT>(p, tokens[t + i], whole);
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
  if (TaskT::kCache && kColumns == 64 && p.dim == 128) {  // as most models have it: a constant leaves registers to the pointers
    Part known = p;
    known.dim = 128;
    for (; t < count; ++t) all_heads<TaskT, false, TaskT::kBlocks>(known, tokens[t], 0, kLanes);
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
  if constexpr (kFixedPoint && kCacheIt)
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
  if (kFixedPoint) table.fixed_point = FixedPoint::where_division_is_slow;
  table.writes_whole_lines = kWideRow * kLanes == 64;
  return table;
}
