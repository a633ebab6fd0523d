// The rotation where one rounding instead of two, a flushed subnormal or an early overflow would show (C1, C4): products and
// sums at the ends of the float32 range, with and without cancellation. Each token holds one such pair of columns among
// ordinary ones, because a kernel may choose its arithmetic by a look at the whole token. And sums that narrowing has to round
// near a tie, without any extremes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
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

struct Rotation {
  Case c;
  Arena arena;
  Operands a;
  Options options;

  Rotation(DType dtype, Numerics numerics, std::int64_t dim, std::uint64_t seed) {
    c.x = c.out = dtype;
    c.numerics = numerics;
    c.batch = 8;
    c.sequence = 64;
    c.heads_q = 2;
    c.dim = dim;
    c.offset_k = true;
    c.kv_output = seed / 2 % 2 == 0;  // without it, Q, K and V may have one kernel together, or K one that fuses
    c.seed = seed;
    build(c, arena, a, options);
  }
  void put(Argument argument, std::int64_t b, std::int64_t s, std::int64_t column, std::uint64_t bits) {
    const bool x = argument == Argument::x;
    put_bits(x ? element(a[argument], b, s, column) : element(a[argument], b, s, 0, column), c.x, bits);
  }
};

std::string rotate(DType dtype, Numerics numerics, std::int64_t dim, std::uint64_t seed) {
  const Format f = format_of(dtype);
  Rotation rotation(dtype, numerics, dim, seed);
  Random random(seed);
  for (std::int64_t b = 0; b < rotation.c.batch; ++b)
    for (std::int64_t s = 0; s < rotation.c.sequence; ++s) {
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
      rotation.put(Argument::x, b, s, head * dim + j, x1);
      rotation.put(Argument::x, b, s, head * dim + j + dim / 2, x2);
      if (where != 1) {
        rotation.put(Argument::cos, b, s, j, cos);
        rotation.put(Argument::sin, b, s, j, sin);
      }
      if (where != 0) {
        rotation.put(Argument::cos, b, s, j + dim / 2, sin);
        rotation.put(Argument::sin, b, s, j + dim / 2, cos);
      }
    }
  return compare(rotation.arena, rotation.a, rotation.options, seed);
}

// bfloat16 x at the ends of 2^-64..2^64 or ordinary, cos and sin anywhere or 0: a kernel that looks at its operands in order to
// choose its arithmetic has to look at each of them.
std::string rotate_window(std::int64_t dim, std::uint64_t seed) {
  const Format f = format_of(DType::bfloat16);
  Rotation rotation(DType::bfloat16, Numerics::fp32, dim, seed);
  Random random(seed);
  for (std::int64_t b = 0; b < rotation.c.batch; ++b)
    for (std::int64_t s = 0; s < rotation.c.sequence; ++s) {
      const std::int64_t head = random.below(4), half = random.below(2) * (dim / 2), j = random.below(dim / 2);
      const std::uint64_t x = number(f, random.pick({-66, -64, -63, 0, 62, 63, 65}), random);
      const auto table = [&]() -> std::uint64_t {
        if (random.chance(20)) return random.chance(50) ? 0x8000u : 0u;
        return random.chance(10) ? random.pick({0x7F80u, 0xFF80u, 0x7FC1u, 0xFFA0u})
                                 : number(f, random.pick({-130, -86, -64, -60, -47, -46, -45, 0, 45, 46, 47, 63, 65, 100}), random);
      };
      const std::uint64_t cos = table();
      rotation.put(Argument::x, b, s, head * dim + j, x);
      rotation.put(Argument::x, b, s, head * dim + j + dim / 2, random.chance(50) ? x : number(f, 0, random));
      if (random.chance(80)) rotation.put(Argument::cos, b, s, j + half, cos);
      if (random.chance(80)) rotation.put(Argument::sin, b, s, j + half, random.chance(50) ? cos ^ 1u : table());  // ^ 1: nearly cancels
    }
  return compare(rotation.arena, rotation.a, rotation.options, seed);
}

// bfloat16 sums n + h: n of eight bits, h about half a unit in its last place.
std::string rotate_ties(std::int64_t dim, std::uint64_t seed) {
  const Format f = format_of(DType::bfloat16);
  Rotation rotation(DType::bfloat16, Numerics::fp32, dim, seed);
  Random random(seed);
  const auto near = [&](int power) {  // 2^power, or one of its neighbours, with a random sign
    const std::uint64_t nudge = static_cast<std::uint64_t>(random.pick({-1, 0, 0, 1, 2}));
    return ((static_cast<std::uint64_t>(power + 127) << 7) + nudge) | (random.chance(50) ? 0x8000u : 0u);
  };
  for (std::int64_t b = 0; b < rotation.c.batch; ++b)
    for (std::int64_t s = 0; s < rotation.c.sequence; ++s)
      for (std::int64_t j = 0; j < dim / 2; ++j) {
        const int power = static_cast<int>(random.below(41)) - 20;
        rotation.put(Argument::cos, b, s, j, 0x3F80u);
        rotation.put(Argument::sin, b, s, j, near(power - 8));
        rotation.put(Argument::cos, b, s, j + dim / 2, near(power - 8));
        rotation.put(Argument::sin, b, s, j + dim / 2, 0x3F80u);
        for (std::int64_t head = 0; head < 4; ++head) {
          std::uint64_t n = number(f, power, random);
          if (random.chance(20)) n &= 0xFF80u;  // a power of two, or the last before the next one
          else if (random.chance(20)) n |= 0x007Fu;
          rotation.put(Argument::x, b, s, head * dim + j, n);
          rotation.put(Argument::x, b, s, head * dim + j + dim / 2, near(0));
        }
      }
  return compare(rotation.arena, rotation.a, rotation.options, seed);
}

// K of bfloat16 x alone, products of up to 2^129 with and without cancellation, scales for which what is left of them is a code:
// where rows are multiplied by reciprocals, only what no int32 holds tells that a product was infinite.
std::string rotate_overflowing(std::int64_t dim, std::uint64_t seed) {
  const Format f = format_of(DType::bfloat16);
  Rotation rotation(DType::bfloat16, Numerics::fp32, dim, seed);
  Random random(seed);
  const int scale_power = random.pick({0, 60, 90, 94, 95, 96, 100, 105, 107, 109, 111, 113, 118});
  for (std::int64_t j = 0; j < dim; ++j) {
    put(element(rotation.a[Argument::scale_k], 0, j), DType::float32, std::ldexp(1.25, scale_power));
    put(element(rotation.a[Argument::offset_k], 0, j), DType::float32, random.chance(50) ? -128 : 0);
  }
  for (std::int64_t b = 0; b < rotation.c.batch; ++b)
    for (std::int64_t s = 0; s < rotation.c.sequence; ++s) {
      const std::int64_t j = random.below(dim / 2), head = rotation.c.heads_q;
      std::uint64_t x1 = number(f, 127, random), cos = number(f, static_cast<int>(random.below(2)), random);
      std::uint64_t x2 = random.chance(50) ? x1 : number(f, 127, random), sin = random.chance(50) ? cos : number(f, 0, random);
      if (random.chance(50)) {  // a product of 2^128 or a little more, and one a little less
        x1 = 0x7F00u + static_cast<std::uint64_t>(random.below(3));
        cos = 0x4000u;
        x2 = 0x7F7Fu - static_cast<std::uint64_t>(random.below(3));
        sin = 0x3F80u;
        if (random.chance(50)) {  // 217 * 151 = 2^15 - 1: the least that can be left
          x1 = 0x7F00u;
          x2 = 0x7F59u;
          sin = 0x3F97u;
        }
      }
      rotation.put(Argument::x, b, s, head * dim + j, x1);
      rotation.put(Argument::x, b, s, head * dim + j + dim / 2, x2);
      const bool upper = random.chance(20);  // of the head too: one overflow would cover another one up
      rotation.put(Argument::cos, b, s, j, cos);
      rotation.put(Argument::sin, b, s, j, sin);
      rotation.put(Argument::cos, b, s, j + dim / 2, upper ? cos : 0);
      rotation.put(Argument::sin, b, s, j + dim / 2, upper ? sin : 0);
    }
  return compare(rotation.arena, rotation.a, rotation.options, seed);
}

// Q of int32 x, which is a NaN only where one operand beside x is one, or infinite: one value of `argument` in one token is.
std::string rotate_one_bad(DType out, DType bias, std::int64_t dim, Argument argument, bool infinite, std::uint64_t seed) {
  Case c;
  c.out = out;
  c.bias = bias;
  c.activation_scale = true;
  c.batch = 5;
  c.heads_q = 3;
  c.dim = dim;
  c.seed = seed;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  if (infinite)  // times 0 is NaN
    for (Argument other : {Argument::x, Argument::bias, Argument::cos, Argument::sin}) fill(a[other], 0);
  Random random(seed);
  const std::int64_t token = random.below(c.batch), column = random.below(dim), head = random.below(c.heads_q);
  const bool per_token = argument == Argument::cos || argument == Argument::sin;
  char* const place = per_token                              ? element(a[argument], token, 0, 0, column)
                      : argument == Argument::activation_scale ? element(a[argument], token)
                                                               : element(a[argument], head * dim + column);
  const DType dtype = per_token ? out : DType::float32;
  const std::uint64_t infinity = dtype == DType::float16 ? 0x7C00 : dtype == DType::bfloat16 ? 0x7F80 : 0x7F800000;
  const std::uint64_t negative_nan = dtype == DType::float16 ? 0xFE01 : dtype == DType::bfloat16 ? 0xFFC1 : 0xFFC12345;
  put_bits(place, dtype, infinite ? infinity : negative_nan);
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

TEST_CASE("rotation: bfloat16 operands at the ends of their ranges, one pair of columns a token") {
  std::uint64_t seed = 610000;
  for (std::int64_t dim : {32, 64, 128, 256, 320})
    for (int round = 0; round < 10; ++round) {
      const std::string mismatch = rotate_window(dim, seed++);
      REQUIRE_MESSAGE(mismatch.empty(), "D=" << dim << ": " << mismatch);
    }
}

TEST_CASE("rotation: bfloat16 sums at ties and next to them") {
  std::uint64_t seed = 620000;
  for (std::int64_t dim : {32, 64, 128, 192, 256, 320})
    for (int round = 0; round < 3; ++round) {
      const std::string mismatch = rotate_ties(dim, seed++);
      REQUIRE_MESSAGE(mismatch.empty(), "D=" << dim << ": " << mismatch);
    }
}

TEST_CASE("rotation: bfloat16 K whose products overflow") {
  for (std::uint64_t seed = 640000; seed < 640064; ++seed)
    for (std::int64_t dim : {32, 64, 96, 128}) {
      const std::string mismatch = rotate_overflowing(dim, seed);
      REQUIRE_MESSAGE(mismatch.empty(), "D=" << dim << ", seed " << seed << ": " << mismatch);
    }
}

TEST_CASE("rotation: int32 x, one value of another operand infinite or NaN") {
  std::uint64_t seed = 630000;
  for (DType out : {DType::float16, DType::bfloat16})
    for (DType bias : {DType::float32, DType::int32})
      for (std::int64_t dim : {32, 128})
        for (Argument argument : {Argument::weight_scale, Argument::activation_scale, Argument::bias, Argument::cos, Argument::sin})
          for (bool infinite : {false, true}) {
            if (argument == Argument::bias && bias == DType::int32) continue;
            const std::string mismatch = rotate_one_bad(out, bias, dim, argument, infinite, seed++);
            REQUIRE_MESSAGE(mismatch.empty(), name_of(out) << " D=" << dim << ", seed " << seed << ": " << mismatch);
          }
}
