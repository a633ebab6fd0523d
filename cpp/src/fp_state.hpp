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
  // Writing MXCSR takes as long as a hundred instructions, reading it next to nothing.
  FpState() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kControl) _mm_setcsr(kControl);
  }
  ~FpState() {
    if (_mm_getcsr() != saved_) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlags = 0x3F, kControl = 0x1F80;
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
