// run: forms the pointers of each token and hands groups of tokens to the kernels. Checks nothing, can't fail.
#include "check.hpp"
#include "dispatch.hpp"
#include "fp_state.hpp"

namespace kvquant {
namespace detail {
namespace {

// Tokens are taken in groups: large enough to hide a call, small enough that x stays in the caches between the parts.
constexpr std::int64_t kGroup = 16;
// Bytes of a cache row from which on its address is worth translating in advance.
constexpr std::int64_t kLongRow = 512;
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
    part.order = plan.order;
  }
  if (index > 0) {
    const Channels& channels = index == 1 ? prepared.k_channels : prepared.v_channels;
    part.scale = reinterpret_cast<const char*>(channels.scale);
    part.offset = reinterpret_cast<const char*>(channels.offset);
    part.reciprocal = reinterpret_cast<const char*>(channels.reciprocal);
    part.fixed_offset = reinterpret_cast<const char*>(channels.fixed_offset);
    part.row_head = several ? plan.operands[index == 1 ? Argument::k_cache : Argument::v_cache].strides[2] : 0;
  }
  part.stream_rows = prepared.stream_rows;
  const auto out = reinterpret_cast<std::uintptr_t>(prepared.call[kOutputArguments[index]]);
  part.stream_out = prepared.stream_out && all_aligned(out, stream.out_batch, stream.out_sequence, stream.out_head,
                                                       plan.dim / 2 * item_size(plan.operands[Argument::cos].dtype));
  return part;
}

// Has the address of a cache row translated while Q is worked on: non-temporal stores to a page of 4 KB that nobody used lately else
// wait for that (Intel, W2, other rows at each call as in a server: 38.4 -> 34.2 us; the same rows again: 29.1 -> 30.2). CLDEMOTE
// moves no data of a line that is in no cache, and is a no-operation where it is not known.
inline void translate(const std::int8_t* row) {
#if defined(__x86_64__)
  __asm__ volatile(".byte 0x0F, 0x1C, 0x00" : : "a"(row));  // cldemote (%rax)
#else
  static_cast<void>(row);
#endif
}

// Goes from token to token, first <= t < last. Addresses are numbers here: a step behind the last token of a sequence may lead
// anywhere (I5).
class Walk {
 public:
  Walk(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t last)
      : prepared_(prepared), length_(prepared.call.sequence), last_(last), next_(first) {
    const auto length = static_cast<std::uint32_t>(length_), token = static_cast<std::uint32_t>(first);  // at most 2^30
    const std::int64_t b = token / length;
    sequence_ = token % length;
    const auto set = [&](int which, const void* data, std::int64_t origin, std::int64_t batch, std::int64_t sequence) {
      const auto address = [data](std::int64_t bytes) { return data ? static_cast<std::uintptr_t>(bytes) : 0; };  // no elements: 0
      at_[which] = reinterpret_cast<std::uintptr_t>(data) + address(b) * address(batch) + address(sequence_) * address(sequence) +
                   address(origin);
      if (last - first == 1) return;  // no steps: one token in a call is a matter of nanoseconds
      step_[0][which] = address(sequence);
      step_[1][which] = address(batch) - address(length_ - 1) * address(sequence);
    };
    const Call& call = prepared.call;
    for (int i = 0; i < 3; ++i) {
      const Stream& stream = plan.streams[i];
      set(i, call[stream.argument], stream.origin, stream.batch, stream.sequence);
      set(kOut + i, call[kOutputArguments[i]], 0, stream.out_batch, stream.out_sequence);
    }
    for (int i = 0; i < 2; ++i) {
      const Argument table = i == 0 ? Argument::cos : Argument::sin;
      const std::int64_t* const strides = plan.operands[table].strides;
      set(kTables + i, prepared.cos_rows ? nullptr : call[table], 0, strides[0], plan.three_d ? strides[1] : 0);
    }
    if (!plan.integer_x) return;
    activation_scale_ = call[Argument::activation_scale];
    activation_stride_ = plan.operands[Argument::activation_scale].strides[0];
  }

  // The pointers of the next `count` tokens.
  void form_group(std::int64_t count, Group& group) {
    std::int64_t cached = 0, uncached = count;
    for (const std::int64_t end = next_ + count; next_ < end; ++next_) {
      const std::int64_t t = next_;
      std::int8_t* const rows[3] = {nullptr, prepared_.k_rows[t], prepared_.v_rows[t]};  // both null or none
      const std::int64_t place = rows[1] ? cached++ : --uncached;
      const char* const cos = prepared_.cos_rows ? prepared_.cos_rows[t] : reinterpret_cast<const char*>(at_[kTables]);
      const char* const sin = prepared_.cos_rows ? prepared_.sin_rows[t] : reinterpret_cast<const char*>(at_[kTables + 1]);
      const float activation_scale = activation_scale_ ? read<float>(activation_scale_, t * activation_stride_) : 1.0f;
      for (int i = 0; i < 3; ++i)
        group.tokens[i][place] = {reinterpret_cast<const char*>(at_[i]), cos, sin, reinterpret_cast<char*>(at_[kOut + i]), rows[i],
                                  activation_scale};
      if (t + 1 < last_) step();
    }
    group.count = count;
    group.cached = cached;
  }

 private:
  void step() {
    const bool ends = ++sequence_ == length_;
    if (ends) sequence_ = 0;
    for (int k = 0; k < kAddresses; ++k) at_[k] += step_[ends][k];
  }

  enum { kOut = 3, kTables = 6, kAddresses = 8 };  // x of Q, K and V; their outputs; cos and sin
  const Prepared& prepared_;
  const std::int64_t length_, last_;
  std::int64_t next_, sequence_;
  const void* activation_scale_ = nullptr;
  std::int64_t activation_stride_ = 0;
  std::uintptr_t at_[kAddresses];
  std::uintptr_t step_[2][kAddresses];  // to the next token of a sequence, and to the first one of the next
};

}  // namespace
}  // namespace detail

void run(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t last) noexcept {
  if (first < 0) first = 0;
  if (last > prepared.tokens) last = prepared.tokens;
  if (first >= last) return;
  const detail::FpState state;
  const detail::Part parts[3] = {detail::part_of(plan, prepared, 0), detail::part_of(plan, prepared, 1),
                                 detail::part_of(plan, prepared, 2)};
  const bool translate_rows = prepared.stream_rows && plan.heads_kv * plan.dim >= detail::kLongRow;
  const detail::KernelOfAll together = parts[1].reciprocal || parts[2].reciprocal ? nullptr : plan.together;
  detail::Group group;
  detail::Walk walk(plan, prepared, first, last);
  std::int64_t written = 0;
  for (std::int64_t t = first; t < last; t += detail::kGroup) {
    walk.form_group(last - t < detail::kGroup ? last - t : detail::kGroup, group);
    if (translate_rows)
      for (std::int64_t i = 0; i < group.cached; ++i) {
        detail::translate(group.tokens[1][i].row);
        detail::translate(group.tokens[2][i].row);
      }
    const detail::Token* const all_tokens[3] = {group.tokens[0], group.tokens[1], group.tokens[2]};
    if (together) written += together(parts, all_tokens, group.cached);
    for (int i = 0; i < 3; ++i) {
      const detail::Stream& stream = plan.streams[i];
      const detail::Token* const tokens = group.tokens[i];
      if (group.cached > 0 && !together) written += stream.cached(parts[i], tokens, group.cached);
      if (group.cached < group.count && stream.uncached)
        stream.uncached(parts[i], tokens + group.cached, group.count - group.cached);
    }
  }
  if (prepared.stream_out || prepared.stream_rows) detail::store_fence();
  detail::count_rows(*plan.target, written);
}

}  // namespace kvquant
