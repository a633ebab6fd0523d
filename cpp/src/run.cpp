// run: forms the pointers of each token and hands groups of tokens to the kernels. Checks nothing, can't fail.
#include "check.hpp"
#include "dispatch.hpp"
#include "fp_state.hpp"

namespace kvquant {
namespace detail {
namespace {

// Tokens are taken in groups: large enough to hide a call, small enough that x stays in the caches between the parts.
constexpr std::int64_t kGroup = 16;
constexpr Argument kOutputArguments[3] = {Argument::q, Argument::k, Argument::v};

// Q, K and V of one group. Tokens with a cache row come first.
struct Group {
  Token tokens[3][kGroup];
  std::int64_t count, cached;
};

Part part_of(const Plan& plan, const Prepared& prepared, int index) {
  const Stream& stream = plan.streams[index];
  // After the only head of a token the pointers move on all the same, though nobody reads them: not by a stride that may be
  // anything (I5), since a pointer that wraps around is undefined.
  const bool several = stream.heads > 1;
  Part part{};
  part.heads = stream.heads;
  part.dim = plan.dim;
  part.table_half = plan.table_half;
  part.x_head = several ? stream.head : 0;
  part.out_head = several ? stream.out_head : 0;
  if (plan.integer_x) {
    part.weight_scale = reinterpret_cast<const char*>(prepared.weight_scale + stream.first_column);
    part.bias = static_cast<const char*>(prepared.bias) + stream.first_column * 4;
    part.block_tokens = blocks_tokens(plan);
  }
  if (index > 0) {
    const Channels& channels = index == 1 ? prepared.k_channels : prepared.v_channels;
    part.scale = reinterpret_cast<const char*>(channels.scale);
    part.offset = reinterpret_cast<const char*>(channels.offset);
    part.reciprocal = reinterpret_cast<const char*>(channels.reciprocal);
    part.row_head = several ? plan.operands[index == 1 ? Argument::k_cache : Argument::v_cache].strides[2] : 0;
  }
  part.stream_rows = prepared.stream_rows;
  const auto out = reinterpret_cast<std::uintptr_t>(prepared.call[kOutputArguments[index]]);
  part.stream_out = prepared.stream_out && all_aligned(out, stream.out_batch, stream.out_sequence, stream.out_head,
                                                       plan.dim / 2 * item_size(plan.operands[Argument::cos].dtype));
  return part;
}

// The pointers of the tokens t = first, first + 1, ...
void form_group(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t count, Group& group) {
  const Call& call = prepared.call;
  const auto length = static_cast<std::uint32_t>(call.sequence), token = static_cast<std::uint32_t>(first);  // at most 2^30
  std::int64_t b = token / length, s = token % length;
  const auto row_of = [&](const void* data, std::int64_t batch, std::int64_t sequence) {
    return static_cast<const char*>(data) + (b * batch + s * sequence);
  };
  const auto* const activation_scale = plan.integer_x ? call[Argument::activation_scale] : nullptr;
  const std::int64_t activation_stride = plan.operands[Argument::activation_scale].strides[0];
  const std::int64_t *const cos = plan.operands[Argument::cos].strides, *const sin = plan.operands[Argument::sin].strides;
  std::int64_t cached = 0, uncached = count;
  for (std::int64_t t = first; t < first + count; ++t) {
    std::int8_t* const rows[3] = {nullptr, prepared.k_rows[t], prepared.v_rows[t]};  // both null or none
    const std::int64_t at = rows[1] ? cached++ : --uncached;
    Token common;
    if (prepared.cos_rows) {
      common.cos = prepared.cos_rows[t];
      common.sin = prepared.sin_rows[t];
    } else {
      common.cos = row_of(call[Argument::cos], cos[0], plan.three_d ? cos[1] : 0);
      common.sin = row_of(call[Argument::sin], sin[0], plan.three_d ? sin[1] : 0);
    }
    common.activation_scale = activation_scale ? read<float>(activation_scale, t * activation_stride) : 1.0f;
    for (int i = 0; i < 3; ++i) {
      const Stream& stream = plan.streams[i];
      Token& token = group.tokens[i][at];
      token = common;
      token.x = row_of(call[stream.argument], stream.batch, stream.sequence) + stream.origin;
      char* const out = static_cast<char*>(call[kOutputArguments[i]]);  // may be null if it has no elements
      token.out = out ? out + (b * stream.out_batch + s * stream.out_sequence) : nullptr;
      token.row = rows[i];
    }
    if (++s == call.sequence) {
      s = 0;
      ++b;
    }
  }
  group.count = count;
  group.cached = cached;
}

}  // namespace
}  // namespace detail

void run(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t last) noexcept {
  if (first < 0) first = 0;
  if (last > prepared.tokens) last = prepared.tokens;
  if (first >= last) return;
  const detail::FpState state;
  const detail::Part parts[3] = {detail::part_of(plan, prepared, 0), detail::part_of(plan, prepared, 1),
                                 detail::part_of(plan, prepared, 2)};
  detail::Group group;
  std::int64_t written = 0;
  for (std::int64_t t = first; t < last; t += detail::kGroup) {
    detail::form_group(plan, prepared, t, last - t < detail::kGroup ? last - t : detail::kGroup, group);
    const detail::Token* const all_tokens[3] = {group.tokens[0], group.tokens[1], group.tokens[2]};
    if (plan.cached) written += plan.cached(parts, all_tokens, group.cached);
    for (int i = 0; i < 3; ++i) {
      const detail::Stream& stream = plan.streams[i];
      const detail::Token* const tokens = group.tokens[i];
      if (group.cached > 0 && !plan.cached) written += stream.cached(parts[i], tokens, group.cached);
      if (group.cached < group.count && stream.uncached)
        stream.uncached(parts[i], tokens + group.cached, group.count - group.cached);
    }
  }
  if (prepared.stream_out || prepared.stream_rows) detail::store_fence();
  detail::count_rows(*plan.target, written);
}

}  // namespace kvquant
