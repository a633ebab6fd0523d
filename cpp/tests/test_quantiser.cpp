// The quantiser of every target where a quotient that is one float32 step off would show: next to rounding ties, over scales
// of every magnitude and significand (R4). A kernel may multiply by the reciprocal only where that gives the same code.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cases.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::Code;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;

namespace {

enum class Offsets { none, halves, any };
enum class Scales { usual, all };  // 2^-10..2^0, every exponent for which no value overflows

std::uint32_t draw_scale(Scales scales, Random& random) {
  const std::int64_t low = scales == Scales::usual ? 117 : 0, high = scales == Scales::usual ? 127 : 245;
  const auto field = static_cast<std::uint32_t>(low + random.below(high - low));
  return static_cast<std::uint32_t>(random.bits() & 0x807FFFFFu) | (field << 23) | 1u;
}

// 512 scales x 256 codes x {tie, one and two steps beside it}, for K and V.
std::string ties(Scales scales, Offsets offsets, std::uint64_t seed) {
  constexpr std::int64_t kSteps = 256, kNudges = 5;
  Random random(seed);
  Case c;
  c.x = c.out = DType::float32;
  c.batch = kSteps;
  c.sequence = kNudges;
  c.heads_q = 0;
  c.dim = 512;
  c.offset_k = c.offset_v = offsets != Offsets::none;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  fill(a[Argument::cos], 1);
  fill(a[Argument::sin], 0);
  for (std::int64_t d = 0; d < c.dim; ++d) {
    const std::uint32_t bits = draw_scale(scales, random);
    const float scale = oracle::from_bits(bits);
    const float offset = offsets == Offsets::none     ? 0.0f
                         : offsets == Offsets::halves ? static_cast<float>(random.below(13) - 6) * 0.5f
                                                      : random.uniform(-100.0f, 100.0f);
    put_bits(element(a[Argument::scale_k], 0, d), DType::float32, bits);
    put_bits(element(a[Argument::scale_v], 0, d), DType::float32, bits);
    if (c.offset_k) put(element(a[Argument::offset_k], 0, d), DType::float32, static_cast<double>(offset));
    if (c.offset_v) put(element(a[Argument::offset_v], 0, d), DType::float32, static_cast<double>(offset));
    for (std::int64_t step = 0; step < kSteps; ++step)
      for (std::int64_t nudge = 0; nudge < kNudges; ++nudge) {
        const float tie = (static_cast<float>(step - 128) + 0.5f - offset) * scale;
        const std::uint64_t value = oracle::to_bits(tie) + static_cast<std::uint32_t>(nudge - 2);
        put_bits(element(a[Argument::x], step, nudge, d), DType::float32, value);
        put_bits(element(a[Argument::x], step, nudge, c.dim + d), DType::float32, value);
      }
  }
  const std::string mismatch = compare(arena, a, options, 0);  // even seeds: reciprocals; odd ones: divisions
  return mismatch.empty() ? compare(arena, a, options, 1) : mismatch;
}

// One value in each head within 6e-5 codes of a tie, all others far from one: where a kernel multiplies by the reciprocal, nothing
// but the guard's own width makes it divide. The error is greatest where code and offset are far apart.
std::string lonely(float largest_offset, std::uint64_t seed) {
  Random random(seed);
  Case c;
  c.x = c.out = DType::float32;
  c.batch = 1024;
  c.heads_q = 0;
  c.heads_kv = 4;
  c.dim = 128;
  c.page_rows = c.batch;
  c.offset_k = c.offset_v = true;
  Arena arena;
  Operands a;
  Options options;
  build(c, arena, a, options);
  fill(a[Argument::x], 0);
  fill(a[Argument::cos], 1);
  fill(a[Argument::sin], 0);
  const std::int64_t columns = c.heads_kv * c.dim;
  const double limit = static_cast<double>(largest_offset);
  std::vector<double> scales, offsets;
  for (std::int64_t i = 0; i < columns; ++i) {
    const std::uint32_t bits = draw_scale(Scales::usual, random);
    scales.push_back(static_cast<double>(oracle::from_bits(bits)));
    offsets.push_back(random.chance(50) ? limit : -limit);
    const auto at = [&](Argument argument) { return element(a[argument], i / c.dim, i % c.dim); };
    for (Argument argument : {Argument::scale_k, Argument::scale_v}) put_bits(at(argument), DType::float32, bits);
    for (Argument argument : {Argument::offset_k, Argument::offset_v}) put(at(argument), DType::float32, offsets.back());
  }
  for (std::int64_t t = 0; t < c.batch; ++t)
    for (std::int64_t head = 0; head < 2 * c.heads_kv; ++head) {
      const std::int64_t column = random.below(c.dim);
      const auto i = static_cast<std::size_t>(head % c.heads_kv * c.dim + column);
      const double code = (static_cast<double>(random.below(64)) + 64.5) * (offsets[i] > 0 ? -1 : 1);
      const double away = static_cast<double>(random.uniform(-6e-5f, 6e-5f));
      put(element(a[Argument::x], t, 0, head * c.dim + column), DType::float32, (code + away - offsets[i]) * scales[i]);
    }
  return compare(arena, a, options, 0);
}

// V of one token, 65536 columns with a scale each: the scales' significands are first, first + step, ... (modulo 2^23), the
// values lie `nudge` float32 steps beside (code + 1/2) * scale.
class Significands {
 public:
  explicit Significands(int target) {
    Case c;
    c.bias = DType::float32;
    c.heads_q = 0;
    c.heads_kv = 128;
    c.dim = 512;
    c.page_rows = 1;
    build(c, arena_, a_, options_);
    options_.isa = kvquant::target_name(target);
    fill(a_[Argument::weight_scale], -1);
    fill(a_[Argument::x], 0);
    fill(a_[Argument::bias], 0);
    fill(a_[Argument::indices], 0);
  }

  std::int64_t batch(std::uint32_t first, std::uint32_t step, std::uint32_t exponent_field, int code, int nudge) {
    char* const scales = element(a_[Argument::scale_v]);
    char* const values = element(a_[Argument::bias], kColumns);
    std::vector<std::int8_t> expected(kColumns);
    for (std::uint32_t i = 0; i < kColumns; ++i) {
      const std::uint32_t scale = (exponent_field << 23) | ((first + i * step) & 0x7FFFFFu);
      const float tie = (static_cast<float>(code) + 0.5f) * oracle::from_bits(scale);
      const std::uint32_t value = oracle::to_bits(tie) + static_cast<std::uint32_t>(nudge);
      put_bits(scales + 4 * i, DType::float32, scale);
      put_bits(values + 4 * i, DType::float32, value);
      expected[i] = oracle::quantize(oracle::from_bits(value), oracle::from_bits(scale), 0.0f);
    }
    REQUIRE(execute(a_, options_).code == Code::ok);
    const auto* const row = reinterpret_cast<const std::int8_t*>(element(a_[Argument::v_cache]));
    std::int64_t differing = 0;
    for (std::uint32_t i = 0; i < kColumns; ++i)
      if (row[i] != expected[i] && differing++ == 0)
        MESSAGE(options_.isa << ": scale significand " << ((first + i * step) & 0x7FFFFFu) << ", code " << code << ", nudge " << nudge
                             << ": got " << static_cast<int>(row[i]) << ", expected " << static_cast<int>(expected[i]));
    return differing;
  }

  static constexpr std::uint32_t kColumns = 65536;

 private:
  Arena arena_;
  Operands a_;
  Options options_;
};

void all_significands(const std::vector<int>& codes, std::uint32_t step) {
  const std::uint32_t batches = (1u << 23) / step / Significands::kColumns;
  for (int target : available_targets()) {
    Significands significands(target);
    std::int64_t differing = 0;
    for (int code : codes)
      for (int nudge = -2; nudge <= 2; ++nudge)
        for (std::uint32_t b = 0; b < batches; ++b)
          differing += significands.batch(b * Significands::kColumns * step + static_cast<std::uint32_t>(code + 128) % step, step, 123, code, nudge);
    CHECK_MESSAGE(differing == 0, kvquant::target_name(target));
  }
}

// x with b * x = 1 modulo 2^25, for odd b (Newton: each step doubles the number of correct bits).
std::uint64_t inverse(std::uint64_t b) {
  std::uint64_t x = b;
  for (int i = 0; i < 5; ++i) x *= 2 - b * x;
  return x & ((1u << 25) - 1);
}

// The hardest divisions: value / scale lies 2^-24 steps beside the middle m/2 between two float32 quotients, m odd. From
// b*m = 1 (or -1) modulo 2^25 follows (b*m -+ 1) / 2^25 = a with a/b = (m -+ 1/b) / 2^25. An offset then puts the right
// quotient on a rounding tie, so that the wrong one gives another code.
std::string hardest(std::uint64_t seed) {
  Case c;
  c.bias = DType::float32;
  c.heads_q = 0;
  c.heads_kv = 128;
  c.dim = 512;
  c.page_rows = 1;
  c.offset_k = c.offset_v = true;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  fill(a[Argument::weight_scale], -1);
  fill(a[Argument::x], 0);
  fill(a[Argument::cos], 1);
  fill(a[Argument::sin], 0);
  Random random(seed);
  for (std::int64_t i = 0; i < 65536; ++i) {
    std::uint64_t b = 0, m = 0;
    const bool below = random.chance(50);
    while ((m >> 24) == 0 || ((b * m) >> 48) == 0) {  // until m has 25 bits and the value 24
      b = static_cast<std::uint64_t>(random.below(1 << 23)) | (1u << 23) | 1u;
      m = inverse(b);
      if (!below) m = (1u << 25) - m;
    }
    const std::uint64_t value = (below ? b * m - 1 : b * m + 1) >> 25, quotient = below ? (m - 1) / 2 : (m + 1) / 2;
    // Scaled so that the quotient, in [2^23, 2^24], lies in [64, 128].
    const double scale = static_cast<double>(b) * 0x1p-28, exact = static_cast<double>(quotient) * 0x1p-17;
    double code = static_cast<double>(static_cast<int>(exact));
    if ((static_cast<int>(code) % 2 == 0) != below) code -= 1;  // even: one step up changes the code; odd: one step down
    for (Argument argument : {Argument::scale_k, Argument::scale_v}) put(element(a[argument], i / 512, i % 512), DType::float32, scale);
    for (Argument argument : {Argument::offset_k, Argument::offset_v})
      put(element(a[argument], i / 512, i % 512), DType::float32, code + 0.5 - exact);
    for (std::int64_t part = 0; part < 2; ++part)
      put(element(a[Argument::bias], part * 65536 + i), DType::float32, static_cast<double>(value) * 0x1p-21);
  }
  return compare(arena, a, options, seed);
}

}  // namespace

TEST_CASE("quantiser: ties and one and two float32 steps beside them") {
  std::uint64_t seed = 12;
  for (Scales scales : {Scales::usual, Scales::all})
    for (Offsets offsets : {Offsets::none, Offsets::halves, Offsets::any}) {
      const std::string mismatch = ties(scales, offsets, seed++);
      CHECK_MESSAGE(mismatch.empty(), "scales " << static_cast<int>(scales) << ", offsets " << static_cast<int>(offsets) << ": " << mismatch);
    }
}

TEST_CASE("quantiser: one value near a tie among others that are not") {
  for (float largest_offset : {0.0f, 127.0f, 128.0f, 129.0f, 600.0f, 4000.0f})
    for (std::uint64_t seed = 0; seed < 2; ++seed) {
      const std::string mismatch = lonely(largest_offset, seed);
      CHECK_MESSAGE(mismatch.empty(), "offset " << largest_offset << ": " << mismatch);
    }
}

TEST_CASE("quantiser: the hardest quotients") {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const std::string mismatch = hardest(seed);
    CHECK_MESSAGE(mismatch.empty(), mismatch);
  }
}

TEST_CASE("quantiser: one column decides for its own scale, whatever its neighbours' are") {
  for (std::uint32_t odd_one : {0x00000001u, 0x807FFFFFu, 0x00800000u, 0x43000000u, 0xC3000001u, 0x7E7FFFFFu, 0x7E800000u, 0x7F7FFFFFu})
    for (Argument argument : {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v})
      for (std::int64_t column : {0, 95, 191}) {
        Case c;
        c.x = c.out = DType::float32;
        c.dim = 192;
        c.batch = 5;
        c.offset_k = c.offset_v = true;
        c.values = Values::ties;
        c.seed = odd_one;
        Setup setup(c);
        auto& [arena, a, options] = setup;
        put_bits(element(a[argument], 0, column), DType::float32, odd_one);
        const std::string mismatch = compare(arena, a, options, 0);
        CHECK_MESSAGE(mismatch.empty(), kvquant::name(argument) << ": " << mismatch);
      }
}

TEST_CASE("quantiser: significands of the scale, every 32nd") { all_significands({-128, -97, -3, -1, 0, 2, 42, 126}, 32); }

// Before a release: kvquant_tests --no-skip --test-case="quantiser: all significands*"
TEST_CASE("quantiser: all significands of the scale x all codes" * doctest::skip()) {
  std::vector<int> codes;
  for (int code = -129; code < 128; ++code) codes.push_back(code);
  all_significands(codes, 1);
}
