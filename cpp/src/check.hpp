// Checks that need more than one line, shared by make_plan and prepare.
#pragma once

#include "kvquant/kvquant.hpp"

namespace kvquant {
namespace detail {

constexpr std::int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::int8: return 1;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::int64: return 8;
    default: return 4;
  }
}

inline Status fault(Code code, Argument argument, std::int64_t got = 0, std::int64_t expected = 0, int axis = -1,
                    std::int64_t position = -1) {
  Status status;
  status.code = code;
  status.argument = argument;
  status.axis = axis;
  status.position = position;
  status.got = got;
  status.expected = expected;
  return status;
}

// The bytes [low, high) that an operand occupies; empty (0, 0) if an axis is empty. False if that is 2^62 bytes
// or more.
struct Interval {
  std::int64_t low = 0, high = 0;
};
bool interval_of(const View& view, Interval& interval) noexcept;

// I5a: a written operand's axes, sorted by stride, must nest.
bool nests(const View& view) noexcept;

// I5a: whether two operands share a byte. Exact, unless the search would take more than a bounded number of steps: then true.
bool share_memory(const View& a, const View& b) noexcept;

// C6: copies a scale or offset to out[heads*dim], each element of the operand read once, and checks what it read by its
// bits: finite, and for a scale not zero.
Status pack_per_channel(const View& view, Argument argument, bool is_scale, std::int64_t heads, std::int64_t dim,
                        float* out) noexcept;

}  // namespace detail
}  // namespace kvquant
