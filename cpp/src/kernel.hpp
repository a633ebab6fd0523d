// What the baseline code and an ISA's kernels agree on: plain structs and one table of function pointers per target.
// Included by both sides, so it must hold no inline function, no template and no constant that needs code at load time.
#pragma once

#include <cstdint>

#include "kvquant/kvquant.hpp"

namespace kvquant {
namespace detail {

// One of Q, K, V in one call. Columns are counted from the part's first head; heads follow each other every `dim` columns.
struct Part {
  std::int64_t heads, dim;
  std::int64_t x_head, out_head, row_head;  // bytes from one head to the next in x, in the output and in a cache row
  std::int64_t table_half;                  // dim/2, or 0 where each value of cos and sin serves both halves
  const char* weight_scale;                 // float32 [heads*dim]; null for float x
  const char* bias;                         // int32 or float32 [heads*dim]; null for float x
  const char* scale;                        // float32 [heads*dim]; null if nothing is quantised
  const char* offset;                       // float32 [heads*dim]
  const char* reciprocal;                   // float32 [heads*dim], of scale, and offset, as simd/fixed_point.hpp wants them; or
  const char* fixed_offset;                 // both null: divide
  Order order;
  bool stream_out, stream_rows;             // non-temporal stores; every head then starts at a multiple of 64 bytes
};

// One token of one part.
struct Token {
  const char* x;    // its first head
  const char* cos;  // [dim], or [dim/2] used for both halves, of the output type
  const char* sin;
  char* out;         // null if the kernel writes no output
  std::int8_t* row;  // null if the kernel writes no cache row
  float activation_scale;
};

enum Source { kInt32FloatBias, kInt32IntBias, kFloat, kSources };
enum Output { kFloat16, kBfloat16, kFloat32, kOutputs };
// What is done to one part: rotate or not, and where the result goes.
enum Job { kRotateOut, kRotateCache, kRotateCacheOut, kCache, kCacheOut, kOut, kJobs };

// Where the kernels are to be given reciprocals.
enum class FixedPoint { nowhere, where_division_is_slow, everywhere };

// kernels[numerics][source][output][job]; the rounded arithmetic of numerics="ascend" exists for float16 rotation only, its
// other entries are those of "fp32".
// A kernel processes `count` tokens, none of whose pointers is null where it writes, and returns the cache rows it wrote.
// copy_checked copies `count` float32, reading each once, and checks them by their bits: false if one is not finite or, with
// zero_is_bad = 1, zero. `to` may be `from`.
struct KernelTable {
  Kernel kernels[2][kSources][kOutputs][kJobs];
  KernelOfAll together_bfloat16;  // kRotateOut, kRotateCache and kCache of bfloat16 x with D = 64, 128 or 256; null: apart
  bool (*copy_checked)(const char* from, char* to, std::int64_t count, std::uint32_t zero_is_bad);
  FixedPoint fixed_point;
  bool writes_whole_lines;  // of cache rows at once: half lines, written non-temporally, cost more than they save
};

extern const KernelTable kScalarTable, kAvx2Table, kAvx512Table, kAvx512Bf16Table, kNeonTable;

}  // namespace detail
}  // namespace kvquant
