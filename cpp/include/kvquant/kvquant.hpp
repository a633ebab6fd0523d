// kvquant: dequantise -> split QKV -> rotary embedding -> quantise K and V to int8 -> scatter into the KV cache,
// in one pass on the CPU. The numeric and safety rules (C1-C8, I1-I10) are in docs/contract.md.
//
// Plan -> prepare -> run:
//   make_plan  looks at metadata only (dtypes, shapes, strides, options). A plan is immutable and may be shared by threads.
//   prepare    looks at the values of one call, once: resolves every token to its cache row, checks scales and indices,
//              and writes only into the caller's workspace. Every error is found here or in make_plan.
//   run        writes the tokens [first, last). It cannot fail; any thread may run any cut of the range.
//
// Nothing here throws, allocates, prints or starts a thread. C++17, no intrinsics, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define KVQUANT_API
#else
#define KVQUANT_API __attribute__((visibility("default")))
#endif

namespace kvquant {

// Element types. The operator takes int8 (caches), int32, int64, float16, bfloat16 and float32; the others exist so that an
// error can name what it got. Numbers are stable; 32-39 are reserved for fp8 and int4 caches.
enum class DType : std::int32_t {
  none = 0,  // the operand is absent
  int8 = 1,
  int32 = 2,
  int64 = 3,
  float16 = 4,
  bfloat16 = 5,
  float32 = 6,
  boolean = 10,
  uint8 = 11,
  int16 = 12,
  uint16 = 13,
  uint32 = 14,
  uint64 = 15,
  float64 = 16,
  complex64 = 17,
  complex128 = 18,
  other = 31,
};

// Every argument has one name in all layers. The first kOperandCount are arrays, the rest options.
enum class Argument : std::int32_t {
  x,
  cos,
  sin,
  k_cache,
  v_cache,
  indices,
  scale_k,
  scale_v,
  offset_k,
  offset_v,
  weight_scale,
  activation_scale,
  bias,
  positions,
  q,
  k,
  v,
  q_source,
  k_source,
  v_source,
  size_splits,  // first option
  cache_mode,
  numerics,
  padding_index,
  allow_duplicates,
  isa,
  workspace,
  none,
};
constexpr int kOperandCount = static_cast<int>(Argument::size_splits);

// A strided array: strides are in bytes and may be negative or zero, except where docs/contract.md (I5, I5a) says otherwise.
// An operand of more than four dimensions is refused by its ndim; its axes are then not looked at.
struct View {
  void* data = nullptr;  // ignored by make_plan, except that read_only speaks of it
  DType dtype = DType::none;
  std::int32_t ndim = 0;
  std::int64_t shape[4] = {};
  std::int64_t strides[4] = {};
  bool read_only = false;
};

// The operands of one call. x is packed [B,S,H] or [B,H]; instead of x, three sources may be given:
// q_source [B,S,Nq,D] or [B,Nq,D], k_source and v_source [B,S,Nkv,D] or [B,Nkv,D]. weight_scale and bias stay [H] in the
// order q, k, v. With positions [B*S], cos and sin are tables [P,D] or [P,D/2] and token t takes row positions[t] (I10); without,
// they have one row per token. q, k and v may be absent when the plan is made: it then assumes contiguous arrays of its B and S,
// and the call brings their pointers. Shapes and dtypes of all operands: the table in docs/contract.md.
struct Operands {
  std::size_t size = sizeof(Operands);
  View view[kOperandCount];
  std::int64_t size_splits[3] = {};  // [Nq*D, Nkv*D, Nkv*D]; used with packed x only

  View& operator[](Argument a) { return view[static_cast<int>(a)]; }
  const View& operator[](Argument a) const { return view[static_cast<int>(a)]; }
};

enum class CacheMode : std::int32_t { contiguous = 0, page = 1 };
enum class Numerics : std::int32_t { fp32 = 0, ascend = 1 };

struct Options {
  std::size_t size = sizeof(Options);
  CacheMode cache_mode = CacheMode::contiguous;
  Numerics numerics = Numerics::fp32;
  bool kv_output = false;
  bool skip_padding = false;  // padding_index=-1: tokens with index -1 are rotated but not cached (I3)
  bool allow_duplicates = false;
  bool vendor_limits = false;
  const char* isa = nullptr;  // null or empty: the active target
};

enum class Code : std::int32_t {
  ok = 0,
  missing,          // a required operand is absent or its data pointer is null
  dtype,            // got: DType; expected: bit set 1 << DType
  ndim,             // got; expected
  shape,            // axis (-1: the whole), got, expected
  too_few,          // axis, got, expected: a length is negative, or the cache is empty or shorter than the batch
  too_large,        // axis (-1: B*S, or an entry of size_splits), got; expected: the most
  too_far,          // an axis spans more than 2^58 bytes: axis, got: stride in bytes, expected: the largest for its length
  scale_shape,      // scale or offset is none of [Nkv,D], [Nkv*D], [Nkv,1], [1], []: axis, got, expected; got: axes, if axis is -1
  table_shape,      // with positions: cos or sin is neither [P,D] nor [P,D/2]; got: its last axis, expected: D
  head_dim,         // D is odd or zero
  heads,            // Nkv is zero
  unit_stride,      // axis: the last axis must have unit stride; got: stride in bytes, expected: item size
  nesting,          // a written operand's axes overlap each other
  overlap,          // a written operand shares memory with `other`
  read_only,        // a written operand is read-only
  scale,            // position; got: float32 bits of a scale that is zero or not finite
  offset,           // position; got: float32 bits of an offset that is not finite
  index,            // of indices or positions; position, got; expected: the exclusive limit
  duplicate,        // position, got: the index; expected: the earlier position
  option,           // got: the value of the option
  unexpected,       // k or v given without kv_output
  vendor_dtype,     // got: DType (vendor_limits)
  vendor,           // expected: VendorRule, got: the value at fault (vendor_limits)
  isa_unknown,      // no target of that name
  isa_unavailable,  // the target exists but this machine lacks a feature
  workspace,        // got: bytes given; expected: bytes needed, 64-byte aligned
};

enum class VendorRule : std::int32_t {
  h_limit, h_multiple, d_multiple, lone_offset, strided, padding, duplicates, scale_shape, positions
};

struct Status {
  Code code = Code::ok;
  Argument argument = Argument::none;
  Argument other = Argument::none;
  std::int32_t axis = -1;
  std::int64_t position = -1;
  std::int64_t got = 0;
  std::int64_t expected = 0;

  explicit operator bool() const { return code != Code::ok; }  // true: something is wrong
};

// Writes one line (no newline, always terminated) about `status` and returns its length; cut at capacity - 1.
KVQUANT_API std::size_t message(const Status& status, char* buffer, std::size_t capacity) noexcept;
KVQUANT_API const char* name(Argument argument) noexcept;

namespace detail {
struct Target;
struct Part;
struct Token;
using Kernel = std::int64_t (*)(const Part&, const Token*, std::int64_t);
using KernelOfAll = std::int64_t (*)(const Part* parts, const Token* const* tokens, std::int64_t count);  // of Q, K and V

// How a kernel goes through int32 x: all heads of one block of columns, with cos and sin in registers; head after head, so that x
// is read in order; or that for several tokens at once, which then share the column vectors.
enum Order { kHeadsInside, kHeadsOutside, kTokenBlocks };

// The bytes that an operand occupies, relative to its data pointer: [low, high). Empty (0, 0) if it has no elements.
struct Interval {
  std::int64_t low, high;
};

// Those of the operands that are looked at and not empty: first the ones that are written, then the others.
struct Extents {
  struct {
    Argument argument;
    Interval bytes;
  } of[kOperandCount];
  int written, count;
};

// A scale or offset seen as [Nkv,D]: bytes from head to head and from column to column, 0 where one element serves all.
struct ChannelSteps {
  std::int64_t head = 0, column = 0;
};

// One of Q, K, V as the plan sees it: strides in bytes over batch, sequence and heads.
struct Stream {
  Argument argument;
  std::int64_t heads, first_column;
  std::int64_t batch, sequence, head, origin;  // of the source; origin: byte offset of its first element
  std::int64_t out_batch, out_sequence, out_head;
  Kernel cached, uncached;  // for tokens that are written to the cache, and for those that are not (null: nothing to do)
};
}  // namespace detail

// Immutable after make_plan; plain data, may be copied and shared. Read the documented fields, write none.
struct Plan {
  std::size_t size = sizeof(Plan);
  Operands operands;                      // as given
  Options options;                        // as given
  std::int64_t batch = 0, sequence = 0;   // B and S of the operands that it was made from
  std::int64_t heads_q = 0, heads_kv = 0, dim = 0;
  bool three_d = false;                   // x is [B,S,H] (sources [B,S,N,D]); otherwise S = 1
  bool integer_x = false, packed = false;
  bool pack_columns = false;              // weight_scale or bias must be copied into the workspace
  std::int64_t table_half = 0;            // elements of cos and sin from those for column 0 to those for column D/2: 0 or D/2
  bool use_reciprocals = false;           // this CPU or target divides slowly: same bits by multiplications where they are certain
  detail::Order order = detail::kHeadsInside;
  const detail::Target* target = nullptr;
  detail::Stream streams[3] = {};
  detail::KernelOfAll together = nullptr;      // if not null, in place of the streams' cached ones where rows are divided
  detail::ChannelSteps channel_steps[4] = {};  // of scale_k, scale_v, offset_k, offset_v
  detail::Extents extents = {};                // for this B and S
};

// What may change from call to call under one plan: B, S and the data pointers, in the order of Argument. Strides are the plan's.
struct Call {
  std::size_t size = sizeof(Call);
  std::int64_t batch = 0, sequence = 1;
  void* data[kOperandCount] = {};
  int threads = 1;  // that will share its tokens: a hint for prepare, no byte depends on it
  bool kept = false;  // workspace and prepared are just as the last prepare left them, of whatever plan: saves it work

  void*& operator[](Argument a) { return data[static_cast<int>(a)]; }
  void* operator[](Argument a) const { return data[static_cast<int>(a)]; }
};

namespace detail {
// Packed per-channel vectors [Nkv*D] of K or V; reciprocal is null where the kernels must divide.
struct Channels {
  const float *scale = nullptr, *offset = nullptr, *reciprocal = nullptr, *fixed_offset = nullptr;
};
}  // namespace detail

// The result of prepare; points into the workspace and at the operands of the call, owns nothing.
struct Prepared {
  std::size_t size = sizeof(Prepared);
  Call call;
  std::int64_t tokens = 0;
  detail::Channels k_channels, v_channels;
  const float* weight_scale = nullptr;  // [H]
  const void* bias = nullptr;           // [H], int32 or float32
  bool stream_out = false, stream_rows = false;  // non-temporal stores for outputs, for cache rows
  std::int8_t *const *k_rows = nullptr, *const *v_rows = nullptr;  // per token: its cache row; null: not cached
  const char *const *cos_rows = nullptr, *const *sin_rows = nullptr;  // per token: its row of the tables; null without positions
};

// Checks metadata (dtypes, shapes, strides, options). On error `plan` is unspecified. Reads no data, writes only `plan`.
// The two may be plan.operands and plan.options, filled in place.
KVQUANT_API Status make_plan(const Operands& operands, const Options& options, Plan& plan) noexcept;

// Bytes of workspace that prepare needs for a call of `tokens` tokens (64-byte aligned memory).
KVQUANT_API std::size_t workspace_size(const Plan& plan, std::int64_t tokens) noexcept;

// Checks the values of one call and resolves its tokens. Writes `workspace` and `prepared` only.
KVQUANT_API Status prepare(const Plan& plan, const Call& call, void* workspace, std::size_t workspace_bytes,
                           Prepared& prepared) noexcept;

// Computes and writes tokens first <= t < last of `prepared`. Ranges that do not intersect may run at the same time on
// different threads. The caller's floating-point state is given back as it was. When it returns, its writes are visible (I9).
KVQUANT_API void run(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t last) noexcept;

// Targets (instruction sets) in best-first order: 0 <= index < target_count().
KVQUANT_API int target_count() noexcept;
KVQUANT_API const char* target_name(int index) noexcept;
// Null if this machine can run the target; otherwise the first feature that it lacks.
KVQUANT_API const char* target_missing(int index) noexcept;
// Cache rows (K and V counted apart) that the kernels of this target have written in this process.
KVQUANT_API std::uint64_t target_rows(int index) noexcept;
// The target that runs when Options::isa is null: KVQUANT_ISA if set and not empty, else the best. Chosen once a process;
// an unknown or unavailable KVQUANT_ISA is an error at each use.
KVQUANT_API Status active_target(int& index) noexcept;

// A contiguous (C order) view of `ndim` <= 4 dimensions; `data` may be const memory if the operand is only read.
KVQUANT_API View contiguous_view(const void* data, DType dtype, std::int32_t ndim, const std::int64_t* shape) noexcept;

}  // namespace kvquant
