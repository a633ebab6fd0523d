// run: forms the pointers of each token and hands groups of tokens to the kernels. Checks nothing, can't fail.
#include "check.hpp"
#include "dispatch.hpp"
#include "fp_state.hpp"

namespace kvquant {
namespace detail {
namespace {

// One of Q, K, V of a prepared call: forms the tokens' pointers and hands them to the kernels.
class PartRun {
 public:
  PartRun(const Plan& plan, const Prepared& prepared, int index);
  // Tokens t = first, first + 1, ... of a group; (b, s) is the first one's place. Returns the cache rows written.
  std::int64_t run(std::int64_t first, std::int64_t count, std::int64_t b, std::int64_t s) const;

  // Tokens are taken in groups: large enough to hide a call, small enough that x stays in the caches between the parts.
  static constexpr std::int64_t kGroup = 16;

 private:
  const Plan& plan_;
  const Call& call_;
  const Stream& stream_;
  Part part_{};
  std::int8_t* const* rows_ = nullptr;
  const char *const *cos_rows_, *const *sin_rows_;
  bool rotates_;
  char* out_;
};

PartRun::PartRun(const Plan& plan, const Prepared& prepared, int index)
    : plan_(plan), call_(prepared.call), stream_(plan.streams[index]), cos_rows_(prepared.cos_rows), sin_rows_(prepared.sin_rows),
      rotates_(index < 2) {
  part_.heads = stream_.heads;
  part_.dim = plan.dim;
  const View& cos = plan.operands[Argument::cos];
  part_.table_half = cos.shape[cos.ndim - 1] < plan.dim ? 0 : plan.dim / 2;
  // After the only head of a token the pointers move on all the same, though nobody reads them: not by a stride that may be
  // anything (I5), since a pointer that wraps around is undefined.
  const bool several = stream_.heads > 1;
  part_.x_head = several ? stream_.head : 0;
  part_.out_head = several ? stream_.out_head : 0;
  if (plan.integer_x) {
    part_.weight_scale = reinterpret_cast<const char*>(prepared.weight_scale + stream_.first_column);
    part_.bias = static_cast<const char*>(prepared.bias) + stream_.first_column * 4;
    part_.block_tokens = blocks_tokens(plan);
  }
  if (index > 0) {
    const Channels& channels = index == 1 ? prepared.k_channels : prepared.v_channels;
    part_.scale = reinterpret_cast<const char*>(channels.scale);
    part_.offset = reinterpret_cast<const char*>(channels.offset);
    part_.reciprocal = reinterpret_cast<const char*>(channels.reciprocal);
    part_.row_head = several ? plan.operands[index == 1 ? Argument::k_cache : Argument::v_cache].strides[2] : 0;
    rows_ = index == 1 ? prepared.k_rows : prepared.v_rows;
  }
  out_ = static_cast<char*>(call_[index == 0 ? Argument::q : index == 1 ? Argument::k : Argument::v]);
  part_.stream_rows = prepared.stream_rows;
  part_.stream_out =
      prepared.stream_out && all_aligned(reinterpret_cast<std::uintptr_t>(out_), stream_.out_batch, stream_.out_sequence,
                                         stream_.out_head, plan.dim / 2 * item_size(plan.operands[Argument::cos].dtype));
}

// The pointer of one operand, which moves on token by token.
class Cursor {
 public:
  Cursor(const void* data, std::int64_t batch, std::int64_t sequence, const Call& call, std::int64_t b, std::int64_t s)
      : at_(static_cast<const char*>(data) + b * batch + s * sequence),
        within_(sequence),
        next_(call.batch > 1 ? batch - (call.sequence - 1) * sequence : 0) {}  // the stride of a single batch means nothing
  const char* get() const { return at_; }
  void advance(bool last) { at_ += last ? next_ : within_; }

 private:
  const char* at_;
  std::int64_t within_, next_;  // bytes to the next token of the same sequence, from the last one to the next sequence
};

std::int64_t PartRun::run(std::int64_t first, std::int64_t count, std::int64_t b, std::int64_t s) const {
  const std::int64_t length = call_.sequence;
  Cursor x(static_cast<const char*>(call_[stream_.argument]) + stream_.origin, stream_.batch, stream_.sequence, call_, b, s);
  Cursor out(out_, out_ ? stream_.out_batch : 0, out_ ? stream_.out_sequence : 0, call_, b, s);
  const std::int64_t activation_stride = plan_.operands[Argument::activation_scale].strides[0];
  const void* const activation_scale = plan_.integer_x ? call_[Argument::activation_scale] : nullptr;
  Token cached[kGroup], uncached[kGroup];  // with a cache row, and without
  std::int64_t cached_count = 0, uncached_count = 0;
  const auto form_tokens = [&](auto set_rotation) {  // set_rotation(token, t, last)
    for (std::int64_t t = first; t < first + count; ++t) {
      std::int8_t* const row = rows_ ? rows_[t] : nullptr;
      const bool last = ++s == length;
      if (last) s = 0;
      Token& token = row ? cached[cached_count++] : uncached[uncached_count++];
      token.x = x.get();
      token.out = const_cast<char*>(out.get());
      token.row = row;
      token.activation_scale = activation_scale ? read<float>(activation_scale, t * activation_stride) : 1.0f;
      set_rotation(token, t, last);
      x.advance(last);
      out.advance(last);
    }
  };
  if (!rotates_) {
    form_tokens([](Token&, std::int64_t, bool) {});
  } else if (cos_rows_) {
    form_tokens([&](Token& token, std::int64_t t, bool) {
      token.cos = cos_rows_[t];
      token.sin = sin_rows_[t];
    });
  } else {
    const auto cursor = [&](Argument argument) {
      const std::int64_t* strides = plan_.operands[argument].strides;
      return Cursor(call_[argument], strides[0], plan_.three_d ? strides[1] : 0, call_, b, s);
    };
    form_tokens([cos = cursor(Argument::cos), sin = cursor(Argument::sin)](Token& token, std::int64_t, bool last) mutable {
      token.cos = cos.get();
      token.sin = sin.get();
      cos.advance(last);
      sin.advance(last);
    });
  }
  std::int64_t written = 0;
  if (cached_count) written += stream_.cached(part_, cached, cached_count);
  if (uncached_count && stream_.uncached) written += stream_.uncached(part_, uncached, uncached_count);
  return written;
}

}  // namespace
}  // namespace detail

void run(const Plan& plan, const Prepared& prepared, std::int64_t first, std::int64_t last) noexcept {
  if (first < 0) first = 0;
  if (last > prepared.tokens) last = prepared.tokens;
  if (first >= last) return;
  const detail::FpState state;
  const detail::PartRun parts[3] = {{plan, prepared, 0}, {plan, prepared, 1}, {plan, prepared, 2}};
  std::int64_t written = 0;
  for (std::int64_t t = first; t < last; t += detail::PartRun::kGroup) {
    const std::int64_t count = last - t < detail::PartRun::kGroup ? last - t : detail::PartRun::kGroup;
    const std::int64_t b = t / prepared.call.sequence, s = t % prepared.call.sequence;
    for (const detail::PartRun& part : parts) written += part.run(t, count, b, s);
  }
  if (prepared.stream_out || prepared.stream_rows) detail::store_fence();
  detail::count_rows(*plan.target, written);
}

}  // namespace kvquant
