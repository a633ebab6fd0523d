// Every operand placed against an unreadable page, at its back and at its front (R5, F43): a read or write of one byte too
// many ends the process. All operands of a case are placed the same way, so each case guards all of them.
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "cases.hpp"

using namespace kvtest;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Numerics;

TEST_CASE("guard pages: nothing is read or written beyond an operand's ends") {
  struct Pair {
    DType x, out;
  };
  constexpr Pair kPairs[] = {{DType::int32, DType::float16},   {DType::int32, DType::bfloat16},   {DType::int32, DType::float32},
                             {DType::float16, DType::float16}, {DType::bfloat16, DType::bfloat16}, {DType::float32, DType::float32}};
  constexpr DType kBiases[] = {DType::none, DType::int32, DType::float32, DType::float16, DType::bfloat16};
  int cases = 0;
  std::uint64_t seed = 300000;
  for (Pair pair : kPairs)
    for (std::int64_t dim : {2, 4, 6, 10, 14, 18, 30, 32, 34, 48, 64, 66, 96, 130, 256})
      for (std::int64_t tokens : {1, 2, 5, 9})
        for (Placement placement : {Placement::guard_back, Placement::guard_front}) {
          Random random(++seed);
          Case c;
          c.x = pair.x;
          c.out = pair.out;
          c.batch = tokens;
          c.dim = dim;
          c.placement = placement;
          c.seed = seed;
          // Rows of 3072 columns and more take another path through the kernel.
          c.heads_q = random.chance(15) ? 3072 / dim + 1 : random.below(4);
          c.heads_kv = 1 + random.below(3);
          c.packed = random.chance(50);
          c.three_d = random.chance(50);
          c.mode = random.chance(50) ? CacheMode::page : CacheMode::contiguous;
          c.numerics = random.chance(30) ? Numerics::ascend : Numerics::fp32;
          c.kv_output = random.chance(60);
          c.padding = random.chance(20);
          c.bias = random.pick(kBiases);
          c.index = random.chance(50) ? DType::int32 : DType::int64;
          c.activation_scale = random.chance(50);
          c.offset_k = random.chance(50);
          c.offset_v = random.chance(50);
          for (ScaleShape& shape : c.scale_shape) shape = static_cast<ScaleShape>(random.below(kScaleShapes));
          c.cache_layout = static_cast<CacheLayout>(random.below(kCacheLayouts));
          c.input_layout = static_cast<InputLayout>(random.below(kInputLayouts));
          c.output_layout = static_cast<OutputLayout>(random.below(kOutputLayouts));
          c.strided_vectors = random.chance(30);
          c.uneven = random.chance(50);
          c.tables = random.pick({Case::Tables::per_token, Case::Tables::full, Case::Tables::half});
          c.position = random.chance(50) ? DType::int32 : DType::int64;
          ++cases;
          const std::string mismatch = compare(c);
          if (!mismatch.empty()) FAIL(mismatch);
        }
  std::printf("guard pages: %d cases on each target\n", cases);
}
