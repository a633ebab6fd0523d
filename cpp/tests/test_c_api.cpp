// The C interface: the bytes of the oracle, the words of the C++ interface, and what only C has: two phases, null pointers,
// structures of another size, a message per thread, no allocation in the second phase.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "c_call.hpp"
#include "oracle.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVQUANT_TEST_COUNTS_ALLOCATIONS 1
static std::atomic<long> allocations;
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* malloc(std::size_t size) noexcept { return ++allocations, __libc_malloc(size); }
void* calloc(std::size_t count, std::size_t size) noexcept { return ++allocations, __libc_calloc(count, size); }
void* realloc(void* p, std::size_t size) noexcept { return ++allocations, __libc_realloc(p, size); }
}
#endif

namespace {

// int32 -> float16, B=2, S=3, Nq=4, Nkv=2, D=16, all operands given.
Case full_case(CacheMode mode = CacheMode::page) {
  Case c;
  c.batch = 2;
  c.sequence = 3;
  c.heads_q = 4;
  c.heads_kv = 2;
  c.kv_output = c.activation_scale = c.offset_k = c.offset_v = true;
  c.bias = DType::float32;
  c.mode = mode;
  return c;
}

std::string last_message() { return kvquant_last_message(); }
bool starts_with(const std::string& text, const std::string& prefix) { return text.compare(0, prefix.size(), prefix) == 0; }

}  // namespace

TEST_CASE("c: the bytes of the oracle for every dtype, mode and layout, in one piece and in ranges") {
  int calls = 0;
  std::uint64_t seed = 1;
  for (const auto& types : {std::pair{DType::int32, DType::float16}, {DType::int32, DType::bfloat16},
                            {DType::int32, DType::float32}, {DType::float16, DType::float16},
                            {DType::bfloat16, DType::bfloat16}, {DType::float32, DType::float32}})
    for (CacheMode mode : {CacheMode::contiguous, CacheMode::page})
      for (int layout = 0; layout < kCacheLayouts; ++layout) {
        Case c = full_case(mode);
        c.x = types.first;
        c.out = types.second;
        c.cache_layout = static_cast<CacheLayout>(layout);
        c.input_layout = static_cast<InputLayout>(layout % kInputLayouts);
        c.output_layout = static_cast<OutputLayout>(layout % kOutputLayouts);
        c.three_d = layout % 2 == 0;
        if (!c.three_d) c.sequence = 1;
        c.kv_output = layout % 3 != 1 || c.output_layout == OutputLayout::fused;
        c.offset_v = layout % 4 != 2;
        c.bias = layout % 2 ? DType::int32 : DType::bfloat16;
        c.index = layout % 2 ? DType::int64 : DType::int32;
        c.padding = c.duplicates = layout == 3;
        c.numerics = layout == 4 ? kvquant::Numerics::ascend : kvquant::Numerics::fp32;
        c.tables = layout % 3 == 0   ? Case::Tables::per_token
                   : layout % 3 == 1 ? Case::Tables::full
                                     : Case::Tables::half;
        c.position = layout % 2 ? DType::int32 : DType::int64;
        c.seed = ++seed;
        Setup setup(c);
        auto& [arena, operands, options] = setup;
        CCall call;
        if (!convert(operands, options, call)) continue;
        const auto before = arena.snapshot();
        oracle::dequant_rope_quant_kvcache(operands, options);
        const auto expected = arena.snapshot();
        for (int target : available_targets()) {
          INFO(describe(c) << ", " << kvquant::target_name(target));
          call.options.isa = kvquant::target_name(target);
          arena.restore(before);
          REQUIRE(call.plan() == KVQUANT_OK);
          REQUIRE(call.run() == KVQUANT_OK);
          CHECK(arena.difference(expected) == "");
          arena.restore(before);
          void* const memory = call.workspace();
          REQUIRE(kvquant_prepare(memory, call.workspace_size, call.executor, &call.data) == KVQUANT_OK);
          CHECK(arena.difference(before) == "");
          for (std::int64_t t : {4, 2, 0}) kvquant_run(memory, call.executor, t, t + 2);
          CHECK(arena.difference(expected) == "");
          ++calls;
        }
      }
  CHECK(calls >= 56 * static_cast<int>(available_targets().size()));
}

TEST_CASE("c: one executor, changed data, pointers, B and S") {
  Case c = full_case();
  CCall call;
  Arena first;
  Operands operands;
  Options options;
  build(c, first, operands, options);
  REQUIRE(convert(operands, options, call));
  REQUIRE(call.plan() == KVQUANT_OK);
  const std::uint64_t size = call.workspace_size;
  CHECK(kvquant_workspace_size(call.executor, 2, 3) == size);
  CHECK(kvquant_workspace_size(call.executor, 20, 3) > size);
  CHECK(kvquant_workspace_size(call.executor, 0, 3) > 0);
  CHECK(kvquant_workspace_size(call.executor, -1, -1) == 0);
  CHECK(kvquant_workspace_size(call.executor, INT64_MAX, 2) == 0);
  CHECK(kvquant_workspace_size(call.executor, INT64_MAX, 1) == 0);
  CHECK(kvquant_workspace_size(nullptr, 1, 1) == 0);
  void* const memory = call.workspace();
  for (std::int64_t batch : {2, 1, 3}) {
    c.batch = batch;
    c.seed = static_cast<std::uint64_t>(batch) + 40;
    Arena arena;
    build(c, arena, operands, options);
    CCall other;
    REQUIRE(convert(operands, options, other));
    const auto before = arena.snapshot();
    oracle::dequant_rope_quant_kvcache(operands, options);
    const auto expected = arena.snapshot();
    arena.restore(before);
    other.data.batch = batch;
    other.data.sequence = 3;
    const kvquant_status code = kvquant_dequant_rope_quant_kvcache(memory, size, call.executor, &other.data);
    CHECK(code == (batch == 3 ? KVQUANT_ERR_PARAM_INVALID : KVQUANT_OK));  // 3: the workspace is too small
    CHECK(arena.difference(batch == 3 ? before : expected) == "");
  }
  CHECK(starts_with(last_message(), "workspace: expected "));
  call.data.batch = 0;
  call.data.sequence = 7;  // no token
  const auto before = first.snapshot();
  CHECK(kvquant_dequant_rope_quant_kvcache(memory, size, call.executor, &call.data) == KVQUANT_OK);
  CHECK(first.difference(before) == "");
}

TEST_CASE("c: null pointers") {
  Setup setup(full_case());
  auto& [arena, operands, options] = setup;
  CCall call;
  REQUIRE(convert(operands, options, call));
  const auto before = arena.snapshot();
  for (int i = 0; i < kTensors; ++i) {
    const Argument argument = kArrays[i];
    if (argument == Argument::positions) continue;  // see below
    const bool optional = argument == Argument::offset_k || argument == Argument::offset_v ||
                          argument == Argument::activation_scale || argument == Argument::bias;
    INFO(kvquant::name(argument));
    call.given[i] = false;
    CHECK(call.plan() == (optional ? KVQUANT_OK : KVQUANT_ERR_PARAM_NULLPTR));
    if (!optional) CHECK(last_message() == std::string(kvquant::name(argument)) + ": required, got nothing");
    CHECK((call.executor != nullptr) == optional);
    call.given[i] = true;
    REQUIRE(call.plan() == KVQUANT_OK);
    void* const p = data_at(call.data, i);
    set_data(call.data, i, nullptr);
    CHECK(call.run() == KVQUANT_ERR_PARAM_NULLPTR);
    CHECK(last_message() == std::string(kvquant::name(argument)) + ": required, got nothing");
    set_data(call.data, i, p);
  }
  using A = Argument;
  const auto phase_1 = [&](const std::int64_t* splits, std::uint64_t* size, kvquant_executor** executor) {
    return kvquant_dequant_rope_quant_kvcache_get_workspace_size(
        call.at(A::x), call.at(A::cos), call.at(A::sin), call.at(A::k_cache), call.at(A::v_cache), call.at(A::indices),
        call.at(A::scale_k), call.at(A::scale_v), nullptr, nullptr, call.at(A::weight_scale), nullptr, nullptr, splits, nullptr,
        nullptr, false, "page", call.at(A::q), nullptr, nullptr, size, executor, nullptr);
  };
  kvquant_executor* executor = nullptr;
  std::uint64_t size = 0;
  CHECK(phase_1(nullptr, &size, &executor) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "size_splits: required, got nothing");
  CHECK(phase_1(call.splits, nullptr, &executor) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "workspace_size: required, got nothing");
  CHECK(phase_1(call.splits, &size, nullptr) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "executor: required, got nothing");
  CHECK(phase_1(call.splits, &size, &executor) == KVQUANT_OK);
  kvquant_destroy(executor);
  kvquant_destroy(nullptr);

  void* const memory = call.workspace();
  CHECK(kvquant_prepare(nullptr, call.workspace_size, call.executor, &call.data) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "workspace: required, got nothing");
  CHECK(kvquant_prepare(memory, call.workspace_size, nullptr, &call.data) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "executor: required, got nothing");
  CHECK(kvquant_prepare(memory, call.workspace_size, call.executor, nullptr) == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "data: required, got nothing");
  CHECK(arena.difference(before) == "");
}

TEST_CASE("c: invalid arguments that only C has") {
  Setup setup(full_case());
  const auto before = setup.arena.snapshot();
  const auto refused = [&](const std::function<void(CCall&)>& plant, const char* text) {
    CCall call;
    REQUIRE(convert(setup.a, setup.options, call));
    plant(call);
    CHECK(call.plan() == KVQUANT_ERR_PARAM_INVALID);
    CHECK(last_message() == text);
    CHECK(call.executor == nullptr);
  };
  refused([](CCall& c) { c.quant_mode = "dynamic"; }, "quant_mode: expected 'static', got 'dynamic'");
  refused([](CCall& c) { c.input_layout = "BNSD"; }, "input_layout: expected 'BSND', got 'BNSD'");
  refused([](CCall& c) { c.cache_mode = "paged"; }, "cache_mode: expected 'contiguous' or 'page', got 'paged'");
  refused([](CCall& c) { c.kv_output = false; }, "k: expected nothing without kv_output, got an array");
  refused([](CCall& c) { c.options.reserved = 1; }, "options: expected 0 in reserved, got 1");
  refused([](CCall& c) { c.options.size = 0; }, "options: expected size 32, got 0");
  refused([](CCall& c) { c.options.size = 5000; }, "options: expected size 32, got 5000");
  refused([](CCall& c) { c.tensors[0].dtype = 0; }, "x: expected dtype int32 or float16, got an unknown dtype");
  refused([](CCall& c) { c.tensors[0].strides[0] = INT64_MAX / 2; },
          "x: axis 0: expected a stride within +-288230376151711744 bytes, got 9223372036854775807");

  CCall call;
  REQUIRE(convert(setup.a, setup.options, call));
  REQUIRE(call.plan() == KVQUANT_OK);
  call.data.size = 24;
  CHECK(call.run() == KVQUANT_ERR_PARAM_INVALID);
  CHECK(last_message() == "data: expected size 160, got 24");
  call.data.size = sizeof call.data;
  unsigned char* const memory = static_cast<unsigned char*>(call.workspace());
  CHECK(kvquant_prepare(memory, call.workspace_size - 1, call.executor, &call.data) == KVQUANT_ERR_PARAM_INVALID);
  CHECK(kvquant_prepare(memory + 8, call.workspace_size + 64, call.executor, &call.data) == KVQUANT_ERR_PARAM_INVALID);
  CHECK(kvquant_prepare(memory, 0, call.executor, &call.data) == KVQUANT_ERR_PARAM_INVALID);
  for (unsigned char byte : call.storage) REQUIRE(byte == 0xA5);
  CHECK(setup.arena.difference(before) == "");
}

TEST_CASE("c: positions come with the options, their pointer with the data") {
  Case c = full_case();
  c.tables = Case::Tables::half;
  Setup setup(c);
  auto& [arena, operands, options] = setup;
  CCall call;
  REQUIRE(convert(operands, options, call));
  REQUIRE(call.plan() == KVQUANT_OK);
  CHECK(call.run() == KVQUANT_OK);
  call.data.positions = nullptr;
  CHECK(call.run() == KVQUANT_ERR_PARAM_NULLPTR);
  CHECK(last_message() == "positions: required, got nothing");
  call.options.size = offsetof(kvquant_options, positions);  // a program that does not know them
  CHECK(call.plan() == KVQUANT_ERR_PARAM_INVALID);
  CHECK(starts_with(last_message(), "cos: expected "));
}

TEST_CASE("c: structures of a newer program") {
  Setup setup(full_case());
  auto& [arena, operands, options] = setup;
  CCall call;
  REQUIRE(convert(operands, options, call));
  struct {
    kvquant_data data;
    void* later;
  } newer = {call.data, nullptr};
  REQUIRE(call.plan() == KVQUANT_OK);
  newer.data.size = sizeof newer;
  void* const memory = call.workspace();
  CHECK(kvquant_prepare(memory, call.workspace_size, call.executor, &newer.data) == KVQUANT_OK);
  newer.later = &newer;
  CHECK(kvquant_prepare(memory, call.workspace_size, call.executor, &newer.data) == KVQUANT_ERR_PARAM_INVALID);
  CHECK(starts_with(last_message(), "data: expected zero in the fields that this library does not know, got a value at byte 16"));
}

TEST_CASE("c: a message per thread, and no allocation in the second phase") {
  Setup setup(full_case());
  auto& [arena, operands, options] = setup;
  CCall call;
  REQUIRE(convert(operands, options, call));
  REQUIRE(call.plan() == KVQUANT_OK);
  set_data(call.data, 0, nullptr);
  CHECK(call.run() == KVQUANT_ERR_PARAM_NULLPTR);
  std::string at_start, at_end;
  std::thread([&] {
    at_start = last_message();
    kvquant_prepare(nullptr, 0, call.executor, &call.data);
    at_end = last_message();
  }).join();
  CHECK(at_start == "");
  CHECK(at_end == "workspace: required, got nothing");
  CHECK(last_message() == "x: required, got nothing");
  set_data(call.data, 0, operands[Argument::x].data);
  void* const memory = call.workspace();
#if KVQUANT_TEST_COUNTS_ALLOCATIONS
  const long before = allocations;
#endif
  const kvquant_status good = kvquant_dequant_rope_quant_kvcache(memory, call.workspace_size, call.executor, &call.data);
  const kvquant_status bad = kvquant_dequant_rope_quant_kvcache(memory, 64, call.executor, &call.data);
#if KVQUANT_TEST_COUNTS_ALLOCATIONS
  CHECK(allocations == before);
  CHECK(call.plan() == KVQUANT_OK);
  CHECK(allocations > before);  // the counter counts
#endif
  CHECK(good == KVQUANT_OK);
  CHECK(bad == KVQUANT_ERR_PARAM_INVALID);
}

TEST_CASE("c: version and ABI") {
  CHECK(kvquant_abi() == KVQUANT_ABI);
  int numbers[3] = {-1, -1, -1};
  CHECK(std::sscanf(kvquant_version(), "%d.%d.%d", &numbers[0], &numbers[1], &numbers[2]) == 3);
  const std::int64_t shape[3] = {2, 3, 5};
  const kvquant_tensor tensor = kvquant_contiguous(KVQUANT_FLOAT16, 3, shape);
  CHECK((tensor.strides[0] == 15 && tensor.strides[1] == 5 && tensor.strides[2] == 1 && tensor.shape[1] == 3));
}
