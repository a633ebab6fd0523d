// Conversions of every target, over all inputs or over all ties, through the public API (R3).
// Values reach a kernel unchanged as float32 bias: x = 0, weight_scale = -1, so that 0 * -1 + bias = -0 + bias = bias.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
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

namespace {

constexpr std::int64_t kHeads = 128, kDim = 512;  // K and V hold 65536 values each in one token
constexpr std::uint32_t kBatch = 65536;
constexpr DType kOutputs[3] = {DType::float16, DType::bfloat16, DType::float32};

// One token whose K and V are `kBatch` columns, cos = 1, sin = 0, kv_output.
struct Wide : Setup {
  Wide(DType x, DType out, DType bias) {
    Case c;
    c.x = x;
    c.out = out;
    c.bias = bias;
    c.heads_kv = kHeads;
    c.dim = kDim;
    c.kv_output = true;
    c.page_rows = 1;
    build(c, arena, a, options);
    fill(a[Argument::cos], 1);
    fill(a[Argument::sin], 0);
    if (x == DType::int32) fill(a[Argument::weight_scale], -1);
    if (bias != DType::none) fill(a[Argument::x], 0);
  }

  // Puts value(i) into column i of K and of V.
  void columns(Argument argument, const std::function<std::uint32_t(std::uint32_t)>& value) {
    const kvquant::View& view = a[argument];
    for (std::uint32_t i = 0; i < kBatch; ++i)
      for (std::int64_t part = 0; part < 2; ++part) {
        const std::int64_t column = kDim + part * kBatch + i;
        put_bits(view.ndim == 1 ? element(view, column) : element(view, 0, 0, column), view.dtype, value(i));
      }
  }

  void check(const std::string& what) {
    const std::string mismatch = compare(arena, a, options, 0);
    CHECK_MESSAGE(mismatch.empty(), what << ": " << mismatch);
  }
};

std::uint32_t midpoint(std::uint16_t bits, bool half) {  // half way from a finite value to the next in magnitude
  if (!half) return (static_cast<std::uint32_t>(bits) << 16) + 0x8000u;
  const float low = oracle::from_float16(bits), high = oracle::from_float16(static_cast<std::uint16_t>(bits + 1));
  const float sum = std::isinf(high) ? std::copysign(65520.0f, low) : (low + high) * 0.5f;  // exact in float32
  return oracle::to_bits(sum);
}

}  // namespace

TEST_CASE("conversions: float32 to float16 and bfloat16 at every tie and its neighbours") {
  for (bool half : {true, false})
    for (Numerics numerics : {Numerics::fp32, Numerics::ascend}) {
      Wide wide(DType::int32, half ? DType::float16 : DType::bfloat16, DType::float32);
      wide.options.numerics = numerics;
      const std::uint32_t infinity = half ? 0x7C00u : 0x7F80u;
      for (int nudge = -2; nudge <= 3; ++nudge) {
        wide.columns(Argument::bias, [&](std::uint32_t i) -> std::uint32_t {
          const std::uint16_t bits = static_cast<std::uint16_t>(i);
          if ((bits & 0x7FFFu) >= infinity || nudge == 3)  // the value itself; infinity and NaN
            return oracle::to_bits(half ? oracle::from_float16(bits) : oracle::from_bfloat16(bits));
          return midpoint(bits, half) + static_cast<std::uint32_t>(nudge);
        });
        wide.check((half ? "float16 tie " : "bfloat16 tie ") + std::to_string(nudge));
      }
    }
}

TEST_CASE("conversions: all 65536 float16 and bfloat16 values of x") {
  Random random(11);
  for (int kind = 0; kind < 2; ++kind)
    for (Numerics numerics : {Numerics::fp32, Numerics::ascend})
      for (bool rotate : {false, true}) {
        Wide wide(kOutputs[kind], kOutputs[kind], DType::none);
        wide.options.numerics = numerics;
        wide.columns(Argument::x, [](std::uint32_t i) { return i; });
        if (rotate) {
          fill_floats(wide.a[Argument::cos], Values::plain, 1, random);
          fill_floats(wide.a[Argument::sin], Values::plain, 1, random);
        }
        wide.check(name_of(kOutputs[kind]));
      }
}

TEST_CASE("conversions: all 65536 float16 and bfloat16 values of bias, seen as float32") {
  for (int kind = 0; kind < 2; ++kind) {
    Wide wide(DType::int32, DType::float32, kOutputs[kind]);
    wide.columns(Argument::bias, [](std::uint32_t i) { return i; });
    wide.check(name_of(kOutputs[kind]));
  }
}

TEST_CASE("conversions: all 65536 float16 and bfloat16 values of x, cos and sin, through q") {
  for (int kind = 0; kind < 2; ++kind)
    for (Argument argument : {Argument::x, Argument::cos, Argument::sin}) {
      Case c;
      c.x = c.out = kOutputs[kind];
      c.batch = 16;
      c.sequence = 8;
      c.dim = kDim;
      Setup setup(c);
      auto& [arena, a, options] = setup;
      fill(a[Argument::cos], argument == Argument::x ? 1 : 0);
      fill(a[Argument::sin], 0);
      if (argument != Argument::x) fill(a[Argument::x], 1);
      for (std::int64_t t = 0; t < 128; ++t)
        for (std::int64_t d = 0; d < kDim; ++d) {
          const auto bits = static_cast<std::uint64_t>(t * kDim + d);
          put_bits(argument == Argument::x ? element(a[argument], t / 8, t % 8, d) : element(a[argument], t / 8, t % 8, 0, d), c.x, bits);
        }
      const std::string mismatch = compare(arena, a, options, 0);
      CHECK_MESSAGE(mismatch.empty(), name_of(c.x) << " " << kvquant::name(argument) << ": " << mismatch);
    }
}

namespace {

// Calls of one output type fed with batch after batch; V and the V cache row of every target against the oracle's functions.
class Sweep {
 public:
  Sweep(DType out, bool integers, float scale)
      : wide_(DType::int32, out, integers ? DType::none : DType::float32), out_(out), integers_(integers), scale_(scale) {
    if (integers) fill(wide_.a[Argument::weight_scale], 1);
    fill(wide_.a[Argument::scale_v], static_cast<double>(scale));
    fill(wide_.a[Argument::indices], 0);
    fill(wide_.a[Argument::x], 0);
  }

  // Values first, first + step, ... (modulo 2^32), as float32 bits or as int32. Whether every target gave the right bytes.
  bool batch(std::uint32_t first, std::uint32_t step) {
    char* source = integers_ ? element(wide_.a[Argument::x], 0, 0, kDim + kBatch) : element(wide_.a[Argument::bias], kDim + kBatch);
    const std::size_t size = static_cast<std::size_t>(item_size(out_));
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      const std::uint32_t bits = first + i * step;
      std::memcpy(source + 4 * i, &bits, 4);
      const float value = integers_ ? oracle::from_int32(static_cast<std::int32_t>(bits)) : oracle::from_bits(bits);
      std::uint32_t expected = std::isnan(value) ? 0x7FC00000u : oracle::to_bits(value);
      if (out_ == DType::float16) expected = oracle::to_float16(value);
      if (out_ == DType::bfloat16) expected = oracle::to_bfloat16(value);
      std::memcpy(values_.data() + i * size, &expected, size);
      codes_[i] = static_cast<char>(oracle::quantize(value, scale_, 0.0f));
    }
    bool right = true;
    for (int target : targets_) {
      wide_.options.isa = kvquant::target_name(target);
      REQUIRE(execute(wide_.a, wide_.options).code == kvquant::Code::ok);
      const char* v = static_cast<const char*>(wide_.a[Argument::v].data);
      const char* row = static_cast<const char*>(wide_.a[Argument::v_cache].data);
      if (std::memcmp(v, values_.data(), kBatch * size) == 0 && std::memcmp(row, codes_.data(), kBatch) == 0) continue;
      right = false;
      std::uint32_t i = 0;
      while (std::memcmp(v + i * size, values_.data() + i * size, size) == 0 && row[i] == codes_[i]) ++i;
      FAIL_CHECK(wide_.options.isa << " " << name_of(out_) << " input " << first + i * step << ", scale " << scale_ << ": code "
                                   << static_cast<int>(row[i]) << ", expected " << static_cast<int>(codes_[i]));
    }
    return right;
  }

 private:
  Wide wide_;
  DType out_;
  bool integers_;
  float scale_;
  std::vector<int> targets_ = available_targets();
  std::vector<char> values_ = std::vector<char>(4 * kBatch), codes_ = std::vector<char>(kBatch);
};

void sweep_all(std::uint32_t step, int first_kind = 0, int last_kind = 9) {
  const float scales[] = {oracle::from_bits(1), 0x1p-126f, 1.0f / 127.0f, 0.1f, 1.0f, 3.0f, 0x1p127f};
  const std::uint64_t batches = ((std::uint64_t{1} << 32) / step + kBatch - 1) / kBatch;
  for (int kind = first_kind; kind <= last_kind; ++kind) {  // 3 outputs with scale 1, the 6 other scales, int32
    const bool integers = kind == 9;
    const DType out = kind < 3 ? kOutputs[kind] : DType::float32;
    const float scale = kind < 3 || integers ? 1.0f : scales[kind < 7 ? kind - 3 : kind - 2];
    Sweep sweep(out, integers, scale);
    bool right = true;
    for (std::uint64_t b = 0; b < batches && right; ++b) right = sweep.batch(static_cast<std::uint32_t>(b * kBatch * step), step);
    CHECK(right);
    const std::string what = std::string(integers ? "all int32" : "all float32") + " -> " + name_of(out) + ", scale ";
    if (step == 1) MESSAGE(what << scale << (right ? ": right" : ": wrong"));
  }
}

}  // namespace

TEST_CASE("conversions: every 4093rd float32 and int32") { sweep_all(4093); }

// Before a release: kvquant_tests --no-skip --test-case="conversions: all 2^32*". Ten sweeps of a few minutes;
// KVQUANT_TEST_TARGET=avx2 names one target.
TEST_CASE("conversions: all 2^32 float32 narrowed" * doctest::skip()) { sweep_all(1, 0, 2); }
TEST_CASE("conversions: all 2^32 float32 quantised by the other scales" * doctest::skip()) { sweep_all(1, 3, 8); }
TEST_CASE("conversions: all 2^32 int32" * doctest::skip()) { sweep_all(1, 9, 9); }
