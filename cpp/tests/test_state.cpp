// C1: the result does not depend on the caller's floating-point state, which is given back with its sticky flags, and no trap
// fires. And the same bytes from many threads.
#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include "cases.hpp"
#include "oracle.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace kvtest;
using kvquant::Argument;
using kvquant::Code;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;

namespace {

// The control and sticky bits in one word. `states` lists words to run under.
#if defined(__x86_64__)
std::uint64_t fp_state() { return _mm_getcsr(); }
void set_fp_state(std::uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
std::vector<std::uint64_t> states() {
  std::vector<std::uint64_t> all;
  for (std::uint64_t rounding = 0; rounding < 4; ++rounding)
    for (std::uint64_t flush : {0x0000u, 0x8000u, 0x0040u, 0x8040u})      // FTZ, DAZ
      for (std::uint64_t masks : {0x1F80u, 0x0000u})                      // all traps masked, none
        for (std::uint64_t flags : {0x00u, 0x3Fu})
          if (masks != 0 || flags == 0) all.push_back(rounding << 13 | flush | masks | flags);
  return all;
}
#elif defined(__aarch64__)
std::uint64_t fp_state() {
  std::uint64_t control, flags;
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(flags));
  return control << 32 | flags;
}
void set_fp_state(std::uint64_t word) {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(word >> 32), "r"(word & 0xFFFFFFFFu) : "memory");
}
std::vector<std::uint64_t> states() {
  std::vector<std::uint64_t> all;
  for (std::uint64_t rounding = 0; rounding < 4; ++rounding)
    for (std::uint64_t bits : {0u, 1u << 24, 1u << 19, 1u << 26, 1u << 25, 0x07080000u})  // FZ, FZ16, AHP, DN
      for (std::uint64_t flags : {0x00u, 0x1Fu}) all.push_back((rounding << 22 | bits) << 32 | flags);
  return all;
}
#else
std::uint64_t fp_state() { return 0; }
void set_fp_state(std::uint64_t) {}
std::vector<std::uint64_t> states() { return {0}; }
#endif

std::string under_state(Arena& arena, const Operands& a, Options options) {
  const auto before = arena.snapshot();
  oracle::dequant_rope_quant_kvcache(a, options);
  const auto expected = arena.snapshot();
  const std::uint64_t normal = fp_state();
  for (int target : available_targets())
    for (std::uint64_t state : states()) {
      arena.restore(before);
      options.isa = kvquant::target_name(target);
      set_fp_state(state);
      const kvquant::Status status = execute(a, options);
      const std::uint64_t after = fp_state();
      set_fp_state(normal);
      std::string mismatch = arena.difference(expected);
      if (status) mismatch = "unexpected error " + std::to_string(static_cast<int>(status.code));
      if (after != state) mismatch = "state afterwards " + std::to_string(after);
      if (!mismatch.empty()) return std::string(options.isa) + " under state " + std::to_string(state) + ": " + mismatch;
    }
  return {};
}

}  // namespace

TEST_CASE("floating-point state: same bytes under every state, which is given back") {
  for (Pair pair : kPairs)
    for (Values values : {Values::plain, Values::special, Values::ties})
      for (kvquant::Numerics numerics : {kvquant::Numerics::fp32, kvquant::Numerics::ascend}) {
        Case c;
        c.x = pair.x;
        c.out = pair.out;
        c.values = values;
        c.numerics = numerics;
        c.batch = 5;
        c.dim = 66;
        c.kv_output = c.offset_k = c.activation_scale = true;
        c.bias = DType::float16;
        Setup setup(c);
        auto& [arena, a, options] = setup;
        CHECK(under_state(arena, a, options) == "");
      }
}

TEST_CASE("floating-point state: subnormal inputs and scales (F57)") {
  Case c;
  c.x = c.out = DType::float32;
  c.batch = 64;
  c.kv_output = true;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  for (Argument argument : {Argument::x, Argument::scale_k, Argument::scale_v}) fill(a[argument], 1e-40);
  fill(a[Argument::cos], 1);
  fill(a[Argument::sin], 0);
  for (std::int64_t t = 0; t < 64; ++t) put_bits(element(a[Argument::indices], t), c.index, static_cast<std::uint64_t>(t));
  CHECK(under_state(arena, a, options) == "");
  for (Argument cache : {Argument::k_cache, Argument::v_cache})
    for (std::int64_t t = 0; t < 64; ++t) CHECK(*element(a[cache], t / c.page_rows, t % c.page_rows) == 1);
}

TEST_CASE("floating-point state: given back after an error") {
  Case c;
  c.batch = 3;
  Setup setup(c);
  auto& [arena, a, options] = setup;
  put_bits(element(a[Argument::scale_v], 0, 7), DType::float32, 0x7FC00000);
  const std::uint64_t normal = fp_state();
  for (std::uint64_t state : states()) {
    set_fp_state(state);
    const kvquant::Status status = execute(a, options);
    const std::uint64_t after = fp_state();
    set_fp_state(normal);
    CHECK(status.code == Code::scale);
    CHECK(after == state);
  }
}

TEST_CASE("threads: one prepared call cut among threads, and one plan used by many calls at once") {
  for (int target : available_targets())
    for (int count : {1, 2, 3, 8, 32}) {
      Case c;
      c.batch = 257;
      c.dim = 34;
      c.duplicates = c.padding = c.kv_output = true;
      c.seed = 40;
      Setup setup(c);
      auto& [arena, a, options] = setup;
      options.isa = kvquant::target_name(target);
      const auto before = arena.snapshot();
      oracle::dequant_rope_quant_kvcache(a, options);
      const auto expected = arena.snapshot();
      arena.restore(before);

      kvquant::Plan plan;
      REQUIRE(kvquant::make_plan(a, options, plan).code == Code::ok);
      kvquant::Call call;
      call.batch = plan.batch;
      call.sequence = plan.sequence;
      for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = a.view[i].data;
      const std::size_t size = kvquant::workspace_size(plan, 257);
      std::vector<char> storage(size + 64);
      char* workspace = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
      kvquant::Prepared prepared;
      REQUIRE(kvquant::prepare(plan, call, workspace, size, prepared).code == Code::ok);
      std::vector<std::thread> threads;
      for (int i = 0; i < count; ++i)
        threads.emplace_back([&, i] { kvquant::run(plan, prepared, 257 * i / count, 257 * (i + 1) / count); });
      for (std::thread& thread : threads) thread.join();
      CHECK(arena.difference(expected) == "");
    }
  // Each thread has its own operands.
  std::vector<std::string> mismatches(8);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < mismatches.size(); ++i)
    threads.emplace_back([&, i] {
      for (std::uint64_t round = 0; round < 20 && mismatches[i].empty(); ++round) {
        Case c;
        c.batch = 9;
        c.dim = 34;
        c.seed = 100 * i + round;
        Setup setup(c);
        auto& [arena, a, options] = setup;
        const auto before = arena.snapshot();
        oracle::dequant_rope_quant_kvcache(a, options);
        const auto expected = arena.snapshot();
        arena.restore(before);
        if (execute(a, options)) mismatches[i] = "unexpected error";
        else mismatches[i] = arena.difference(expected);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& mismatch : mismatches) CHECK(mismatch == "");
}
