// Best-first list of targets and the choice among them, made once per process. No static initialiser runs: this file is
// compiled with baseline flags and must load on any CPU.
#include "dispatch.hpp"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvquant {
namespace detail {
namespace {

constexpr Target kTargets[] = {
#if defined(__x86_64__)
    {"avx512_bf16", &kAvx512Bf16Table, "os-zmm avx512f avx512bw avx512vl avx512dq avx512_bf16"},
    {"avx512", &kAvx512Table, "os-zmm avx512f avx512bw avx512vl avx512dq"},
    {"avx2", &kAvx2Table, "os-ymm avx2 f16c fma"},
#elif defined(__AARCH64EL__)
    {"neon", &kNeonTable, ""},  // part of the baseline
#endif
    {"scalar", &kScalarTable, ""},
};
constexpr int kTargetCount = static_cast<int>(sizeof(kTargets) / sizeof(kTargets[0]));

std::atomic<std::uint64_t> rows_written[kTargetCount];

// Each feature is one bit of one answer; the os-* features are XCR0 masks: CPUID may promise registers that the operating
// system, or a hypervisor that hides them by XCR0 only, does not save.
bool has(const CpuAnswers& cpu, const char* feature) {
  const auto is = [&](const char* other) { return std::strcmp(feature, other) == 0; };
  const auto bit = [](std::uint32_t word, int index) { return (word >> index & 1u) != 0; };
  const std::uint32_t leaf7 = cpu.max_leaf >= 7 ? cpu.leaf7_ebx : 0;
  if (is("os-ymm")) return (cpu.xcr0 & 0x06) == 0x06;
  if (is("os-zmm")) return (cpu.xcr0 & 0xE6) == 0xE6;
  if (is("f16c")) return bit(cpu.leaf1_ecx, 29);
  if (is("fma")) return bit(cpu.leaf1_ecx, 12);
  if (is("avx2")) return bit(leaf7, 5) && bit(cpu.leaf1_ecx, 28);
  if (is("avx512f")) return bit(leaf7, 16);
  if (is("avx512dq")) return bit(leaf7, 17);
  if (is("avx512bw")) return bit(leaf7, 30);
  if (is("avx512vl")) return bit(leaf7, 31);
  if (is("avx512_bf16")) return bit(cpu.max_leaf >= 7 ? cpu.leaf7_1_eax : 0, 5);
  return false;
}

const char* const kFeatureNames[] = {"os-ymm", "os-zmm", "f16c", "fma", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl",
                                     "avx512_bf16"};

int index_of(const char* isa) {
  for (int i = 0; i < kTargetCount; ++i)
    if (std::strcmp(isa, kTargets[i].name) == 0) return i;
  return -1;
}

struct Choice {
  int index = -1;
  Status status;
};

Choice named(const char* isa, const CpuAnswers& cpu) {
  Choice choice;
  choice.index = index_of(isa);
  choice.status.argument = Argument::isa;
  choice.status.position = choice.index;
  if (choice.index < 0) choice.status.code = Code::isa_unknown;
  else if (missing_feature(kTargets[choice.index], cpu)) choice.status.code = Code::isa_unavailable;
  return choice;
}

Choice choose() {
  const CpuAnswers cpu = ask_cpu();
  const char* isa = std::getenv("KVQUANT_ISA");
  if (isa && *isa) {
    Choice choice = named(isa, cpu);
    choice.status.expected = 1;  // the name came from the environment
    return choice;
  }
  Choice choice;
  for (int i = kTargetCount - 1; i >= 0; --i)
    if (!missing_feature(kTargets[i], cpu)) choice.index = i;
  return choice;
}

const Choice& active() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

CpuAnswers ask_cpu() noexcept {
  CpuAnswers cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  cpu.max_leaf = static_cast<std::uint32_t>(__get_cpuid_max(0, nullptr));
  if (__get_cpuid(1, &a, &b, &c, &d)) cpu.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) cpu.leaf7_ebx = b;
  if (cpu.max_leaf >= 7 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.leaf7_1_eax = a;
  if (cpu.leaf1_ecx >> 27 & 1u) {  // OSXSAVE: XGETBV exists
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    cpu.xcr0 = static_cast<std::uint64_t>(high) << 32 | low;
  }
#endif
  return cpu;
}

const char* missing_feature(const Target& target, const CpuAnswers& cpu) noexcept {
  for (const char* at = target.needs; *at;) {
    const std::size_t length = std::strcspn(at, " ");
    for (const char* feature : kFeatureNames)
      if (std::strlen(feature) == length && std::strncmp(feature, at, length) == 0 && !has(cpu, feature)) return feature;
    at += length;
    at += *at == ' ';
  }
  return nullptr;
}

Status find_target(const char* isa, const Target*& target) noexcept {
  if (!isa || !*isa) {
    const Choice& choice = active();
    if (!choice.status) target = &kTargets[choice.index];
    return choice.status;
  }
  const int index = index_of(isa);
  if (index == active().index && !active().status) {  // known to run: no CPUID, which costs microseconds in a virtual machine
    target = &kTargets[index];
    return {};
  }
  static const CpuAnswers cpu = ask_cpu();
  const Choice choice = named(isa, cpu);
  if (!choice.status) target = &kTargets[choice.index];
  return choice.status.code == Code::ok ? Status{} : choice.status;
}

void count_rows(const Target& target, std::int64_t rows) noexcept {
  rows_written[&target - kTargets].fetch_add(static_cast<std::uint64_t>(rows), std::memory_order_relaxed);
}

}  // namespace detail

int target_count() noexcept { return detail::kTargetCount; }
const char* target_name(int index) noexcept { return detail::kTargets[index].name; }
const char* target_missing(int index) noexcept { return detail::missing_feature(detail::kTargets[index], detail::ask_cpu()); }
std::uint64_t target_rows(int index) noexcept { return detail::rows_written[index].load(std::memory_order_relaxed); }
Status active_target(int& index) noexcept {
  index = detail::active().index;
  return detail::active().status;
}

}  // namespace kvquant
