// Every target against the oracle over a fixed grid: dtype pairs x head size x tokens x cache layout, the other choices drawn
// from the case's number. Whole buffers are compared, bytes that must not change included.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "cases.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Numerics;
using kvquant::Operands;
using kvquant::Options;

namespace {

struct Pair {
  DType x, out;
};
constexpr Pair kPairs[] = {{DType::int32, DType::float16},   {DType::int32, DType::bfloat16},   {DType::int32, DType::float32},
                           {DType::float16, DType::float16}, {DType::bfloat16, DType::bfloat16}, {DType::float32, DType::float32}};
constexpr std::int64_t kDims[] = {2,  4,  6,  10, 14, 16, 18,  30,  32,  34,  48,
                                  64, 66, 80, 96, 128, 130, 160, 192, 256, 512};
constexpr std::int64_t kTokens[] = {0, 1, 2, 3, 7, 8, 9, 33, 64};
constexpr DType kBiases[] = {DType::none, DType::int32, DType::float32, DType::float16, DType::bfloat16};

void split_tokens(Case& c, std::int64_t tokens, Random& random) {
  if (tokens == 0) {
    c.batch = random.chance(50) ? 0 : 2;
    c.sequence = c.batch == 0 ? 3 : 0;
  } else {
    do c.batch = 1 + random.below(tokens);
    while (tokens % c.batch != 0);
    c.sequence = tokens / c.batch;
  }
  c.three_d = tokens == 0 || random.chance(70);
  if (!c.three_d) c.batch = tokens, c.sequence = 1;
}

Case draw(Pair pair, std::int64_t dim, std::int64_t tokens, CacheLayout layout, std::uint64_t seed) {
  Random random(seed);
  Case c;
  c.x = pair.x;
  c.out = pair.out;
  c.dim = dim;
  c.cache_layout = layout;
  c.seed = seed;
  split_tokens(c, tokens, random);
  c.packed = random.chance(60);
  c.heads_q = random.below(dim > 128 ? 3 : 6);
  c.heads_kv = 1 + random.below(dim > 128 ? 2 : 4);
  c.page_rows = random.pick({1, 3, 4, 16});
  c.mode = random.chance(60) ? CacheMode::page : CacheMode::contiguous;
  c.numerics = random.chance(40) ? Numerics::ascend : Numerics::fp32;
  c.kv_output = random.chance(50);
  c.padding = random.chance(40);
  c.duplicates = random.chance(40);
  c.bias = random.pick(kBiases);
  c.index = random.chance(50) ? DType::int32 : DType::int64;
  c.activation_scale = random.chance(50);
  c.offset_k = random.chance(50);
  c.offset_v = random.chance(50);
  for (ScaleShape& shape : c.scale_shape) shape = static_cast<ScaleShape>(random.below(kScaleShapes));
  c.input_layout = static_cast<InputLayout>(random.below(kInputLayouts));
  c.output_layout = static_cast<OutputLayout>(random.below(kOutputLayouts));
  c.strided_vectors = random.chance(40);
  c.junk_unit_strides = random.chance(30);
  c.uneven = random.chance(60);
  c.misalign = random.chance(50) ? 0 : static_cast<int>(random.below(64));
  c.values = random.pick({Values::plain, Values::special, Values::ties});
  c.tables = random.pick({Case::Tables::per_token, Case::Tables::full, Case::Tables::half});
  c.position = random.chance(50) ? DType::int32 : DType::int64;
  return c;
}

// Pairs of option values that occurred, so that the grid can prove that it holds all of them.
class Coverage {
 public:
  void add(const Case& c) {
    const int v[kOptions] = {static_cast<int>(c.bias), c.offset_k, c.offset_v, c.activation_scale, static_cast<int>(c.numerics),
                             c.kv_output, static_cast<int>(c.mode), c.padding, c.duplicates, c.packed, c.three_d,
                             static_cast<int>(c.tables)};
    for (int i = 0; i < kOptions; ++i)
      for (int j = 0; j < i; ++j) seen_.insert(((i * kOptions + j) * 8 + v[i]) * 8 + v[j]);
  }
  std::size_t count() const { return seen_.size(); }
  // 10 two-valued options, tables with 3 values and bias with 5, absent or without effect for float x but still drawn.
  static std::size_t all() { return 45 * 4 + 10 * 2 * (3 + 5) + 3 * 5; }

 private:
  static constexpr int kOptions = 12;
  std::set<int> seen_;
};

}  // namespace

TEST_CASE("operator: every target equals the oracle on the grid") {
  const char* text = std::getenv("KVQUANT_TEST_EVERY");  // take every n-th case only (slow emulators)
  const int every = text != nullptr ? std::max(1, std::atoi(text)) : 1;
  int number = 0, run = 0, failed = 0;
  for (Pair pair : kPairs) {
    Coverage coverage;
    for (std::int64_t dim : kDims)
      for (std::int64_t tokens : kTokens)
        for (int layout = 0; layout < kCacheLayouts; ++layout) {
          const Case c = draw(pair, dim, tokens, static_cast<CacheLayout>(layout), static_cast<std::uint64_t>(1000 + number));
          if (number++ % every != 0) continue;
          ++run;
          coverage.add(c);
          const std::string mismatch = compare(c);
          if (!mismatch.empty() && ++failed <= 10) FAIL_CHECK(mismatch);
        }
    if (every == 1) CHECK(coverage.count() == Coverage::all());
  }
  CHECK(failed == 0);
  std::printf("operator grid: %d cases, %d failed\n", run, failed);
}

TEST_CASE("operator: any cut of the token range gives the same bytes") {
  int number = 0;
  for (Pair pair : kPairs)
    for (std::int64_t dim : {2, 30, 64, 130})
      for (std::int64_t tokens : {1, 4, 9, 33})
        for (int layout = 0; layout < kCacheLayouts; ++layout) {
          const std::string mismatch =
              compare(draw(pair, dim, tokens, static_cast<CacheLayout>(layout), static_cast<std::uint64_t>(900000 + number++)), true);
          if (!mismatch.empty()) FAIL(mismatch);
        }
}

TEST_CASE("operator: rows of 3072 columns and more, heads of more than 256") {
  std::uint64_t seed = 800000;
  for (Pair pair : kPairs)
    for (std::int64_t dim : {30, 34, 64, 130, 256, 258, 290, 320, 512, 514, 1030})
      for (std::int64_t tokens : {1, 3, 4, 5, 8, 17, 22}) {
        Case c = draw(pair, dim, tokens, static_cast<CacheLayout>(seed % kCacheLayouts), seed);
        if (seed++ % 4 != 0) c.heads_q = 3072 / dim + 1;
        const std::string mismatch = compare(c);
        if (!mismatch.empty()) FAIL(mismatch);
      }
}

// Large calls may be stored past the CPU's caches, where everything is aligned.
TEST_CASE("operator: calls of several megabytes") {
  std::uint64_t seed = 850000;
  for (Pair pair : kPairs)
    for (std::int64_t dim : {64, 128, 160})
      for (int kind = 0; kind < 3; ++kind) {
        Case c;
        c.x = pair.x;
        c.out = pair.out;
        c.dim = dim;
        c.batch = 5;
        c.sequence = 59;
        c.heads_q = 2000 / dim;
        c.heads_kv = 2;
        c.page_rows = 16;
        c.kv_output = kind > 0;
        c.padding = kind == 1;
        c.misalign = kind == 2 ? 32 : 0;
        c.bias = pair.out;
        c.cache_layout = kind == 0 ? CacheLayout::rows_interleaved : kind == 1 ? CacheLayout::head_major : CacheLayout::contiguous;
        c.output_layout = kind == 0 ? OutputLayout::fused : OutputLayout::dense;
        c.seed = seed++;
        const std::string mismatch = compare(c);
        if (!mismatch.empty()) FAIL(mismatch);
      }
}

TEST_CASE("operator: every misalignment of every operand") {
  for (Pair pair : kPairs)
    for (int misalign = 0; misalign < 64; ++misalign) {
      Case c = draw(pair, 34, 8, static_cast<CacheLayout>(misalign % kCacheLayouts), static_cast<std::uint64_t>(70000 + misalign));
      c.misalign = misalign;
      c.kv_output = true;
      const std::string mismatch = compare(c);
      if (!mismatch.empty()) FAIL(mismatch);
    }
}

TEST_CASE("operator: every scale shape on every operand") {
  std::uint64_t seed = 50000;
  for (std::int64_t heads : {1, 3})
    for (int operand = 0; operand < 4; ++operand)
      for (int shape = 0; shape < kScaleShapes; ++shape)
        for (bool strided : {false, true}) {
          Case c;
          c.heads_kv = heads;
          c.dim = 20;
          c.batch = 3;
          c.sequence = 2;
          c.offset_k = c.offset_v = true;
          c.strided_vectors = strided;
          c.scale_shape[operand] = static_cast<ScaleShape>(shape);
          c.seed = seed++;
          const std::string mismatch = compare(c);
          if (!mismatch.empty()) FAIL(mismatch);
        }
}

TEST_CASE("operator: C3, float x ignores weight_scale, activation_scale and bias") {
  for (Pair pair : {kPairs[3], kPairs[4], kPairs[5]}) {
    Case c;
    c.x = pair.x;
    c.out = pair.out;
    c.batch = 2;
    c.sequence = 3;
    Arena arena;
    Operands operands;
    Options options;
    build(c, arena, operands, options);
    for (Argument argument : {Argument::weight_scale, Argument::activation_scale, Argument::bias}) {
      operands[argument] = arena.view("ignored", DType::float64, {5}, {}, Placement::guard_back);
      operands[argument].data = static_cast<char*>(operands[argument].data) + 40;  // not readable
    }
    const std::string mismatch = compare(arena, operands, options, 1);
    CHECK_MESSAGE(mismatch.empty(), mismatch);
  }
}

TEST_CASE("operator: one plan serves calls of other sizes and other memory") {
  Case c;
  c.batch = 2;
  c.sequence = 3;
  c.dim = 34;
  c.kv_output = true;
  c.page_rows = 16;
  Arena arena;
  Operands operands;
  Options options;
  build(c, arena, operands, options);
  kvquant::Plan plan;
  REQUIRE(kvquant::make_plan(operands, options, plan).code == kvquant::Code::ok);
  CHECK(plan.batch == 2);
  CHECK(plan.sequence == 3);
  // A second call: the first batch only, its first two tokens.
  const auto before = arena.snapshot();
  Operands smaller = operands;
  for (Argument a : {Argument::x, Argument::cos, Argument::sin, Argument::q, Argument::k, Argument::v}) {
    smaller[a].shape[0] = 1;
    smaller[a].shape[1] = 2;
  }
  smaller[Argument::indices].shape[0] = 2;
  oracle::dequant_rope_quant_kvcache(smaller, options);
  const auto expected = arena.snapshot();
  arena.restore(before);
  kvquant::Call call;
  call.batch = 1;
  call.sequence = 2;
  for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = operands.view[i].data;
  const std::size_t size = kvquant::workspace_size(plan, 2);
  std::vector<char> storage(size + 64);
  char* workspace = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
  kvquant::Prepared prepared;
  REQUIRE(kvquant::prepare(plan, call, workspace, size, prepared).code == kvquant::Code::ok);
  CHECK(prepared.tokens == 2);
  kvquant::run(plan, prepared, 0, 2);
  CHECK(arena.difference(expected) == "");
}

TEST_CASE("operator: without isa the active target runs") {
  int active = -1;
  REQUIRE(kvquant::active_target(active).code == kvquant::Code::ok);
  REQUIRE(kvquant::target_missing(active) == nullptr);
  Case c;
  Arena arena;
  Operands operands;
  Options options;
  build(c, arena, operands, options);
  const std::uint64_t before = kvquant::target_rows(active);
  for (const char* isa : {static_cast<const char*>(nullptr), ""}) {
    options.isa = isa;
    CHECK(execute(operands, options).code == kvquant::Code::ok);
  }
  CHECK(kvquant::target_rows(active) - before == 4);
}

// Drives every target itself, so that it also holds when run alone.
TEST_CASE("operator: every available target has written rows") {
  CHECK(kvquant::target_count() > 0);
  CHECK(target_index("scalar") >= 0);
  CHECK(kvquant::target_missing(target_index("scalar")) == nullptr);
  Case c;
  c.batch = 3;
  CHECK(compare(c) == "");
  for (int i = 0; i < kvquant::target_count(); ++i) {
    const char* missing = kvquant::target_missing(i);
    std::printf("target %-12s %s, rows written: %llu\n", kvquant::target_name(i), missing == nullptr ? "available" : missing,
                static_cast<unsigned long long>(kvquant::target_rows(i)));
    if (missing == nullptr) CHECK(kvquant::target_rows(i) > 0);
  }
}
