// Every target against the oracle over the grid of tests/grid.txt, which the Python tests run too, and over drawn calls where that
// does not reach. Whole buffers are compared, bytes that must not change included.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cases.hpp"
#include "compared.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Numerics;
using kvquant::Operands;
using kvquant::Options;

namespace {

Case draw(Pair pair, std::int64_t dim, std::int64_t tokens, CacheLayout layout, std::uint64_t seed) {
  Random random(seed);
  Case c;
  c.x = pair.x;
  c.out = pair.out;
  c.dim = dim;
  c.cache_layout = layout;
  c.seed = seed;
  do c.batch = 1 + random.below(tokens);
  while (tokens % c.batch != 0);
  c.sequence = tokens / c.batch;
  c.three_d = random.chance(70);
  if (!c.three_d) c.batch = tokens, c.sequence = 1;
  c.heads_q = random.below(dim > 128 ? 3 : 6);
  c.heads_kv = 1 + random.below(dim > 128 ? 2 : 4);
  draw_choices(c, random);
  c.misalign = random.chance(50) ? 0 : static_cast<int>(random.below(64));
  c.values = random.pick({Values::plain, Values::special, Values::ties});
  return c;
}

// A column of the grid as its file must state it, and what its n-th value means here.
struct Column {
  const char* text;
  void (*set)(Case&, int);
};
constexpr std::int64_t kHeads[][2] = {{1, 1}, {4, 1}, {3, 2}, {0, 1}, {2, 3}, {5, 4}, {0, 2}};
constexpr std::int64_t kPageRows[] = {1, 2, 3, 4, 5, 16};
constexpr OutputLayout kOutputs[] = {OutputLayout::dense,  OutputLayout::dense,      OutputLayout::dense,
                                     OutputLayout::padded, OutputLayout::head_major, OutputLayout::fused};
template <int operand>
void set_scale_shape(Case& c, int i) { c.scale_shape[operand] = static_cast<ScaleShape>(i); }

const Column kColumns[] = {
    {"rank 2 3", [](Case& c, int i) { c.three_d = i == 1; }},
    {"heads 1x1 4x1 3x2 0x1 2x3 5x4 0x2", [](Case& c, int i) { c.heads_q = kHeads[i][0], c.heads_kv = kHeads[i][1]; }},
    {"cache_mode contiguous page", [](Case& c, int i) { c.mode = static_cast<CacheMode>(i); }},
    {"layout contiguous interleaved rows_interleaved side_by_side head_major padded_page reversed",
     [](Case& c, int i) { c.cache_layout = static_cast<CacheLayout>(i); }},
    {"index_type int32 int64", [](Case& c, int i) { c.index = i == 0 ? DType::int32 : DType::int64; }},
    {"tables per_token full half", [](Case& c, int i) { c.tables = static_cast<Case::Tables>(i); }},
    {"padding no yes", [](Case& c, int i) { c.padding = i == 1; }},
    {"duplicates no yes", [](Case& c, int i) { c.duplicates = i == 1; }},
    {"bias none int32 float32 float16 bfloat16", [](Case& c, int i) { c.bias = kBiases[i]; }},
    {"activation_scale no yes", [](Case& c, int i) { c.activation_scale = i == 1; }},
    {"offsets none k v both", [](Case& c, int i) { c.offset_k = (i & 1) != 0, c.offset_v = (i & 2) != 0; }},
    {"numerics fp32 ascend", [](Case& c, int i) { c.numerics = static_cast<Numerics>(i); }},
    {"kv_output no yes", [](Case& c, int i) { c.kv_output = i == 1; }},
    {"out none contiguous some padded head_major fused", [](Case& c, int i) { c.output_layout = kOutputs[i]; }},
    {"inputs dense padded transposed reversed shared", [](Case& c, int i) { c.input_layout = static_cast<InputLayout>(i); }},
    {"vectors dense padded reversed", [](Case& c, int i) { c.strided_vectors = i > 0; }},
    {"odd no yes", [](Case& c, int i) {
       c.junk_unit_strides = i == 1;
       c.misalign = i == 0 ? 0 : 1 + static_cast<int>(c.seed % 63);
     }},
    {"data plain special ties", [](Case& c, int i) { c.values = static_cast<Values>(i); }},
    {"num_threads none 1 2", [](Case&, int) {}},
    {"shape_of_scale_k heads_dim flat per_head one scalar", set_scale_shape<0>},
    {"shape_of_scale_v heads_dim flat per_head one scalar", set_scale_shape<1>},
    {"shape_of_offset_k heads_dim flat per_head one scalar", set_scale_shape<2>},
    {"shape_of_offset_v heads_dim flat per_head one scalar", set_scale_shape<3>},
    {"page_rows 1 2 3 4 5 16", [](Case& c, int i) { c.page_rows = kPageRows[i]; }},
    {"position_type int32 int64", [](Case& c, int i) { c.position = i == 0 ? DType::int32 : DType::int64; }},
    {"sources packed three", [](Case& c, int i) { c.packed = i == 0; }},
    {"uneven no yes", [](Case& c, int i) { c.uneven = i == 1; }},
};

// The rows of the grid, numbered by their seeds; each is a call for every pair of types.
std::vector<Case> read_grid() {
  std::ifstream file(KVQUANT_GRID_FILE);
  std::string line;
  std::getline(file, line);  // who made it
  for (const Column& column : kColumns) {
    std::getline(file, line);
    REQUIRE(line == column.text);
  }
  std::size_t count = 0;
  REQUIRE(static_cast<bool>(file >> line >> count));
  std::vector<Case> rows;
  std::int64_t tokens = 0;
  for (Case c; file >> c.dim >> tokens >> c.sequence >> line;) {
    REQUIRE(line.size() == std::size(kColumns));
    c.seed = rows.size();
    c.batch = c.sequence == 0 ? 2 : tokens / c.sequence;
    REQUIRE(c.batch * c.sequence == tokens);
    for (std::size_t i = 0; i < line.size(); ++i) kColumns[i].set(c, line[i] - '0');
    rows.push_back(c);
  }
  REQUIRE(rows.size() == count);
  return rows;
}

}  // namespace

TEST_CASE("operator: every target equals the oracle on the grid") {
  const char* text = std::getenv("KVQUANT_TEST_EVERY");  // take every n-th case only (slow emulators)
  const int every = text != nullptr ? std::max(1, std::atoi(text)) : 1;
  const std::vector<Case> rows = read_grid();
  const std::vector<int> targets = available_targets();
  std::vector<std::uint64_t> before;
  for (int target : targets) before.push_back(compared[target]);
  int number = 0, run = 0, failed = 0;
  for (Case c : rows)
    for (Pair pair : kPairs) {
      if (number++ % every != 0) continue;
      ++run;
      c.x = pair.x;
      c.out = pair.out;
      const std::string mismatch = compare(c);
      if (!mismatch.empty() && ++failed <= 10) FAIL_CHECK(mismatch);
    }
  CHECK(failed == 0);
  if (every == 1) CHECK(static_cast<std::size_t>(run) == rows.size() * std::size(kPairs));
  std::size_t complete = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) complete += compared[targets[i]] - before[i] == static_cast<std::uint64_t>(run);
  CHECK(complete == targets.size());
  std::printf("operator grid: %d cases on each of %zu targets, %d failed\n", run, targets.size(), failed);
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
    Setup setup(c);
    auto& [arena, operands, options] = setup;
    for (Argument argument : {Argument::weight_scale, Argument::activation_scale, Argument::bias}) {
      operands[argument] = arena.view("ignored", DType::float64, {5}, {}, Placement::guard_back);
      operands[argument].data = static_cast<char*>(operands[argument].data) + 40;  // not readable
    }
    const std::string mismatch = compare(arena, operands, options, 1);
    CHECK_MESSAGE(mismatch.empty(), mismatch);
  }
}

TEST_CASE("operator: the strides of an output without elements mean nothing") {
  for (std::int64_t stride : {INT64_MAX, INT64_MIN, std::int64_t{1} << 62}) {
    Case c;
    c.batch = 5;
    c.sequence = 4;
    c.heads_q = 0;
    Setup setup(c);
    auto& [arena, operands, options] = setup;
    char somewhere = 0;
    if (!operands[Argument::q].data) operands[Argument::q].data = &somewhere;
    operands[Argument::q].strides[0] = operands[Argument::q].strides[1] = stride;
    CHECK(compare(arena, operands, options, 1) == "");
  }
}

TEST_CASE("operator: one plan serves calls of other sizes and other memory") {
  Case c;
  c.batch = 2;
  c.sequence = 3;
  c.dim = 34;
  c.kv_output = true;
  c.page_rows = 16;
  Setup setup(c);
  auto& [arena, operands, options] = setup;
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

TEST_CASE("operator: outputs go past the caches where a thread's part is too large for them, with the same bytes") {
  Case c;
  c.batch = 2;
  c.sequence = 150;
  c.dim = 128;
  c.heads_q = 16;  // x and outputs of 300 tokens: 5.5 MB, of which a quarter fits a cache
  c.x = c.out = DType::float32;
  Setup setup(c);
  auto& [arena, operands, options] = setup;
  kvquant::Plan plan;
  REQUIRE(kvquant::make_plan(operands, options, plan).code == kvquant::Code::ok);
  const auto before = arena.snapshot();
  oracle::dequant_rope_quant_kvcache(operands, options);
  const auto expected = arena.snapshot();
  std::vector<char> storage(kvquant::workspace_size(plan, 300) + 64);
  char* workspace = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
  for (int threads : {1, 4, 0, -1}) {
    arena.restore(before);
    kvquant::Call call;
    call.batch = c.batch;
    call.sequence = c.sequence;
    call.threads = threads;
    for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = operands.view[i].data;
    kvquant::Prepared prepared;
    REQUIRE(kvquant::prepare(plan, call, workspace, storage.size() - 64, prepared).code == kvquant::Code::ok);
    CHECK(prepared.stream_out == (threads != 4));
    kvquant::run(plan, prepared, 0, prepared.tokens);
    CHECK(arena.difference(expected) == "");
  }
}

TEST_CASE("operator: a workspace kept from call to call, of whatever plans, changes no byte") {
  std::vector<std::unique_ptr<Setup>> setups;
  for (int i = 0; i < 6; ++i) {
    Case c;
    c.x = c.out = DType::bfloat16;
    c.batch = i == 3 ? 3 : 6;  // with and without reciprocals
    c.heads_kv = i == 4 ? 1 : 2;
    c.offset_k = i != 1;
    c.offset_v = i != 2;
    if (i == 5)
      for (kvtest::ScaleShape& shape : c.scale_shape) shape = kvtest::ScaleShape::heads_one;
    setups.push_back(std::make_unique<Setup>(c));
  }
  constexpr Argument kChanging[] = {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v};
  constexpr double kFew[] = {0.5, 1, 2};  // so that different calls often agree
  alignas(64) static char workspace[16384];
  kvquant::Prepared prepared;
  kvtest::Random random(1);
  const std::vector<int> targets = kvtest::available_targets();
  std::string mismatch;
  for (int step = 0; step < 3000 && mismatch.empty(); ++step) {
    auto& [arena, operands, options] = *setups[static_cast<std::size_t>(random.below(6))];
    options.isa = kvquant::target_name(targets[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(targets.size())))]);
    kvquant::Plan plan;
    REQUIRE(kvquant::make_plan(operands, options, plan).code == kvquant::Code::ok);
    plan.use_reciprocals = random.chance(50);
    kvquant::Call call;
    call.batch = plan.batch;
    call.kept = true;
    for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = operands.view[i].data;
    const auto prepare = [&] { return kvquant::prepare(plan, call, workspace, sizeof workspace, prepared).code; };
    const kvquant::View& changing = operands[random.pick(kChanging)];
    if (changing.dtype != DType::none && random.chance(60)) {
      if (random.chance(50)) kvtest::fill(changing, random.pick(kFew));
      else kvtest::put(kvtest::elements(changing).back(), DType::float32, random.pick(kFew));
    }
    if (random.chance(20)) {
      char* const bad = kvtest::elements(operands[Argument::scale_v]).front();
      const float good = *reinterpret_cast<float*>(bad);
      kvtest::put(bad, DType::float32, 0);
      for (int again = 0; again < 2; ++again)
        if (prepare() != kvquant::Code::scale) mismatch = "a bad scale passed";
      kvtest::put(bad, DType::float32, good);
    }
    const auto before = arena.snapshot();
    oracle::dequant_rope_quant_kvcache(operands, options);
    const auto expected = arena.snapshot();
    arena.restore(before);
    if (prepare() != kvquant::Code::ok) mismatch = "unexpected error";
    kvquant::run(plan, prepared, 0, prepared.tokens);
    if (mismatch.empty()) mismatch = arena.difference(expected);
    if (!mismatch.empty()) mismatch = options.isa + (", step " + std::to_string(step) + ": " + mismatch);
  }
  CHECK(mismatch == "");
}

TEST_CASE("operator: without isa the active target runs") {
  int active = -1;
  REQUIRE(kvquant::active_target(active).code == kvquant::Code::ok);
  REQUIRE(kvquant::target_missing(active) == nullptr);
  Case c;
  Setup setup(c);
  auto& [arena, operands, options] = setup;
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
  std::string idle;  // one assertion, however many targets a processor has: recorded.txt counts them
  for (int i = 0; i < kvquant::target_count(); ++i) {
    const char* missing = kvquant::target_missing(i);
    std::printf("target %-12s %s, rows written: %llu\n", kvquant::target_name(i), missing == nullptr ? "available" : missing,
                static_cast<unsigned long long>(kvquant::target_rows(i)));
    if (missing == nullptr && kvquant::target_rows(i) == 0) idle += std::string(kvquant::target_name(i)) + " ";
  }
  CHECK(idle == "");
}
