// Values worked out by hand from docs/contract.md, which tempting alternatives get wrong. The literals are checked against
// the oracle as well as against every target, so that the oracle itself is not taken on trust.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cases.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::DType;
using kvquant::Numerics;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

namespace {

// One token with cos = 1, sin = 0, scales 1 and kv_output; the test then overwrites what it is about.
struct Small : Setup {
  Small(DType x, DType out, std::int64_t heads_q, std::int64_t heads_kv, std::int64_t dim) {
    Case c;
    c.x = x;
    c.out = out;
    c.heads_q = heads_q;
    c.heads_kv = heads_kv;
    c.dim = dim;
    c.kv_output = true;
    c.page_rows = 1;
    build(c, arena, a, options);
    fill(a[Argument::x], 0);
    fill(a[Argument::cos], 1);
    fill(a[Argument::sin], 0);
    if (x == DType::int32) fill(a[Argument::weight_scale], 1);
    fill(a[Argument::scale_k], 1);
    fill(a[Argument::scale_v], 1);
    fill(a[Argument::indices], 0);
  }

  void bits(Argument argument, std::vector<std::uint64_t> values) {
    const std::vector<char*> all = elements(a[argument]);
    REQUIRE(values.size() <= all.size());
    for (std::size_t i = 0; i < values.size(); ++i) put_bits(all[i], a[argument].dtype, values[i]);
  }
  void values(Argument argument, std::vector<double> values) {
    const std::vector<char*> all = elements(a[argument]);
    REQUIRE(values.size() <= all.size());
    for (std::size_t i = 0; i < values.size(); ++i) put(all[i], a[argument].dtype, values[i]);
  }

  // Runs oracle and targets, checks the first row of `argument` after each.
  void expect(Argument argument, const std::vector<std::int64_t>& expected) {
    const auto before = arena.snapshot();
    oracle::dequant_rope_quant_kvcache(a, options);
    check("oracle", argument, expected);
    for (int target : available_targets()) {
      arena.restore(before);
      options.isa = kvquant::target_name(target);
      REQUIRE(execute(a, options).code == kvquant::Code::ok);
      check(options.isa, argument, expected);
    }
    arena.restore(before);
  }

 private:
  void check(const std::string& who, Argument argument, const std::vector<std::int64_t>& expected) {
    const std::vector<char*> all = elements(a[argument]);
    REQUIRE(expected.size() <= all.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      std::int64_t got = 0;
      std::memcpy(&got, all[i], static_cast<std::size_t>(item_size(a[argument].dtype)));
      if (a[argument].dtype == DType::int8) got = static_cast<std::int8_t>(got);
      CHECK_MESSAGE(got == expected[i], who << ": " << kvquant::name(argument) << "[" << i << "]");
    }
  }
};

constexpr DType kOutputs[3] = {DType::float16, DType::bfloat16, DType::float32};

}  // namespace

TEST_CASE("contract C6: true division, not the reciprocal") {
  Small s(DType::float32, DType::float32, 1, 1, 2);
  s.bits(Argument::x, {0, 0, 0, 0, 0x41426666, 0xC1426666});
  s.bits(Argument::scale_v, {0x3DCCCCCD, 0x3DCCCCCD});
  s.expect(Argument::v_cache, {121, -121});
}

TEST_CASE("contract C4: no fused multiply-add in the rotation (F34)") {
  Small s(DType::float32, DType::float32, 1, 1, 2);
  s.bits(Argument::x, {0, 0, 0xBE039E97, 0xBF2A4A33, 0, 0});
  s.bits(Argument::cos, {0x3FAEE846, 0});
  s.bits(Argument::sin, {0x3EB3F921, 0});
  s.bits(Argument::scale_k, {0x3CBEA8E3, 0x3CBEA8E3});
  s.expect(Argument::k_cache, {2});
}

TEST_CASE("contract C4: half pairing (F17), both signs") {
  Small s(DType::float32, DType::float32, 1, 1, 4);
  s.values(Argument::x, {1, 2, 3, 4, 1, 2, 3, 4});
  fill(s.a[Argument::cos], 0);
  fill(s.a[Argument::sin], 1);
  s.expect(Argument::k_cache, {-3, -4, 1, 2});
  s.expect(Argument::q, {0xC0400000, 0xC0800000, 0x3F800000, 0x40000000});
}

TEST_CASE("contract: q, k and v are split by their own head counts (F24)") {
  Small s(DType::int32, DType::float32, 4, 1, 8);
  std::vector<double> x(48);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i);
  s.values(Argument::x, x);
  std::vector<std::int64_t> q(32);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = oracle::to_bits(static_cast<float>(i));
  s.expect(Argument::q, q);
  s.expect(Argument::k_cache, {32, 33, 34, 35, 36, 37, 38, 39});
  s.expect(Argument::v_cache, {40, 41, 42, 43, 44, 45, 46, 47});
}

TEST_CASE("contract C6: saturation at -128 and 127 (F25), out of int range (F27), NaN stores 0 (F30)") {
  Small s(DType::float32, DType::float32, 0, 1, 6);
  s.values(Argument::x, {0, 0, 0, 0, 0, 0, -129, -128, -127, 126, 127, 128});
  s.expect(Argument::v_cache, {-128, -128, -127, 126, 127, 127});
  s.bits(Argument::x, {0, 0, 0, 0, 0, 0, 0x4F32D05E, 0x4F000000, 0x7E967699, 0x7F800000, 0xCF32D05E, 0xFF800000});
  s.expect(Argument::v_cache, {127, 127, 127, 127, -128, -128});
  s.bits(Argument::x, {0x7FC00000, 0xFFC00000, 0, 0, 0, 0, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x40A00000, 0});
  s.expect(Argument::v_cache, {0, 0, 0, 0, 5, 0});
  s.expect(Argument::v, {0x7FC00000, 0x7FC00000, 0x7FC00000, 0x7FC00000, 0x40A00000, 0});
  s.expect(Argument::k_cache, {0, 0, 0, 0, 0, 0});  // NaN * 0 in the other half
  s.expect(Argument::k, {0x7FC00000, 0x7FC00000, 0, 0x7FC00000, 0x7FC00000, 0});
}

TEST_CASE("contract C6: ties go to even, after the offset") {
  Small s(DType::float32, DType::float32, 0, 1, 6);
  s.values(Argument::x, {0, 0, 0, 0, 0, 0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5});
  s.expect(Argument::v_cache, {0, 2, 2, 0, -2, -2});
  s.a[Argument::offset_v] = s.arena.view("offset_v", DType::float32, {1});
  fill(s.a[Argument::offset_v], 1);
  s.expect(Argument::v_cache, {2, 2, 4, 0, 0, -2});
  s.values(Argument::x, {0, 0, 0, 0, 0, 0, 126.5, 127.5, -129.5, -129.49999, -1.5, 1e9});
  s.expect(Argument::v_cache, {127, 127, -128, -128, 0, 127});  // 127.5 -> 128 -> 127, -128.5 -> -128
}

TEST_CASE("contract C6: negative and subnormal scales are ordinary scales") {
  Small s(DType::float32, DType::float32, 0, 1, 2);
  s.values(Argument::x, {0, 0, 3, -4});
  s.values(Argument::scale_v, {-1, -2});
  s.expect(Argument::v_cache, {-3, 2});
  s.bits(Argument::x, {0, 0, 0x00000003, 0x80000005});
  s.bits(Argument::scale_v, {0x00000001, 0x00000001});
  s.expect(Argument::v_cache, {3, -5});
  s.bits(Argument::x, {0x00012345, 0x80012345, 0x00012345, 0x80012345});
  s.bits(Argument::scale_v, {0x000116C2, 0x800116C2});  // 71362: 74565 / 71362 = 1.04
  s.expect(Argument::v_cache, {1, 1});
  s.expect(Argument::v, {0x00012345, 0x80012345});
}

TEST_CASE("contract C6: K and V are quantised from the unrounded value") {
  // 2049 is 2048 in float16 and bfloat16; minus 2040 the difference is one code.
  for (int i = 0; i < 2; ++i) {
    Small s(DType::int32, kOutputs[i], 0, 1, 2);
    s.values(Argument::x, {2049, 0, 2049, 0});
    fill(s.a[Argument::scale_k], 1);
    s.a[Argument::offset_k] = s.arena.view("offset_k", DType::float32, {1});
    s.a[Argument::offset_v] = s.arena.view("offset_v", DType::float32, {1});
    fill(s.a[Argument::offset_k], -2040);
    fill(s.a[Argument::offset_v], -2040);
    s.expect(Argument::k_cache, {9});
    s.expect(Argument::v_cache, {9});
    s.expect(Argument::k, {i == 0 ? 0x6800 : 0x4500});
  }
}

TEST_CASE("contract C7: ascend rounds dequantised q and k, products and sums to float16; V stays unrounded") {
  Small s(DType::int32, DType::float16, 1, 1, 2);
  s.options.numerics = Numerics::ascend;
  s.values(Argument::x, {2049, 0, 2049, 0, 2049, 0});
  for (Argument offset : {Argument::offset_k, Argument::offset_v}) {
    s.a[offset] = s.arena.view("offset", DType::float32, {1});
    fill(s.a[offset], -2040);
  }
  s.expect(Argument::k_cache, {8});  // from float16 2048
  s.expect(Argument::v_cache, {9});  // from 2049

  // Products: 1.0009765625^2 = 1.00195408 -> float16 1.001953125; minus 1.0009765625 -> 0.0009765625 (unrounded 0.00097752).
  Small p(DType::int32, DType::float16, 1, 1, 2);
  p.options.numerics = Numerics::ascend;
  p.values(Argument::x, {1025, 1024});
  fill(p.a[Argument::weight_scale], 1.0 / 1024);
  p.bits(Argument::cos, {0x3C01, 0x0000});
  p.bits(Argument::sin, {0x3C01, 0x0000});
  p.expect(Argument::q, {0x1400});
  p.options.numerics = Numerics::fp32;
  p.expect(Argument::q, {0x1401});  // 0.00097752 = 2^-10 * 1.00098
}

TEST_CASE("contract C5: narrowing rounds to even with carry (F37, F39, F41), keeps subnormals, overflows to infinity") {
  struct Row {
    std::uint32_t value;
    std::int64_t half, bfloat;
  };
  const Row rows[] = {
      {0x3E89CCD5, 0x344E, 0x3E8A}, {0x3F801800, 0x3C01, 0x3F80}, {0x3EFFFEB0, 0x3800, 0x3F00}, {0x3F7FFF58, 0x3C00, 0x3F80},
      {0x3F800000, 0x3C00, 0x3F80}, {0x477FEFFF, 0x7BFF, 0x4780}, {0x477FF000, 0x7C00, 0x4780}, {0xC77FF000, 0xFC00, 0xC780},
      {0x33000000, 0x0000, 0x3300}, {0x33000001, 0x0001, 0x3300}, {0x33C00000, 0x0002, 0x33C0}, {0x387FF000, 0x0400, 0x3880},
      {0x7F7F7FFF, 0x7C00, 0x7F7F}, {0x7F7F8000, 0x7C00, 0x7F80}, {0xFF7FFFFF, 0xFC00, 0xFF80}, {0x00008000, 0x0000, 0x0000},
      {0x00008001, 0x0000, 0x0001}, {0x80018000, 0x8000, 0x8002}, {0x80000000, 0x8000, 0x8000}, {0x7F800000, 0x7C00, 0x7F80},
      {0xFF800000, 0xFC00, 0xFF80}, {0xFFC00000, 0x7E00, 0x7FC0}, {0x7F800001, 0x7E00, 0x7FC0}, {0x7FFFFFFF, 0x7E00, 0x7FC0},
  };
  for (int i = 0; i < 3; ++i)
    for (const Row& row : rows) {
      Small s(DType::int32, kOutputs[i], 0, 1, 2);
      fill(s.a[Argument::weight_scale], -1);  // 0 * -1 = -0, which any bias added to leaves as it is
      s.a[Argument::bias] = s.arena.view("bias", DType::float32, {4});
      s.bits(Argument::bias, {0, 0, row.value, 0});
      const bool nan = (row.value & 0x7FFFFFFFu) > 0x7F800000u;
      s.expect(Argument::v, {i == 0 ? row.half : i == 1 ? row.bfloat : nan ? 0x7FC00000 : static_cast<std::int64_t>(row.value)});
    }
}

TEST_CASE("contract C4, C5: bfloat16 rotation overflows where two roundings do; inf * 0 is the positive quiet NaN") {
  Small s(DType::bfloat16, DType::bfloat16, 1, 1, 2);
  s.bits(Argument::x, {0x7F00, 0x7F00});  // 2^127
  s.bits(Argument::cos, {0x4000, 0});
  s.bits(Argument::sin, {0x3F80, 0});
  s.expect(Argument::q, {0x7F80});
  const std::int64_t nan[3] = {0x7E00, 0x7FC0, 0x7FC00000};
  const std::uint64_t infinity[3] = {0x7C00, 0x7F80, 0x7F800000};
  for (int i = 0; i < 3; ++i) {
    Small n(kOutputs[i], kOutputs[i], 1, 1, 2);
    n.bits(Argument::x, {infinity[i], 0});
    fill(n.a[Argument::cos], 0);
    n.expect(Argument::q, {nan[i]});
  }
}

TEST_CASE("contract C2: int32 bias wraps, int32 is rounded to float32 once, the order of the factors is fixed") {
  Small s(DType::int32, DType::float32, 0, 1, 2);
  s.a[Argument::bias] = s.arena.view("bias", DType::int32, {4});
  s.values(Argument::bias, {0, 0, 1, -1});
  s.values(Argument::x, {0, 0, 2147483647, -2147483648.0});
  s.expect(Argument::v, {0xCF000000, 0x4F000000});
  s.values(Argument::bias, {0, 0, 0, 0});
  s.values(Argument::x, {0, 0, 16777217, 16777219});
  s.expect(Argument::v, {0x4B800000, 0x4B800002});

  // (3e38 * 10) * 0.1 overflows before the activation scale; the float bias is added last.
  Small f(DType::int32, DType::float32, 0, 1, 2);
  f.values(Argument::x, {0, 0, 10, 10});
  f.values(Argument::weight_scale, {1, 1, 3e38, 1e10});
  f.a[Argument::activation_scale] = f.arena.view("activation_scale", DType::float32, {1});
  f.values(Argument::activation_scale, {0.5});
  f.a[Argument::bias] = f.arena.view("bias", DType::float16, {4});
  f.values(Argument::bias, {0, 0, 1, 1});
  f.expect(Argument::v, {0x7F800000, 0x513A43B7});
}

TEST_CASE("contract I2: the last duplicate wins; I3: padding is rotated but not cached") {
  Case c;
  c.x = c.out = DType::float32;
  c.batch = 4;
  c.dim = 2;
  c.page_rows = 2;
  c.kv_output = true;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  fill(a[Argument::cos], 1);
  fill(a[Argument::sin], 0);
  fill(a[Argument::scale_k], 1);
  fill(a[Argument::scale_v], 1);
  for (std::int64_t t = 0; t < 4; ++t)
    for (std::int64_t h = 0; h < 6; ++h) put(element(a[Argument::x], t, 0, h), DType::float32, static_cast<double>(10 * t + h));
  const std::int64_t indices[4] = {2, 1, -1, 2};
  for (std::int64_t t = 0; t < 4; ++t) put_bits(element(a[Argument::indices], t), c.index, static_cast<std::uint64_t>(indices[t]));
  options.allow_duplicates = options.skip_padding = true;
  const auto before = arena.snapshot();
  for (int target = -1; target < kvquant::target_count(); ++target) {
    arena.restore(before);
    if (target < 0) {
      oracle::dequant_rope_quant_kvcache(a, options);
    } else {
      if (kvquant::target_missing(target) != nullptr) continue;
      options.isa = kvquant::target_name(target);
      REQUIRE(execute(a, options).code == kvquant::Code::ok);
    }
    CHECK(*element(a[Argument::k_cache], 1, 0, 0, 0) == 32);  // row 2: token 3
    CHECK(*element(a[Argument::v_cache], 1, 0, 0, 1) == 35);
    CHECK(*element(a[Argument::k_cache], 0, 1, 0, 1) == 13);  // row 1: token 1
    CHECK(static_cast<unsigned char>(*element(a[Argument::k_cache], 0, 0)) == 0xA7);  // row 0: untouched
    CHECK(static_cast<unsigned char>(*element(a[Argument::v_cache], 1, 1, 0, 1)) == 0xA7);
    float k = 0;
    std::memcpy(&k, element(a[Argument::k], 2, 0, 0, 1), sizeof k);  // padding token 2
    CHECK(k == 23.0f);
  }
}
