// The dispatcher on machines that are only described: which targets may run, and what the others are said to lack.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "../src/dispatch.hpp"

#if defined(__x86_64__)
namespace {

using kvquant::detail::CpuAnswers;

constexpr std::uint32_t kAvx = 1u << 28, kF16c = 1u << 29, kFma = 1u << 12, kXsave = 1u << 27;
constexpr std::uint32_t kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kBf16 = 1u << 5;
constexpr std::uint32_t kHaswell1 = kAvx | kF16c | kFma | kXsave, kAll7 = kAvx2 | kF | kDq | kBw | kVl;

struct Machine {
  const char* what;
  CpuAnswers cpu;
  const char* best;
  const char* avx512_lacks;  // null: nothing
};

const Machine kMachines[] = {
    {"no CPUID leaf but 0", {0, 0, 0, 0}, "scalar", "os-zmm"},
    {"Nehalem: no XSAVE", {0, 0, 0, 0}, "scalar", "os-zmm"},
    {"Sandy Bridge: AVX only", {kAvx | kXsave, 0, 0, 0x7}, "scalar", "os-zmm"},
    {"AVX2 without F16C", {kAvx | kFma | kXsave, kAvx2, 0, 0x7}, "scalar", "os-zmm"},
    {"AVX2 without FMA", {kAvx | kF16c | kXsave, kAvx2, 0, 0x7}, "scalar", "os-zmm"},
    {"Haswell", {kHaswell1, kAvx2, 0, 0x7}, "avx2", "os-zmm"},
    {"Haswell, ymm not saved", {kHaswell1, kAvx2, 0, 0x3}, "scalar", "os-zmm"},
    {"all AVX-512 bits, XCR0 = 7", {kHaswell1, kAll7, kBf16, 0x7}, "avx2", "os-zmm"},
    {"all AVX-512 bits, XCR0 = 0x27", {kHaswell1, kAll7, kBf16, 0x27}, "avx2", "os-zmm"},
    {"all AVX-512 bits, XCR0 = 0xE7", {kHaswell1, kAll7, 0, 0xE7}, "avx512", nullptr},
    {"with BF16", {kHaswell1, kAll7, kBf16, 0xE7}, "avx512_bf16", nullptr},
    {"Knights Landing: no BW, VL, DQ", {kHaswell1, kAvx2 | kF, 0, 0xE7}, "avx2", "avx512bw"},
    {"AVX-512 without DQ", {kHaswell1, kAll7 & ~kDq, 0, 0xE7}, "avx2", "avx512dq"},
    {"AVX-512 bits, AVX2 hidden", {kHaswell1, kAll7 & ~kAvx2, 0, 0xE7}, "scalar", "avx512f"},
    {"BF16 bit, AVX-512VL hidden", {kHaswell1, kAll7 & ~kVl, kBf16, 0xE7}, "avx2", "avx512vl"},
};

}  // namespace

TEST_CASE("described machines get the best target that they can run (F52)") {
  for (const Machine& machine : kMachines) {
    CAPTURE(machine.what);
    const char* best = nullptr;
    for (int i = 0; i < kvquant::target_count(); ++i) {
      const char* missing = kvquant::detail::missing_feature(kvquant::detail::target_at(i), machine.cpu);
      if (!missing && !best) best = kvquant::target_name(i);
      if (std::strcmp(kvquant::target_name(i), "avx512") == 0)
        CHECK(std::string(missing ? missing : "") == (machine.avx512_lacks ? machine.avx512_lacks : ""));
    }
    REQUIRE(best);
    CHECK(std::string(best) == machine.best);
  }
}

TEST_CASE("a need that the dispatcher does not know is never met") {
  const kvquant::detail::Target target{"future", nullptr, "avx9000"};
  CHECK(kvquant::detail::missing_feature(target, {~0u, ~0u, ~0u, ~std::uint64_t{0}}) != nullptr);
}

TEST_CASE("a CPU of AMD's is known by the vendor's name") {
  CpuAnswers cpu;
  cpu.leaf0_ecx = 0x6C65746E;  // "ntel"
  CHECK(!kvquant::detail::is_amd(cpu));
  cpu.leaf0_ecx = 0x444D4163;  // "cAMD"
  CHECK(kvquant::detail::is_amd(cpu));
}
#endif

TEST_CASE("a forced target is the one that runs, and an unknown or absent one is refused") {
  using namespace kvquant;
  const detail::Target* target = nullptr;
  for (int i = 0; i < target_count(); ++i) {
    const Status status = detail::find_target(target_name(i), target);
    if (target_missing(i)) {
      CHECK(status.code == Code::isa_unavailable);
    } else {
      CHECK(status.code == Code::ok);
      CHECK(target == &detail::target_at(i));
    }
  }
  CHECK(detail::find_target("sse9", target).code == Code::isa_unknown);
}
