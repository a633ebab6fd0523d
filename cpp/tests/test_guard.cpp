// Every operand placed against an unreadable page, at its back and at its front (R5, F43): a read or write of one byte too
// many ends the process. All operands of a case are placed the same way, so each case guards all of them.
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "cases.hpp"

using namespace kvtest;

TEST_CASE("guard pages: nothing is read or written beyond an operand's ends") {
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
          c.three_d = random.chance(50);
          draw_choices(c, random);
          c.cache_layout = static_cast<CacheLayout>(random.below(kCacheLayouts));
          ++cases;
          const std::string mismatch = compare(c);
          if (!mismatch.empty()) FAIL(mismatch);
        }
  std::printf("guard pages: %d cases on each target\n", cases);
}
