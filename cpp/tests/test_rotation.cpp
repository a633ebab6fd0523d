// The rotation where one rounding instead of two, a flushed subnormal or an early overflow would show (C1, C4): products and
// sums at the ends of the float32 range, with and without cancellation. Each token holds one such pair of columns among
// ordinary ones, because a kernel may choose its arithmetic by a look at the whole token.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cases.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::DType;
using kvquant::Numerics;
using kvquant::Operands;
using kvquant::Options;

namespace {

struct Format {
  int exponent_bits, mantissa_bits;
};

Format format_of(DType dtype) {
  return dtype == DType::float16 ? Format{5, 10} : dtype == DType::bfloat16 ? Format{8, 7} : Format{8, 23};
}

// A number of binary exponent `power` (clamped to the format, subnormals included) with a random sign and significand, half of
// the significands short.
std::uint64_t number(Format f, int power, Random& random) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int field = std::clamp(power + bias, 0, (1 << f.exponent_bits) - 2);
  std::uint64_t mantissa = random.bits() & ((1u << f.mantissa_bits) - 1);
  if (random.chance(50)) mantissa &= ~std::uint64_t{0} << (f.mantissa_bits - 2);
  mantissa &= (1u << f.mantissa_bits) - 1;
  const std::uint64_t sign = random.chance(50) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  return sign | static_cast<std::uint64_t>(field) << f.mantissa_bits | mantissa;
}

// Exponents of products: both ends of float32 and of float16, both sides of 2^-64 and 2^64, and the middle.
int product_power(bool half, Random& random) {
  if (half) return static_cast<int>(random.pick({-48, -30, -25, -24, -15, -14, 0, 15, 16, 30}) + random.below(3) - 1);
  const int centre = random.pick({-149, -140, -127, -126, -100, -87, -64, -63, 0, 64, 65, 88, 104, 112, 120, 127, 128});
  return centre + static_cast<int>(random.below(5)) - 2;
}

std::string rotate(DType dtype, Numerics numerics, std::int64_t dim, std::uint64_t seed) {
  const Format f = format_of(dtype);
  Case c;
  c.x = c.out = dtype;
  c.numerics = numerics;
  c.batch = 8;
  c.sequence = 64;
  c.heads_q = 2;
  c.dim = dim;
  c.kv_output = true;
  c.seed = seed;
  Arena arena;
  Operands a;
  Options options;
  build(c, arena, a, options);
  Random random(seed);
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t s = 0; s < c.sequence; ++s) {
      const std::int64_t j = random.below(dim / 2), head = random.below(4);
      const int power = product_power(dtype == DType::float16, random);
      const int limit = (1 << (f.exponent_bits - 1)) - 1;
      const auto split = [&](int p) { return std::clamp(p / 2 + static_cast<int>(random.below(2 * limit)) - limit, -limit, limit); };
      // Which half of the head meets the extremes: the first (2: both), or the second alone, with ordinary x.
      const std::int64_t where = random.below(3);
      const int power_x = where == 1 ? 0 : split(power), other = random.chance(60) ? power : product_power(dtype == DType::float16, random);
      const std::uint64_t x1 = number(f, power_x, random), cos = number(f, power - power_x, random);
      std::uint64_t x2 = number(f, where == 1 ? 0 : split(other), random), sin = number(f, other - power_x, random);
      if (random.chance(40)) {  // nearly or exactly equal products
        x2 = x1 ^ (random.chance(50) ? 1u : 0u);
        sin = cos ^ (random.chance(30) ? 1u : 0u);
      } else if (where != 1 && random.chance(30)) {
        x2 = cos;
        sin = x1;
      }
      const std::int64_t column = head * dim + j;
      put_bits(element(a[Argument::x], b, s, column), dtype, x1);
      put_bits(element(a[Argument::x], b, s, column + dim / 2), dtype, x2);
      if (where != 1) {
        put_bits(element(a[Argument::cos], b, s, 0, j), dtype, cos);
        put_bits(element(a[Argument::sin], b, s, 0, j), dtype, sin);
      }
      if (where != 0) {
        put_bits(element(a[Argument::cos], b, s, 0, j + dim / 2), dtype, sin);
        put_bits(element(a[Argument::sin], b, s, 0, j + dim / 2), dtype, cos);
      }
    }
  return compare(arena, a, options, seed);
}

}  // namespace

TEST_CASE("rotation: products and sums at the ends of the range, one pair of columns a token") {
  std::uint64_t seed = 600000;
  for (DType dtype : {DType::float16, DType::bfloat16, DType::float32})
    for (Numerics numerics : {Numerics::fp32, Numerics::ascend})
      for (std::int64_t dim : {32, 34, 64, 128, 192})
        for (int round = 0; round < (dtype == DType::bfloat16 ? 8 : 3); ++round) {
          const std::string mismatch = rotate(dtype, numerics, dim, seed++);
          REQUIRE_MESSAGE(mismatch.empty(), name_of(dtype) << " D=" << dim << ": " << mismatch);
        }
}
