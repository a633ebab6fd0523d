// Random faults, one to three at a time, in metadata and in data, given to the C++ and to the C interface: both answer alike, a
// refusal has words, and not one byte of an operand changes. Whatever is accepted equals the oracle.
#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "c_call.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::Code;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::Status;
using kvquant::View;

namespace {

constexpr std::int64_t kLengths[] = {INT64_MIN, -1, 0, 1, 2, 3, 5, 16, 17, 96, std::int64_t{1} << 31, std::int64_t{1} << 40,
                                     std::int64_t{1} << 61, INT64_MAX / 2, INT64_MAX};

Case draw_case(Random& random) {
  constexpr DType kOutputs[] = {DType::float16, DType::bfloat16, DType::float32};
  Case c;
  c.out = random.pick(kOutputs);
  c.x = random.chance(50) ? DType::int32 : c.out;
  c.batch = 1 + random.below(3);
  c.three_d = random.chance(50);
  c.sequence = c.three_d ? 1 + random.below(3) : 1;
  c.heads_q = random.below(3);
  c.heads_kv = 1 + random.below(2);
  c.dim = 2 + 2 * random.below(9);
  c.mode = random.chance(50) ? CacheMode::page : CacheMode::contiguous;
  c.kv_output = random.chance(50);
  c.padding = random.chance(20);
  c.activation_scale = c.offset_k = random.chance(50);
  c.offset_v = random.chance(50);
  c.bias = random.chance(50) ? random.pick({DType::int32, DType::float32, DType::float16, DType::bfloat16}) : DType::none;
  c.index = random.chance(50) ? DType::int32 : DType::int64;
  c.cache_layout = static_cast<CacheLayout>(random.below(kCacheLayouts));
  c.seed = random.bits();
  return c;
}

// What make_plan sees. A view so changed may speak of memory that is not there: it must not be run.
void spoil_metadata(Operands& operands, Options& options, Random& random) {
  View& view = operands[random.pick(kArrays)];
  switch (random.below(13)) {
    case 0: view.dtype = static_cast<DType>(random.pick({-1, 1, 2, 3, 4, 5, 6, 10, 31, 32, INT32_MAX, INT32_MIN})); break;
    case 1: view.ndim = random.pick({INT32_MIN, -1, 0, 1, 2, 3, 4, 5, INT32_MAX}); break;
    case 2:
    case 3: view.shape[random.below(4)] = random.pick(kLengths); break;
    case 4:
    case 5: view.strides[random.below(4)] = random.pick(kLengths); break;
    case 6: operands.size_splits[random.below(3)] = random.pick(kLengths); break;
    case 7: view = operands[random.pick(kArrays)]; break;
    case 8: options.cache_mode = options.cache_mode == CacheMode::page ? CacheMode::contiguous : CacheMode::page; break;
    case 9: options.numerics = static_cast<kvquant::Numerics>(random.pick({-1, 1, 2, INT32_MAX})); break;
    case 10: options.kv_output = !options.kv_output; break;
    case 11: options.vendor_limits = true; break;
    default: options.isa = random.pick({"", "avx", "Scalar", "a name that no message would want to repeat in full"});
  }
}

// What prepare sees: the values of indices, scales and offsets, and pointers.
void spoil_values(Operands& operands, Random& random) {
  constexpr std::uint64_t kScaleBits[] = {0, 0x80000000u, 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu, 1, 0x3F800000u};
  constexpr std::int64_t kIndices[] = {INT64_MIN, INT32_MIN, -2, -1, 0, 1, 2, 7, INT32_MAX, std::int64_t{1} << 32, INT64_MAX};
  const View& view = operands[random.pick({Argument::indices, Argument::indices, Argument::indices, Argument::scale_k,
                                           Argument::scale_v, Argument::offset_k, Argument::offset_v})];
  if (view.dtype == DType::none) return;
  const std::vector<char*> all = elements(view);
  char* const p = all[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(all.size())))];
  const bool scale = view.dtype == DType::float32;
  put_bits(p, view.dtype, scale ? random.pick(kScaleBits) : static_cast<std::uint64_t>(random.pick(kIndices)));
}
void spoil_pointers(Operands& operands, Random& random) {
  if (random.chance(50)) operands[random.pick(kArrays)].data = nullptr;
  else  // a written operand over the bytes of another
    operands[random.pick({Argument::indices, Argument::scale_k, Argument::cos, Argument::q})].data =
        operands[random.pick({Argument::k_cache, Argument::v_cache})].data;
}

std::string words(const Status& status) {
  char text[256];
  kvquant::message(status, text, sizeof text);
  return text;
}

}  // namespace

TEST_CASE("bad input: metadata") {
  Random random(20240607);
  std::map<int, int> codes;
  int compared = 0;
  for (int i = 0; i < 6000; ++i) {
    Setup setup(draw_case(random));
    auto& [arena, operands, options] = setup;
    const auto before = arena.snapshot();
    for (std::int64_t n = random.below(3); n >= 0; --n) spoil_metadata(operands, options, random);
    kvquant::Plan plan;
    const Status status = kvquant::make_plan(operands, options, plan);
    ++codes[static_cast<int>(status.code)];
    INFO("round " << i << ": " << words(status));
    CCall call;
    if (operands[Argument::q].dtype != DType::none && convert(operands, options, call)) {
      const kvquant_status code = call.plan();
      REQUIRE((call.executor == nullptr) == (code != KVQUANT_OK));
      const bool absent = code == KVQUANT_ERR_PARAM_NULLPTR;  // C looks at null pointers first
      if (absent || status) {
        REQUIRE(code == (absent ? KVQUANT_ERR_PARAM_NULLPTR : KVQUANT_ERR_PARAM_INVALID));
        if (!absent) REQUIRE(std::string(kvquant_last_message()) == words(status));
        ++compared;
      } else {
        REQUIRE(code == KVQUANT_OK);
      }
    }
    if (status) REQUIRE(words(status).find(kvquant::name(status.argument)) != std::string::npos);
    REQUIRE(arena.difference(before) == "");
  }
  CHECK(codes.size() >= 12);
  CHECK(codes[0] < 3000);
  CHECK(compared > 2000);
}

TEST_CASE("bad input: data") {
  Random random(77);
  std::map<int, int> codes;
  for (int i = 0; i < 6000; ++i) {
    Setup setup(draw_case(random));
    auto& [arena, operands, options] = setup;
    options.isa = kvquant::target_name(random.pick({0, kvquant::target_count() - 1}));
    if (kvquant::target_missing(0)) options.isa = nullptr;
    for (std::int64_t n = random.below(3); n >= 0; --n) spoil_values(operands, random);
    if (random.chance(30)) spoil_pointers(operands, random);
    const auto before = arena.snapshot();
    std::string violation;
    const Status status = execute(operands, options, Cut::whole, 0, violation);
    ++codes[static_cast<int>(status.code)];
    INFO("round " << i << ": " << words(status));
    REQUIRE(violation == "");
    const auto after = arena.snapshot();
    if (status) {
      REQUIRE(arena.difference(before) == "");
    } else {
      arena.restore(before);
      oracle::dequant_rope_quant_kvcache(operands, options);
      REQUIRE(arena.difference(after) == "");
    }
    arena.restore(before);
    CCall call;
    if (!convert(operands, options, call)) continue;
    REQUIRE(call.plan() == KVQUANT_OK);
    const kvquant_status code = call.run();
    REQUIRE(code == (!status ? KVQUANT_OK : status.code == Code::missing ? KVQUANT_ERR_PARAM_NULLPTR : KVQUANT_ERR_PARAM_INVALID));
    if (status) REQUIRE(std::string(kvquant_last_message()) == words(status));
    REQUIRE(arena.difference(after) == "");
  }
  for (Code code : {Code::ok, Code::missing, Code::overlap, Code::scale, Code::offset, Code::index, Code::duplicate})
    CHECK(codes[static_cast<int>(code)] > 50);
}

TEST_CASE("bad input: structures, workspace, B and S of the C interface") {
  Random random(5);
  std::map<kvquant_status, int> codes;
  for (int i = 0; i < 4000; ++i) {
    Arena arena;
    Operands operands;
    Options options;
    const Case c = draw_case(random);
    build(c, arena, operands, options);
    CCall call;
    if (!convert(operands, options, call)) continue;
    const auto before = arena.snapshot();
    REQUIRE(call.plan() == KVQUANT_OK);
    call.data.batch = c.batch;
    call.data.sequence = c.sequence;
    char* memory = static_cast<char*>(call.workspace());
    std::uint64_t size = call.workspace_size;
    switch (random.below(5)) {
      case 0: call.data.size = random.pick({0u, 8u, 151u, 161u, 168u, 4097u, UINT32_MAX}); break;
      case 1: call.data.batch = random.pick({INT64_MIN, std::int64_t{-1}, std::int64_t{0}, std::int64_t{100}, INT64_MAX}); break;
      case 2: call.data.sequence = random.pick({INT64_MIN, std::int64_t{-3}, std::int64_t{0}, std::int64_t{100}, INT64_MAX}); break;
      case 3: size = static_cast<std::uint64_t>(random.below(static_cast<std::int64_t>(size))); break;
      default: memory += 1 + random.below(63);
    }
    struct {
      kvquant_data data;
      unsigned char beyond[8];
    } longer = {call.data, {}};
    if (longer.data.size == 161 || longer.data.size == 168) longer.beyond[0] = 1;
    const kvquant_status code = kvquant_dequant_rope_quant_kvcache(memory, size, call.executor, &longer.data);
    ++codes[code];
    INFO("round " << i << ": " << kvquant_last_message());
    // A call without tokens is no fault; everything else here is one.
    if (code == KVQUANT_OK) REQUIRE((call.data.batch == 0 || call.data.sequence == 0));
    if (code != KVQUANT_OK) REQUIRE(kvquant_last_message()[0] != '\0');
    REQUIRE(arena.difference(before) == "");
  }
  CHECK(codes[KVQUANT_ERR_PARAM_INVALID] > 2000);
  CHECK(codes[KVQUANT_OK] > 20);
}
