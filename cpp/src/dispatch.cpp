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

// One feature: bits of CPUID answers, or of XCR0, that must all be set. CPUID may promise registers that the operating system
// or a hypervisor does not save, hence the os-* features. AVX2 code uses AVX, AVX-512 code both, so their bits are asked for.
struct Feature {
  const char* name;
  std::uint32_t leaf1_ecx, leaf7_ebx, leaf7_1_eax, xcr0;
};
constexpr std::uint32_t kAvx = 1u << 28, kFma = 1u << 12, kAvx2 = 1u << 5;
constexpr Feature kFeatures[] = {
    {"os-ymm", 0, 0, 0, 0x06},
    {"os-zmm", 0, 0, 0, 0xE6},
    {"f16c", 1u << 29, 0, 0, 0},
    {"fma", kFma, 0, 0, 0},
    {"avx2", kAvx, kAvx2, 0, 0},
    {"avx512f", kAvx | kFma, kAvx2 | 1u << 16, 0, 0},
    {"avx512dq", 0, 1u << 17, 0, 0},
    {"avx512bw", 0, 1u << 30, 0, 0},
    {"avx512vl", 0, 1u << 31, 0, 0},
    {"avx512_bf16", 0, 0, 1u << 5, 0},
};

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

const Target& target_at(int index) noexcept { return kTargets[index]; }

CpuAnswers ask_cpu() noexcept {
  CpuAnswers cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d)) cpu.leaf0_ecx = c;
  if (__get_cpuid(1, &a, &b, &c, &d)) cpu.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {  // fails where the leaf does not exist, as do the others
    cpu.leaf7_ebx = b;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.leaf7_1_eax = a;
  }
  if (cpu.leaf1_ecx >> 27 & 1u) {  // OSXSAVE: XGETBV exists
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    cpu.xcr0 = static_cast<std::uint64_t>(high) << 32 | low;
  }
#endif
  return cpu;
}

const char* missing_feature(const Target& target, const CpuAnswers& cpu) noexcept {
  const auto all = [](std::uint64_t word, std::uint32_t bits) { return (word & bits) == bits; };
  for (const char* at = target.needs; *at;) {
    const std::size_t length = std::strcspn(at, " ");
    const Feature* feature = nullptr;
    for (const Feature& known : kFeatures)
      if (std::strlen(known.name) == length && std::strncmp(known.name, at, length) == 0) feature = &known;
    if (!feature) return "a feature that the dispatcher does not know";
    if (!all(cpu.leaf1_ecx, feature->leaf1_ecx) || !all(cpu.leaf7_ebx, feature->leaf7_ebx) ||
        !all(cpu.leaf7_1_eax, feature->leaf7_1_eax) || !all(cpu.xcr0, feature->xcr0))
      return feature->name;
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

bool is_amd(const CpuAnswers& cpu) noexcept {
  constexpr std::uint32_t kAmd = 0x444D4163;  // "cAMD" of AuthenticAMD
  return cpu.leaf0_ecx == kAmd;
}
bool is_amd() noexcept {
  static const bool amd = is_amd(ask_cpu());
  return amd;
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
