// prepare: reads every index and position once and checks it, has scales and offsets checked and packed (channels.cpp), and turns
// layouts, padding and duplicates into one pointer per token and cache. After it nothing can fail (I4).
#include <cstring>

#include "check.hpp"
#include "dispatch.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "simd/half.hpp"

// Non-temporal stores: for cache rows, which nobody reads back before attention does, from the first few tokens on; for
// outputs where a thread's part of x and them exceeds the second-level cache, so that they would be written back anyway.
constexpr std::int64_t kStreamRowBytes = 16384, kStreamOutBytes = std::int64_t{2} << 20;

// Byte offsets of the workspace's pieces.
struct Layout {
  std::size_t per_channel, weight_scale, bias, k_rows, v_rows, cos_rows, sin_rows, slots, bytes;
  std::uint32_t slot_mask;  // slots - 1; 0: no table needed
};

Layout layout_of(const Plan& plan, std::int64_t tokens) {
  Layout layout{};
  std::size_t at = 0;
  const auto take = [&](std::size_t bytes) {
    const std::size_t begin = at;
    at += (bytes + kAlign - 1) / kAlign * kAlign;
    return begin;
  };
  const std::size_t columns = plan.pack_columns ? static_cast<std::size_t>(columns_of(plan)) : 0;
  const auto rows = static_cast<std::size_t>(tokens) * sizeof(std::int8_t*);
  layout.per_channel = take(static_cast<std::size_t>(channel_floats(plan)) * sizeof(float));
  layout.weight_scale = take(columns * sizeof(float));
  layout.bias = take(columns * sizeof(float));
  layout.k_rows = take(rows);
  layout.v_rows = take(rows);
  if (plan.operands[Argument::positions].dtype != DType::none) {
    layout.cos_rows = take(rows);
    layout.sin_rows = take(rows);
  }
  if (plan.options.cache_mode == CacheMode::page && tokens > 1) {
    std::uint32_t slots = 4;
    // Eight for each token, as long as the first-level cache holds them, then two: each collision is a mispredicted branch.
    while (slots < 2 * static_cast<std::uint32_t>(tokens) || (slots < 4096 && slots < 8 * static_cast<std::uint32_t>(tokens)))
      slots *= 2;
    layout.slot_mask = slots - 1;
    layout.slots = take(slots * sizeof(std::uint32_t));
  }
  layout.bytes = at;
  return layout;
}

class Preparer {
 public:
  Preparer(const Plan& plan, const Call& call, std::int64_t tokens, char* workspace, Prepared& out)
      : plan_(plan), call_(call), tokens_(tokens), workspace_(workspace), layout_(layout_of(plan, tokens)), out_(out) {}

  Status check_memory() const;
  void pack_columns();
  Status resolve_positions();
  Status resolve_rows();
  void choose_stores();
  const Layout& layout() const { return layout_; }

 private:
  // Out of line: it would take the registers of a loop that hardly ever needs it.
  __attribute__((noinline)) Status check_overlap(Argument argument, Argument other) const;
  bool given(Argument argument) const { return plan_.operands[argument].dtype != DType::none; }
  template <class Index> Status resolve_page();
  template <class Index> Status resolve_contiguous();
  template <class Index> Status resolve_tables();
  Status resolve_duplicates(std::int64_t tokens);

  std::int8_t** k_rows() const { return reinterpret_cast<std::int8_t**>(workspace_ + layout_.k_rows); }
  std::int8_t** v_rows() const { return reinterpret_cast<std::int8_t**>(workspace_ + layout_.v_rows); }

  const Plan& plan_;
  const Call& call_;
  const std::int64_t tokens_;
  char* workspace_;
  const Layout layout_;
  Prepared& out_;
};

// I5a over this call's pointers; also refuses missing pointers.
Status Preparer::check_memory() const {
  Extents resized_extents;
  const Extents* extents = &plan_.extents;
  if (call_.batch != plan_.batch || call_.sequence != plan_.sequence) {
    if (Status s = check_extents(plan_, call_.batch, call_.sequence, resized_extents)) return s;
    extents = &resized_extents;
  }
  struct {
    std::uintptr_t low, high;
  } ranges[kOperandCount];
  for (int i = 0; i < extents->count; ++i) {
    const auto& extent = extents->of[i];
    const auto data = reinterpret_cast<std::uintptr_t>(call_[extent.argument]);
    if (!data) return fault(Code::missing, extent.argument);
    ranges[i] = {data + static_cast<std::uintptr_t>(extent.bytes.low), data + static_cast<std::uintptr_t>(extent.bytes.high)};
  }
  for (int j = 0; j < extents->written; ++j) {
    const auto written = ranges[j];
    for (int i = j + 1; i < extents->count; ++i)
      if (ranges[i].low < written.high && written.low < ranges[i].high)
        if (Status s = check_overlap(extents->of[j].argument, extents->of[i].argument)) return s;
  }
  return {};
}

// Of two operands whose extents overlap: do they share a byte?
Status Preparer::check_overlap(Argument argument, Argument other) const {
  View a = resized(plan_, argument, call_.batch, call_.sequence), b = resized(plan_, other, call_.batch, call_.sequence);
  a.data = call_[argument];
  b.data = call_[other];
  if (!share_memory(a, b)) return {};
  Status status = fault(Code::overlap, argument);
  status.other = other;
  return status;
}

// weight_scale and bias as the kernels read them: unit stride, 32 bits. Their values are not checked (C6), so where the
// caller's memory has that form already it is read in place.
void Preparer::pack_columns() {
  out_.weight_scale = static_cast<const float*>(call_[Argument::weight_scale]);
  out_.bias = call_[Argument::bias];
  if (!plan_.pack_columns) return;
  auto* weight_scale = reinterpret_cast<std::uint32_t*>(workspace_ + layout_.weight_scale);
  auto* bias = reinterpret_cast<std::uint32_t*>(workspace_ + layout_.bias);
  const std::int64_t columns = columns_of(plan_);
  const View& source = plan_.operands[Argument::bias];
  const std::int64_t weight_stride = plan_.operands[Argument::weight_scale].strides[0], bias_stride = source.strides[0];
  for (std::int64_t c = 0; c < columns; ++c)
    weight_scale[c] = read<std::uint32_t>(call_[Argument::weight_scale], c * weight_stride);
  for (std::int64_t c = 0; c < columns; ++c) switch (source.dtype) {
      case DType::none: bias[c] = 0x80000000u; break;  // adding -0.0 keeps every bit
      case DType::float16: bias[c] = widen_float16(read<std::uint16_t>(call_[Argument::bias], c * bias_stride)); break;
      case DType::bfloat16: bias[c] = std::uint32_t{read<std::uint16_t>(call_[Argument::bias], c * bias_stride)} << 16; break;
      default: bias[c] = read<std::uint32_t>(call_[Argument::bias], c * bias_stride); break;
    }
  out_.weight_scale = reinterpret_cast<const float*>(weight_scale);
  out_.bias = bias;
}

// I10: where cos and sin are tables, the row of each token.
Status Preparer::resolve_positions() {
  out_.cos_rows = out_.sin_rows = nullptr;
  if (!given(Argument::positions)) return {};
  const bool wide = plan_.operands[Argument::positions].dtype == DType::int64;
  return wide ? resolve_tables<std::int64_t>() : resolve_tables<std::int32_t>();
}

template <class Index>
Status Preparer::resolve_tables() {
  const View &cos = plan_.operands[Argument::cos], &sin = plan_.operands[Argument::sin];
  const auto *const cos_base = static_cast<const char*>(call_[Argument::cos]),
             *const sin_base = static_cast<const char*>(call_[Argument::sin]);
  auto *const cos_row = reinterpret_cast<const char**>(workspace_ + layout_.cos_rows),
       *const sin_row = reinterpret_cast<const char**>(workspace_ + layout_.sin_rows);
  const std::int64_t stride = plan_.operands[Argument::positions].strides[0], limit = cos.shape[0];
  for (std::int64_t t = 0; t < tokens_; ++t) {
    const std::int64_t position = read<Index>(call_[Argument::positions], t * stride);
    if (position < 0 || position >= limit) return fault(Code::index, Argument::positions, position, limit, -1, t);
    cos_row[t] = cos_base + position * cos.strides[0];
    sin_row[t] = sin_base + position * sin.strides[0];
  }
  out_.cos_rows = cos_row;
  out_.sin_rows = sin_row;
  return {};
}

Status Preparer::resolve_rows() {
  out_.k_rows = k_rows();
  out_.v_rows = v_rows();
  const bool wide = plan_.operands[Argument::indices].dtype == DType::int64;
  if (plan_.options.cache_mode == CacheMode::contiguous)
    return wide ? resolve_contiguous<std::int64_t>() : resolve_contiguous<std::int32_t>();
  return wide ? resolve_page<std::int64_t>() : resolve_page<std::int32_t>();
}

// I1: token s of batch b goes to cache[b, indices[b] + s].
template <class Index>
Status Preparer::resolve_contiguous() {
  const View &k = plan_.operands[Argument::k_cache], &v = plan_.operands[Argument::v_cache];
  auto* const k_base = static_cast<std::int8_t*>(call_[Argument::k_cache]);
  auto* const v_base = static_cast<std::int8_t*>(call_[Argument::v_cache]);
  const std::int64_t stride = plan_.operands[Argument::indices].strides[0], limit = k.shape[1] - call_.sequence + 1;
  std::int8_t **k_row = k_rows(), **v_row = v_rows();
  for (std::int64_t b = 0; b < call_.batch; ++b) {
    const std::int64_t index = read<Index>(call_[Argument::indices], b * stride);
    const bool skip = index == -1 && plan_.options.skip_padding;
    if (!skip && (index < 0 || index >= limit)) return fault(Code::index, Argument::indices, index, limit, -1, b);
    for (std::int64_t s = 0; s < call_.sequence; ++s) {
      *k_row++ = skip ? nullptr : k_base + (b * k.strides[0] + (index + s) * k.strides[1]);
      *v_row++ = skip ? nullptr : v_base + (b * v.strides[0] + (index + s) * v.strides[1]);
    }
  }
  return {};
}

// I2: token t goes to row indices[t] of the cache seen as [C1*C2, Nkv, D].
template <class Index>
Status Preparer::resolve_page() {
  const View &k = plan_.operands[Argument::k_cache], &v = plan_.operands[Argument::v_cache];
  auto* const k_base = static_cast<std::int8_t*>(call_[Argument::k_cache]);
  auto* const v_base = static_cast<std::int8_t*>(call_[Argument::v_cache]);
  const std::int64_t stride = plan_.operands[Argument::indices].strides[0];
  const std::int64_t page = k.shape[1], limit = k.shape[0] * page;
  // Pages that follow each other without a gap need no division.
  const bool gapless = k.strides[0] == page * k.strides[1] && v.strides[0] == page * v.strides[1];
  std::int8_t **k_row = k_rows(), **v_row = v_rows();
  std::int64_t previous = -1;
  bool ascending = true;
  for (std::int64_t t = 0; t < tokens_; ++t) {
    const std::int64_t index = read<Index>(call_[Argument::indices], t * stride);
    if (index == -1 && plan_.options.skip_padding) {
      k_row[t] = v_row[t] = nullptr;
      continue;
    }
    if (index < 0 || index >= limit) {
      if (!ascending && !plan_.options.allow_duplicates)
        if (Status s = resolve_duplicates(t)) return s;  // the first fault in the order of the indices is reported
      return fault(Code::index, Argument::indices, index, limit, -1, t);
    }
    const std::int64_t block = gapless ? 0 : index / page, slot = index - block * page;
    k_row[t] = k_base + (block * k.strides[0] + slot * k.strides[1]);
    v_row[t] = v_base + (block * v.strides[0] + slot * v.strides[1]);
    ascending &= index > previous;
    previous = index;
  }
  return ascending ? Status{} : resolve_duplicates(tokens_);
}

// Finds tokens, among the first `tokens`, with the same row by a hash table of token numbers, keyed by the row's address (rows
// of a nesting cache have different addresses). The later token takes the place of the earlier one, or is an error.
Status Preparer::resolve_duplicates(std::int64_t tokens) {
  auto* slots = reinterpret_cast<std::uint32_t*>(workspace_ + layout_.slots);
  std::memset(slots, 0, (std::size_t{layout_.slot_mask} + 1) * sizeof(std::uint32_t));
  std::int8_t **k_row = k_rows(), **v_row = v_rows();
  // An odd factor that the process's address space, and so nobody who chooses indices, decides; its product's upper bits.
  const std::uint64_t factor = reinterpret_cast<std::uintptr_t>(workspace_) * 0xBF58476D1CE4E5B9u ^ 0x9E3779B97F4A7C15u;
  const int shift = 32 + __builtin_clz(layout_.slot_mask);
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!k_row[t]) continue;
    const std::uint64_t hash = reinterpret_cast<std::uintptr_t>(k_row[t]) * (factor | 1u);
    for (auto at = static_cast<std::uint32_t>(hash >> shift);; at = (at + 1) & layout_.slot_mask) {
      const std::uint32_t entry = slots[at];  // token number + 1; 0: free
      if (entry == 0) {
        slots[at] = static_cast<std::uint32_t>(t + 1);
        break;
      }
      const std::int64_t earlier = entry - 1;
      if (k_row[earlier] != k_row[t]) continue;
      if (!plan_.options.allow_duplicates) {
        // Read again for the message only.
        const View& view = plan_.operands[Argument::indices];
        const std::int64_t index = view.dtype == DType::int64
                                       ? read<std::int64_t>(call_[Argument::indices], t * view.strides[0])
                                       : read<std::int32_t>(call_[Argument::indices], t * view.strides[0]);
        return fault(Code::duplicate, Argument::indices, index, earlier, -1, t);
      }
      k_row[earlier] = v_row[earlier] = nullptr;
      slots[at] = static_cast<std::uint32_t>(t + 1);
      break;
    }
  }
  return {};
}

// Where non-temporal stores win; they need whole, aligned cache lines. On Intel, half lines of several heads at a time fill the
// buffers that would combine them: 64 rows of 1 KB (W2) then take 184 us instead of 43.
void Preparer::choose_stores() {
  const auto address = [&](Argument argument) { return reinterpret_cast<std::uintptr_t>(call_[argument]); };
  const View &k = plan_.operands[Argument::k_cache], &v = plan_.operands[Argument::v_cache];
  const std::int64_t row_bytes = 2 * tokens_ * columns_kv(plan_);
  out_.stream_rows = plan_.target->table->writes_whole_lines && row_bytes >= kStreamRowBytes &&
                     (plan_.dim % 128 == 0 || plan_.dim == 64) &&
                     all_aligned(address(Argument::k_cache), address(Argument::v_cache), plan_.dim, k.strides[0], k.strides[1],
                                 k.strides[2], v.strides[0], v.strides[1], v.strides[2]);
  const std::int64_t item = item_size(plan_.operands[Argument::cos].dtype), x_item = plan_.integer_x ? 4 : item;
  const std::int64_t threads = call_.threads > 1 ? call_.threads : 1;
  out_.stream_out = tokens_ * columns_of(plan_) * (x_item + item) >= kStreamOutBytes * threads;
}

}  // namespace
}  // namespace detail

std::size_t workspace_size(const Plan& plan, std::int64_t tokens) noexcept {
  return tokens <= 0 || tokens > detail::kMaxTokens ? 0 : detail::layout_of(plan, tokens).bytes;
}

Status prepare(const Plan& plan, const Call& call, void* workspace, std::size_t workspace_bytes, Prepared& prepared) noexcept {
  using detail::fault;
  prepared.call = call;
  prepared.tokens = 0;  // until all is checked: run does nothing
  const Argument source = plan.packed ? Argument::x : Argument::q_source;
  std::int64_t tokens = 0;
  if (Status s = detail::count_tokens(source, call.batch, call.sequence, tokens)) return s;
  if (!plan.three_d && call.sequence != 1) return fault(Code::shape, source, call.sequence, 1, 1);
  const View& cache = plan.operands[Argument::k_cache];
  if (plan.options.cache_mode == CacheMode::contiguous && call.batch > cache.shape[0])
    return fault(Code::too_few, Argument::k_cache, cache.shape[0], call.batch, 0);
  if (tokens == 0) return {};  // I7
  detail::Preparer preparer(plan, call, tokens, static_cast<char*>(workspace), prepared);
  const std::size_t needed = preparer.layout().bytes;
  Status status;
  if (workspace_bytes < needed || !workspace || reinterpret_cast<std::uintptr_t>(workspace) % detail::kAlign)
    status = fault(Code::workspace, Argument::workspace, static_cast<std::int64_t>(workspace_bytes), static_cast<std::int64_t>(needed));
  if (!status) status = preparer.check_memory();
  if (!status) {
    char* const channels = static_cast<char*>(workspace) + preparer.layout().per_channel;
    status = detail::pack_channels(plan, call, tokens, reinterpret_cast<float*>(channels), prepared);
  }
  if (!status) status = preparer.resolve_positions();
  if (!status) status = preparer.resolve_rows();
  if (!status && plan.integer_x) preparer.pack_columns();
  if (status) return status;
  preparer.choose_stores();
  prepared.tokens = tokens;
  return {};
}

}  // namespace kvquant
