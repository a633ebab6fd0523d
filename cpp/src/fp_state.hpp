// C1: the arithmetic runs in round-to-nearest-even with subnormals kept and all traps masked, whatever the caller had set;
// the caller's control bits and sticky flags are given back.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvquant {
namespace detail {

class FpState {
 public:
  FpState(const FpState&) = delete;
  FpState& operator=(const FpState&) = delete;
#if defined(__x86_64__)
  FpState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FpState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FpState() {
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control_), "=r"(status_));
    __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
  }
  ~FpState() { __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control_), "r"(status_) : "memory"); }

 private:
  std::uint64_t control_, status_;
#else
  FpState() = default;
#endif
};

// I9: makes non-temporal stores visible to other threads. Where a target has none, there is nothing to do.
inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace detail
}  // namespace kvquant
