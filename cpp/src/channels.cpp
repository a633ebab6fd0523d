// The scales and offsets of K and V: checked copies as the kernels read them, and reciprocals where rows are multiplied by them.
#include <cstring>
#include <initializer_list>

#include "check.hpp"
#include "dispatch.hpp"
#include "fp_state.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "simd/half.hpp"

// A reciprocal costs a division: from how many tokens on it is worth having.
constexpr std::int64_t kReciprocalTokens = 4;

bool same(const Channels& a, const Channels& b) {
  return a.scale == b.scale && a.offset == b.offset && a.reciprocal == b.reciprocal && a.fixed_offset == b.fixed_offset;
}

constexpr Argument kChannelArguments[4] = {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v};
constexpr bool is_scale(int which) { return which < 2; }

class Packer {
 public:
  Packer(const Plan& plan, const Call& call, std::int64_t tokens, float* packed, Prepared& out)
      : plan_(plan), call_(call), tokens_(tokens), packed_(packed), out_(out) {}
  Status pack();

 private:
  bool given(int which) const { return plan_.operands[kChannelArguments[which]].dtype != DType::none; }
  bool is_dense(ChannelSteps steps) const {
    return steps.column == sizeof(float) && (plan_.heads_kv == 1 || steps.head == plan_.dim * steps.column);
  }
  bool is_kept(int which, const float* copy) const;
  bool copy(int which, float* out) const;
  bool copy_checked(const void* from, float* to, std::int64_t count, bool is_scale) const {
    return plan_.target->table->copy_checked(static_cast<const char*>(from), reinterpret_cast<char*>(to), count, is_scale);
  }
  Status find_bad_channel() const;
  bool set_reciprocals(const Channels& from, float* reciprocal, float* fixed_offset) const;

  const Plan& plan_;
  const Call& call_;
  const std::int64_t tokens_;
  float* const packed_;
  Prepared& out_;
};

// Copies scales and offsets and checks the copies by their bits (C6): whoever may write to the operands meanwhile. Where the last
// call left the same ones, nothing is written: the CPUs of the threads that shared it have these lines in their caches, and would
// have to get each of them from this one's (W2, 24 KB: 6 of 22 us on two threads).
Status Packer::pack() {
  const std::int64_t columns = columns_kv(plan_);
  float *const scales = packed_, *const offsets = packed_ + 2 * columns;
  float *const reciprocals = packed_ + 4 * columns, *const fixed_offsets = packed_ + 6 * columns;
  const bool inverted = plan_.use_reciprocals && tokens_ >= kReciprocalTokens;
  const auto place = [&](std::int64_t column) {
    return Channels{scales + column, offsets + column, inverted ? reciprocals + column : nullptr,
                    inverted ? fixed_offsets + column : nullptr};
  };
  const Channels k = place(0), v = place(columns);
  bool kept = call_.kept && same(out_.k_channels, k) && same(out_.v_channels, v);
  for (int i = 0; kept && i < 4; ++i) kept = is_kept(i, packed_ + i * columns);
  if (kept) return {};
  out_.k_channels = out_.v_channels = {};  // not to be relied on after an error
  bool good = true;
  for (int i = 0; i < 4; ++i) good &= copy(i, packed_ + i * columns);
  if (!good) return find_bad_channel();
  out_.k_channels = k;
  out_.v_channels = v;
  if (!inverted) return {};
  const FpState state;
  if (!set_reciprocals(k, reciprocals, fixed_offsets)) out_.k_channels.reciprocal = out_.k_channels.fixed_offset = nullptr;
  if (!set_reciprocals(v, reciprocals + columns, fixed_offsets + columns))
    out_.v_channels.reciprocal = out_.v_channels.fixed_offset = nullptr;
  return {};
}

// Whether a copy that the last call left is what copy would make again.
bool Packer::is_kept(int which, const float* copy) const {
  const std::int64_t heads = plan_.heads_kv, dim = plan_.dim;
  const ChannelSteps steps = plan_.channel_steps[which];
  const void* const from = call_[kChannelArguments[which]];
  const std::size_t bytes = static_cast<std::size_t>(heads * dim) * sizeof(float);
  if (!given(which)) return bits_of(copy[0]) == 0 && std::memcmp(copy, copy + 1, bytes - sizeof(float)) == 0;
  if (is_dense(steps)) return std::memcmp(copy, from, bytes) == 0;
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t d = 0; d < dim; ++d)
      if (bits_of(copy[h * dim + d]) != read<std::uint32_t>(from, h * steps.head + d * steps.column)) return false;
  return true;
}

// A scale or offset as [Nkv*D], each of its elements read once; false if one of them is bad.
bool Packer::copy(int which, float* out) const {
  const std::int64_t heads = plan_.heads_kv, dim = plan_.dim;
  const ChannelSteps steps = plan_.channel_steps[which];
  const auto* const from = static_cast<const char*>(call_[kChannelArguments[which]]);
  if (!given(which)) {
    std::memset(out, 0, static_cast<std::size_t>(heads * dim) * sizeof(float));  // adding 0 keeps every quantised value
    return true;
  }
  if (is_dense(steps)) return copy_checked(from, out, heads * dim, is_scale(which));
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t d = 0; d < dim; ++d) {
      const std::int64_t met_h = steps.head ? h : 0, met_d = steps.column ? d : 0;  // where this element was met first
      const bool repeats = met_h < h || met_d < d;
      out[h * dim + d] = repeats ? out[met_h * dim + met_d] : read<float>(from, h * steps.head + d * steps.column);
    }
  return copy_checked(out, out, heads * dim, is_scale(which));
}

Status Packer::find_bad_channel() const {
  float* packed = packed_;
  for (int i = 0; i < 4; ++i)
    for (std::int64_t h = 0; h < plan_.heads_kv; ++h)
      for (std::int64_t d = 0; d < plan_.dim; ++d, ++packed) {
        if (copy_checked(packed, packed, 1, is_scale(i))) continue;
        const View& view = plan_.operands[kChannelArguments[i]];
        const bool per_head = view.ndim == 2 && view.shape[1] == 1;
        const std::int64_t position = per_head ? h : h * plan_.dim + d;
        return fault(is_scale(i) ? Code::scale : Code::offset, kChannelArguments[i], bits_of(*packed), 0, -1, position);
      }
  return {};
}

// Whether the kernels may multiply by the reciprocals: simd/fixed_point.hpp says why and in which range.
bool Packer::set_reciprocals(const Channels& from, float* reciprocal, float* fixed_offset) const {
  constexpr std::uint32_t kLowest = 127 - 110, kHighest = 127 + 95;  // exponents
  std::uint32_t outside = 0;
  for (std::int64_t c = 0; c < columns_kv(plan_); ++c) {
    const float scale = from.scale[c], offset = from.offset[c];
    const std::uint32_t scale_exponent = bits_of(scale) >> 23 & 0xFFu, offset_bits = bits_of(offset) & 0x7FFFFFFFu;
    outside |= static_cast<std::uint32_t>(scale_exponent - kLowest > kHighest - kLowest);
    outside |= static_cast<std::uint32_t>(offset_bits > 0x43000000u);
    reciprocal[c] = 65536.0f / scale;
    fixed_offset[c] = offset * 65536.0f + 32772.0f;
  }
  return !outside;
}

}  // namespace

std::int64_t channel_floats(const Plan& plan) noexcept {
  const int vectors = plan.use_reciprocals ? 8 : 4;  // scales, offsets; reciprocals, fixed offsets: of K and of V
  return vectors * columns_kv(plan);
}

Status pack_channels(const Plan& plan, const Call& call, std::int64_t tokens, float* packed, Prepared& out) noexcept {
  return Packer(plan, call, tokens, packed, out).pack();
}

}  // namespace detail
}  // namespace kvquant
