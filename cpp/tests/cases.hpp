// One call of the operator as a list of choices, the memory and the data that these choices mean, and the check that every
// target agrees with the oracle on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "buffers.hpp"
#include "kvquant/kvquant.hpp"

namespace kvtest {

enum class CacheLayout {
  contiguous,
  pages_interleaved,   // kv[C1,2,C2,Nkv,D]: kv[:,0], kv[:,1]
  rows_interleaved,    // kv[C1,C2,2*Nkv,D]: kv[:,:,:Nkv], kv[:,:,Nkv:]
  values_interleaved,  // kv[C1,C2,Nkv,2*D]: kv[...,:D], kv[...,D:]
  head_major,          // memory [C1,Nkv,C2,D]
  padded_page,         // odd gaps after pages, rows and heads
  reversed,            // blocks and rows in descending memory order
};
constexpr int kCacheLayouts = 7;

enum class InputLayout {
  dense,
  padded,      // gaps between rows
  transposed,  // memory [S,B,...]
  reversed,    // negative row strides
  shared,      // one cos/sin row for all tokens (stride 0)
};
constexpr int kInputLayouts = 5;

enum class OutputLayout {
  dense,
  padded,
  head_major,  // memory [B,N,S,D]
  fused,       // o[B,S,Nq+2*Nkv,D]: q, k and v are slices of one buffer
};
constexpr int kOutputLayouts = 4;

enum class ScaleShape { heads_dim, flat, heads_one, one, scalar };
constexpr int kScaleShapes = 5;

struct Pair {
  kvquant::DType x, out;
};
constexpr Pair kPairs[] = {{kvquant::DType::int32, kvquant::DType::float16},     {kvquant::DType::int32, kvquant::DType::bfloat16},
                           {kvquant::DType::int32, kvquant::DType::float32},     {kvquant::DType::float16, kvquant::DType::float16},
                           {kvquant::DType::bfloat16, kvquant::DType::bfloat16}, {kvquant::DType::float32, kvquant::DType::float32}};
constexpr kvquant::DType kBiases[] = {kvquant::DType::none, kvquant::DType::int32, kvquant::DType::float32, kvquant::DType::float16,
                                      kvquant::DType::bfloat16};

struct Case {
  kvquant::DType x = kvquant::DType::int32, out = kvquant::DType::float16;
  bool three_d = true, packed = true;
  std::int64_t batch = 1, sequence = 1, heads_q = 1, heads_kv = 1, dim = 16;
  std::int64_t page_rows = 4;  // C2 in page mode
  kvquant::CacheMode mode = kvquant::CacheMode::page;
  kvquant::Numerics numerics = kvquant::Numerics::fp32;
  bool kv_output = false, padding = false, duplicates = false;
  kvquant::DType bias = kvquant::DType::none, index = kvquant::DType::int32;
  enum class Tables { per_token, full, half } tables = Tables::per_token;  // full, half: [P,D], [P,D/2] and positions
  kvquant::DType position = kvquant::DType::int32;
  bool activation_scale = false, offset_k = false, offset_v = false;
  ScaleShape scale_shape[4] = {};  // scale_k, scale_v, offset_k, offset_v
  CacheLayout cache_layout = CacheLayout::contiguous;
  InputLayout input_layout = InputLayout::dense;
  OutputLayout output_layout = OutputLayout::dense;
  bool strided_vectors = false;
  bool junk_unit_strides = false;
  bool uneven = false;  // operands that often share their strides (K and V, cos and sin) get different ones
  int misalign = 0;
  Placement placement = Placement::canaries;
  Values values = Values::plain;
  std::uint64_t seed = 1;
};

std::string describe(const Case& c);

// Draws all choices but types, sizes, the cache's layout, placement and values.
void draw_choices(Case& c, Random& random);

// Allocates and fills all operands of `c` in `arena`.
void build(const Case& c, Arena& arena, kvquant::Operands& operands, kvquant::Options& options);

// A case with memory of its own.
struct Setup {
  Arena arena;
  kvquant::Operands a;
  kvquant::Options options;
  Setup() = default;
  explicit Setup(const Case& c) { build(c, arena, a, options); }
};

// How run is called: one range, three ranges, or token by token in shuffled order.
enum class Cut { whole, three, singles };

// make_plan, prepare and run in a workspace of exactly the promised size. Runs only if both steps succeed. `violation`
// becomes non-empty if bytes around the workspace changed or its size was not sufficient.
kvquant::Status execute(const kvquant::Operands& operands, const kvquant::Options& options, Cut cut, std::uint64_t seed,
                        std::string& violation);
kvquant::Status execute(const kvquant::Operands& operands, const kvquant::Options& options);

// Targets that this machine can run.
std::vector<int> available_targets();
int target_index(const char* name);
const char* name_of(kvquant::DType dtype);

// Runs the operands on every available target (each with one of the cuts, rotating) and compares all of `arena` with what
// the oracle wrote. Returns the first mismatch, prefixed by the target's name; empty: all equal.
std::string compare(Arena& arena, const kvquant::Operands& operands, kvquant::Options options, std::uint64_t seed,
                    bool all_cuts = false);
std::string compare(const Case& c, bool all_cuts = false);  // build + compare, the case described in a mismatch

}  // namespace kvtest
