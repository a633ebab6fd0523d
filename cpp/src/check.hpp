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

// The extent of an operand's elements. False if an axis spans more than 2^58 bytes.
bool extent_of(const View& view, Interval& extent) noexcept;

inline bool is_written(Argument argument) {
  return argument == Argument::k_cache || argument == Argument::v_cache || argument == Argument::q || argument == Argument::k ||
         argument == Argument::v;
}

// The plan's view of an operand with another B and S.
View resized(const Plan& plan, Argument argument, std::int64_t batch, std::int64_t sequence) noexcept;

// Extents and nesting (I5a) of every operand that is looked at, for any B and S.
Status check_extents(const Plan& plan, std::int64_t batch, std::int64_t sequence, Interval (&extents)[kOperandCount]) noexcept;

// I5a: a written operand's axes, sorted by stride, must nest.
bool nests(const View& view) noexcept;

// I5a: whether two operands share a byte. Exact, unless the search would take more than a bounded number of steps: then true.
bool share_memory(const View& a, const View& b) noexcept;

}  // namespace detail
}  // namespace kvquant
