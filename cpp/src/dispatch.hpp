// Which target runs: what each one needs, what this CPU and operating system offer, and what KVQUANT_ISA asks for.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernel.hpp"

namespace kvquant {
namespace detail {

// The raw answers of CPUID and XGETBV, apart from the code that asks, so that tests can describe any machine.
struct CpuAnswers {
  std::uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_1_eax = 0;
  std::uint64_t xcr0 = 0;        // 0 if the OS has not enabled XGETBV
  std::uint32_t leaf0_ecx = 0;  // the end of the vendor's name
};
CpuAnswers ask_cpu() noexcept;

struct Target {
  const char* name;
  const KernelTable* table;
  const char* needs;  // features, separated by spaces; exactly what the target's compiler flags assume
};

// The targets of this build, best first.
const Target& target_at(int index) noexcept;

// Null if `target` can run on the described machine, else the first feature that is missing.
const char* missing_feature(const Target& target, const CpuAnswers& cpu) noexcept;

// The target that `isa` names (null or empty: the active one). Errors: isa_unknown, isa_unavailable.
Status find_target(const char* isa, const Target*& target) noexcept;

// Whether the CPU is one of AMD's, for choices on which measurements on AMD and on Intel differ (plan.cpp).
bool is_amd(const CpuAnswers& cpu) noexcept;
bool is_amd() noexcept;  // the CPU this runs on

void count_rows(const Target& target, std::int64_t rows) noexcept;

}  // namespace detail
}  // namespace kvquant
