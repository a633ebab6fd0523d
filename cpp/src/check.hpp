// Small things that make_plan, prepare and run share, the checks of overlap.cpp, and channels.cpp.
#pragma once

#include <cstring>

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

constexpr std::size_t kAlign = 64;  // of the workspace, and of what non-temporal stores write

template <class... Values>
bool all_aligned(Values... values) {
  return ((static_cast<std::uintptr_t>(values) | ...) % kAlign) == 0;
}

inline std::int64_t columns_kv(const Plan& plan) { return plan.heads_kv * plan.dim; }
inline std::int64_t columns_of(const Plan& plan) { return plan.streams[2].first_column + columns_kv(plan); }

// Operands may have any alignment.
template <class Word>
Word read(const void* p, std::int64_t offset = 0) {
  Word word;
  std::memcpy(&word, static_cast<const char*>(p) + offset, sizeof(Word));
  return word;
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

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;

// B*S, or what is wrong with it; `source` is x or q_source, whose first axes they are.
inline Status count_tokens(Argument source, std::int64_t batch, std::int64_t sequence, std::int64_t& tokens) {
  if (batch < 0) return fault(Code::too_few, source, batch, 0, 0);
  if (sequence < 0) return fault(Code::too_few, source, sequence, 0, 1);
  if (!__builtin_mul_overflow(batch, sequence, &tokens) && tokens <= kMaxTokens) return {};
  if (batch > kMaxTokens) return fault(Code::too_large, source, batch, kMaxTokens, 0);
  if (sequence > kMaxTokens) return fault(Code::too_large, source, sequence, kMaxTokens, 1);
  return fault(Code::too_large, source, tokens, kMaxTokens);
}

// The extent of an operand's elements. Returns the first axis that spans more than kMostPerAxis bytes, or -1. The bound lets
// four axes, two extents, or an extent and an address, be added without overflow.
constexpr std::int64_t kMostPerAxis = std::int64_t{1} << 58;
int extent_of(const View& view, Interval& extent) noexcept;

inline bool is_written(Argument argument) {
  return argument == Argument::k_cache || argument == Argument::v_cache || argument == Argument::q || argument == Argument::k ||
         argument == Argument::v;
}

// The plan's view of an operand with another B and S.
View resized(const Plan& plan, Argument argument, std::int64_t batch, std::int64_t sequence) noexcept;

// Extents and nesting (I5a) of every operand that is looked at, for any B and S.
Status check_extents(const Plan& plan, std::int64_t batch, std::int64_t sequence, Extents& extents) noexcept;

// I5a: a written operand's axes, sorted by stride, must nest.
bool nests(const View& view) noexcept;

// I5a: whether two operands share a byte. Exact, unless the search would take more than a bounded number of steps: then true.
bool share_memory(const View& a, const View& b) noexcept;

// Copies the scales and offsets of K and V to `packed`, channel_floats() long, checks the copies and adds reciprocals, if wanted;
// sets out.k_channels and out.v_channels.
std::int64_t channel_floats(const Plan& plan) noexcept;
Status pack_channels(const Plan& plan, const Call& call, std::int64_t tokens, float* packed, Prepared& out) noexcept;

}  // namespace detail
}  // namespace kvquant
