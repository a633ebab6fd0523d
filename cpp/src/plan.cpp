// make_plan: every check that needs metadata only (I5-I8), and the choice of kernels. Reads no data.
#include <initializer_list>

#include "check.hpp"
#include "dispatch.hpp"

namespace kvquant {
namespace detail {
namespace {

constexpr std::int64_t set_of(DType dtype) { return std::int64_t{1} << static_cast<int>(dtype); }
constexpr std::int64_t kFloats = set_of(DType::float16) | set_of(DType::bfloat16) | set_of(DType::float32);
constexpr std::int64_t kIndexTypes = set_of(DType::int32) | set_of(DType::int64);

// So that sums and byte counts of columns can't overflow.
constexpr std::int64_t kMostColumns = std::int64_t{1} << 40;

// From about this row length on the column vectors of int32 x no longer stay in the first-level cache from token to token.
constexpr std::int64_t kBlockedColumns = 3072;

// A vector may be strided; every other operand has unit stride on its last axis (I5).
enum class Layout { vector, unit_stride };

class Planner {
 public:
  Planner(Plan& plan) : plan_(plan), views_(plan.operands) {}
  Status make();

 private:
  const View& at(Argument argument) const { return views_[argument]; }
  bool given(Argument argument) const { return at(argument).dtype != DType::none; }

  static Status check_dtype(Argument argument, const View& view, std::int64_t allowed) {
    if (view.dtype == DType::none) return fault(Code::missing, argument);
    const auto code = static_cast<int>(view.dtype);
    if (code < 0 || code > 31 || !(allowed >> code & 1)) return fault(Code::dtype, argument, code, allowed);
    return {};
  }
  // A length below zero in `expected` stands for any length.
  static Status check_shape(Argument argument, const View& view, Layout layout, std::int32_t ndim,
                            std::int64_t e0, std::int64_t e1 = -1, std::int64_t e2 = -1, std::int64_t e3 = -1) {
    const std::int64_t expected[4] = {e0, e1, e2, e3};
    if (view.ndim != ndim) return fault(Code::ndim, argument, view.ndim, ndim);
    bool empty = false;  // then its strides mean nothing
    for (int i = 0; i < ndim; ++i) {
      if (expected[i] < 0 && view.shape[i] < 0) return fault(Code::too_few, argument, view.shape[i], 0, i);
      if (expected[i] >= 0 && view.shape[i] != expected[i]) return fault(Code::shape, argument, view.shape[i], expected[i], i);
      empty |= view.shape[i] == 0;
    }
    if (layout == Layout::unit_stride && !empty && view.shape[ndim - 1] > 1 && view.strides[ndim - 1] != item_size(view.dtype))
      return fault(Code::unit_stride, argument, view.strides[ndim - 1], item_size(view.dtype), ndim - 1);
    return {};
  }
  // Heads times D, with heads on this axis and D on the next.
  static Status check_width(Argument argument, const View& view, int axis, std::int64_t dim) {
    const std::int64_t heads = view.shape[axis];
    if (heads < 0) return fault(Code::too_few, argument, heads, 0, axis);
    if (dim > kMostColumns) return fault(Code::too_large, argument, dim, kMostColumns, axis + 1);
    if (heads > kMostColumns / dim) return fault(Code::too_large, argument, heads, kMostColumns / dim, axis);
    return {};
  }
  // [B,S,tail...] or, for two-dimensional x, [B,tail...].
  Status check_tokens(Argument argument, std::int64_t tail0, std::int64_t tail1) const {
    return plan_.three_d ? check_shape(argument, at(argument), Layout::unit_stride, 4, plan_.batch, plan_.sequence, tail0, tail1)
           : tail0 < 0   ? check_shape(argument, at(argument), Layout::unit_stride, 2, plan_.batch, tail1)
                         : check_shape(argument, at(argument), Layout::unit_stride, 3, plan_.batch, tail0, tail1);
  }

  Status check_options() const;
  Status check_caches();
  Status check_source();
  Status check_rotation();
  Status check_table(Argument argument) const;
  Status check_indices() const;
  Status check_outputs();
  Status check_scales();
  Status check_columns();
  Status check_vendor() const;
  void choose_kernels();

  Plan& plan_;
  Operands& views_;
};

Status Planner::check_options() const {
  const Options& options = plan_.options;
  const auto mode = static_cast<std::int64_t>(options.cache_mode), numerics = static_cast<std::int64_t>(options.numerics);
  if (mode != 0 && mode != 1) return fault(Code::option, Argument::cache_mode, mode);
  if (numerics != 0 && numerics != 1) return fault(Code::option, Argument::numerics, numerics);
  return {};
}

Status Planner::check_caches() {
  for (const Argument argument : {Argument::k_cache, Argument::v_cache}) {
    if (Status s = check_dtype(argument, at(argument), set_of(DType::int8))) return s;
    if (Status s = check_shape(argument, at(argument), Layout::unit_stride, 4, -1, -1, -1, -1)) return s;
    if (at(argument).read_only) return fault(Code::read_only, argument);
  }
  const View& k = at(Argument::k_cache);
  for (int i = 0; i < 4; ++i)
    if (at(Argument::v_cache).shape[i] != k.shape[i])
      return fault(Code::shape, Argument::v_cache, at(Argument::v_cache).shape[i], k.shape[i], i);
  for (int i = 0; i < 2; ++i)
    if (k.shape[i] == 0) return fault(Code::too_few, Argument::k_cache, 0, 1, i);
  plan_.heads_kv = k.shape[2];
  plan_.dim = k.shape[3];
  if (plan_.heads_kv == 0) return fault(Code::heads, Argument::k_cache, 0);
  if (plan_.dim == 0 || plan_.dim % 2) return fault(Code::head_dim, Argument::k_cache, plan_.dim);
  return check_width(Argument::k_cache, k, 2, plan_.dim);
}

// x, or the three sources: sets B, S, Nq and the streams' strides.
Status Planner::check_source() {
  plan_.packed = given(Argument::x);
  const Argument arguments[3] = {Argument::q_source, Argument::k_source, Argument::v_source};
  const Argument leading = plan_.packed ? Argument::x : Argument::q_source;
  if (!plan_.packed && !given(Argument::q_source)) return fault(Code::missing, Argument::x);
  const View& first = at(leading);
  const std::int64_t allowed = set_of(DType::int32) | set_of(at(Argument::cos).dtype);
  if (Status s = check_dtype(leading, first, allowed)) return s;
  const int flat = plan_.packed ? 2 : 3;  // dimensions without the sequence axis
  if (first.ndim != flat && first.ndim != flat + 1) return fault(Code::ndim, leading, first.ndim, flat + 1);
  plan_.three_d = first.ndim == flat + 1;
  plan_.integer_x = first.dtype == DType::int32;
  plan_.batch = first.shape[0];
  plan_.sequence = plan_.three_d ? first.shape[1] : 1;
  std::int64_t tokens = 0;
  if (Status s = count_tokens(leading, plan_.batch, plan_.sequence, tokens)) return s;

  const std::int64_t columns_kv = plan_.heads_kv * plan_.dim;
  if (plan_.packed) {
    const std::int64_t* splits = plan_.operands.size_splits;
    for (int i = 1; i < 3; ++i)
      if (splits[i] != columns_kv) return fault(Code::shape, Argument::size_splits, splits[i], columns_kv, -1, i);
    if (splits[0] < 0) return fault(Code::too_few, Argument::size_splits, splits[0], 0, -1, 0);
    if (splits[0] > kMostColumns) return fault(Code::too_large, Argument::size_splits, splits[0], kMostColumns, -1, 0);
    if (splits[0] % plan_.dim)
      return fault(Code::shape, Argument::size_splits, splits[0], (splits[0] / plan_.dim + 1) * plan_.dim, -1, 0);
    plan_.heads_q = splits[0] / plan_.dim;
    const std::int64_t columns = splits[0] + 2 * columns_kv;
    if (Status s = plan_.three_d ? check_shape(leading, first, Layout::unit_stride, 3, -1, -1, columns)
                                 : check_shape(leading, first, Layout::unit_stride, 2, -1, columns))
      return s;
  } else {
    plan_.heads_q = first.shape[plan_.three_d ? 2 : 1];
    if (Status s = check_width(leading, first, plan_.three_d ? 2 : 1, plan_.dim)) return s;
    for (int i = 0; i < 3; ++i) {
      if (Status s = check_dtype(arguments[i], at(arguments[i]), set_of(first.dtype))) return s;
      if (Status s = check_tokens(arguments[i], i == 0 ? plan_.heads_q : plan_.heads_kv, plan_.dim)) return s;
    }
  }
  std::int64_t column = 0;
  for (int i = 0; i < 3; ++i) {
    Stream& stream = plan_.streams[i];
    stream.argument = plan_.packed ? Argument::x : arguments[i];
    stream.heads = i == 0 ? plan_.heads_q : plan_.heads_kv;
    stream.first_column = column;
    const View& view = at(stream.argument);
    stream.batch = view.strides[0];
    stream.sequence = plan_.three_d ? view.strides[1] : 0;
    stream.head = plan_.packed ? plan_.dim * item_size(view.dtype) : view.strides[plan_.three_d ? 2 : 1];
    stream.origin = plan_.packed ? column * item_size(view.dtype) : 0;
    column += stream.heads * plan_.dim;
  }
  return {};
}

Status Planner::check_rotation() {
  const View& cos = at(Argument::cos);
  for (const Argument argument : {Argument::cos, Argument::sin}) {
    if (Status s = check_dtype(argument, at(argument), set_of(cos.dtype))) return s;
    if (Status s = given(Argument::positions) ? check_table(argument) : check_tokens(argument, plan_.three_d ? 1 : -1, plan_.dim))
      return s;
  }
  plan_.table_half = cos.shape[cos.ndim - 1] < plan_.dim ? 0 : plan_.dim / 2;
  if (!given(Argument::positions)) return {};
  if (Status s = check_dtype(Argument::positions, at(Argument::positions), kIndexTypes)) return s;
  return check_shape(Argument::positions, at(Argument::positions), Layout::vector, 1, plan_.batch * plan_.sequence);
}

// I10: [P,D] or [P,D/2], sin as cos.
Status Planner::check_table(Argument argument) const {
  const View &view = at(argument), &cos = at(Argument::cos);
  if (Status s = check_shape(argument, view, Layout::unit_stride, 2, -1, -1)) return s;
  if (view.shape[1] != plan_.dim && view.shape[1] != plan_.dim / 2)
    return fault(Code::table_shape, argument, view.shape[1], plan_.dim);
  for (int i = 0; i < 2; ++i)
    if (view.shape[i] != cos.shape[i]) return fault(Code::shape, argument, view.shape[i], cos.shape[i], i);
  return {};
}

Status Planner::check_indices() const {
  const View& view = at(Argument::indices);
  const bool page = plan_.options.cache_mode == CacheMode::page;
  if (Status s = check_dtype(Argument::indices, view, kIndexTypes)) return s;
  if (Status s = check_shape(Argument::indices, view, Layout::vector, 1, page ? plan_.batch * plan_.sequence : plan_.batch))
    return s;
  if (!page && at(Argument::k_cache).shape[0] < plan_.batch)
    return fault(Code::too_few, Argument::k_cache, at(Argument::k_cache).shape[0], plan_.batch, 0);
  return {};
}

Status Planner::check_outputs() {
  const Argument outputs[3] = {Argument::q, Argument::k, Argument::v};
  const DType dtype = at(Argument::cos).dtype;
  for (int i = 0; i < 3; ++i) {
    Stream& stream = plan_.streams[i];
    View& view = views_[outputs[i]];
    if (i > 0 && !plan_.options.kv_output) {
      if (view.dtype != DType::none) return fault(Code::unexpected, outputs[i]);
      continue;
    }
    if (view.dtype == DType::none) {
      const std::int64_t shape[4] = {plan_.batch, plan_.three_d ? plan_.sequence : stream.heads,
                                     plan_.three_d ? stream.heads : plan_.dim, plan_.dim};
      view = contiguous_view(nullptr, dtype, plan_.three_d ? 4 : 3, shape);
    } else {
      if (Status s = check_dtype(outputs[i], view, set_of(dtype))) return s;
      if (Status s = check_tokens(outputs[i], stream.heads, plan_.dim)) return s;
      if (view.read_only) return fault(Code::read_only, outputs[i]);
    }
    stream.out_batch = view.strides[0];
    stream.out_sequence = plan_.three_d ? view.strides[1] : 0;
    stream.out_head = view.strides[plan_.three_d ? 2 : 1];
  }
  return {};
}

// A stride may be anything here; check_extents refuses those that would overflow.
std::int64_t wrapping_product(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}

Status Planner::check_scales() {
  const std::int64_t heads = plan_.heads_kv, dim = plan_.dim;
  ChannelSteps* steps = plan_.channel_steps;
  for (const Argument argument : {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v}) {
    const View& view = at(argument);
    const bool optional = argument == Argument::offset_k || argument == Argument::offset_v;
    ChannelSteps& step = *steps++;
    if (optional && !given(argument)) continue;
    if (Status s = check_dtype(argument, view, set_of(DType::float32))) return s;
    if (view.ndim == 0 || (view.ndim == 1 && view.shape[0] == 1)) step = {};
    else if (view.ndim == 1 && view.shape[0] == heads * dim) step = {wrapping_product(dim, view.strides[0]), view.strides[0]};
    else if (view.ndim == 2 && view.shape[0] == heads && view.shape[1] == dim) step = {view.strides[0], view.strides[1]};
    else if (view.ndim == 2 && view.shape[0] == heads && view.shape[1] == 1) step = {view.strides[0], 0};
    else if (view.ndim != 1 && view.ndim != 2) return fault(Code::scale_shape, argument, view.ndim);
    else if (view.ndim == 1) return fault(Code::scale_shape, argument, view.shape[0], heads * dim, 0);
    else if (view.shape[0] != heads) return fault(Code::scale_shape, argument, view.shape[0], heads, 0);
    else return fault(Code::scale_shape, argument, view.shape[1], dim, 1);
  }
  return {};
}

// weight_scale, activation_scale and bias of integer x (C2); for float x they are not looked at (C3).
Status Planner::check_columns() {
  if (!plan_.integer_x) return {};
  const std::int64_t columns = plan_.streams[2].first_column + plan_.heads_kv * plan_.dim;
  const View& weight_scale = at(Argument::weight_scale);
  if (Status s = check_dtype(Argument::weight_scale, weight_scale, set_of(DType::float32))) return s;
  if (Status s = check_shape(Argument::weight_scale, weight_scale, Layout::vector, 1, columns)) return s;
  plan_.pack_columns = weight_scale.strides[0] != 4;
  if (given(Argument::activation_scale)) {
    const View& view = at(Argument::activation_scale);
    if (Status s = check_dtype(Argument::activation_scale, view, set_of(DType::float32))) return s;
    if (Status s = check_shape(Argument::activation_scale, view, Layout::vector, 1, plan_.batch * plan_.sequence)) return s;
  }
  if (given(Argument::bias)) {
    const View& view = at(Argument::bias);
    if (Status s = check_dtype(Argument::bias, view, kFloats | set_of(DType::int32))) return s;
    if (Status s = check_shape(Argument::bias, view, Layout::vector, 1, columns)) return s;
    plan_.pack_columns |= item_size(view.dtype) != 4 || view.strides[0] != 4;
  } else {
    plan_.pack_columns = true;
  }
  return {};
}

bool is_contiguous(const View& view) {
  for (int i = 0; i < view.ndim; ++i)
    if (view.shape[i] == 0) return true;
  std::int64_t expected = item_size(view.dtype);
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] > 1 && view.strides[i] != expected) return false;
    if (__builtin_mul_overflow(expected, view.shape[i], &expected)) return false;
  }
  return true;
}

Status Planner::check_vendor() const {
  const auto refuse = [](Argument argument, VendorRule rule, std::int64_t got) {
    return fault(Code::vendor, argument, got, static_cast<std::int64_t>(rule));
  };
  const std::int64_t columns = plan_.streams[2].first_column + plan_.heads_kv * plan_.dim;
  if (at(Argument::cos).dtype == DType::float32)
    return fault(Code::vendor_dtype, Argument::cos, static_cast<std::int64_t>(DType::float32));
  if (at(Argument::indices).dtype == DType::int64)
    return fault(Code::vendor_dtype, Argument::indices, static_cast<std::int64_t>(DType::int64));
  if (columns > 4096) return refuse(Argument::x, VendorRule::h_limit, columns);
  if (columns % 64) return refuse(Argument::x, VendorRule::h_multiple, columns);
  if (plan_.dim % 16) return refuse(Argument::k_cache, VendorRule::d_multiple, plan_.dim);
  if (given(Argument::offset_k) != given(Argument::offset_v))
    return refuse(given(Argument::offset_k) ? Argument::offset_v : Argument::offset_k, VendorRule::lone_offset, 0);
  if (given(Argument::positions)) return refuse(Argument::positions, VendorRule::positions, at(Argument::positions).shape[0]);
  if (plan_.options.skip_padding) return refuse(Argument::padding_index, VendorRule::padding, -1);
  if (plan_.options.allow_duplicates) return refuse(Argument::allow_duplicates, VendorRule::duplicates, 1);
  for (const Argument argument : {Argument::k_cache, Argument::v_cache, Argument::q, Argument::k, Argument::v})
    if (given(argument) && !is_contiguous(at(argument))) return refuse(argument, VendorRule::strided, at(argument).strides[0]);
  for (const Argument argument : {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v}) {
    const View& view = at(argument);
    if (given(argument) && (view.ndim == 0 || view.shape[view.ndim - 1] == 1))
      return refuse(argument, VendorRule::scale_shape, view.ndim);
  }
  return {};
}

void Planner::choose_kernels() {
  const Source source = !plan_.integer_x                                  ? kFloat
                        : at(Argument::bias).dtype == DType::int32 ? kInt32IntBias
                                                                   : kInt32FloatBias;
  const DType dtype = at(Argument::cos).dtype;
  const Output output = dtype == DType::float16 ? kFloat16 : dtype == DType::bfloat16 ? kBfloat16 : kFloat32;
  const Kernel(&jobs)[kJobs] = plan_.target->table->kernels[static_cast<int>(plan_.options.numerics)][source][output];
  const bool out = plan_.options.kv_output;
  const auto set = [&](Stream& stream, Kernel cached, Kernel uncached) {
    stream.cached = cached;
    stream.uncached = uncached;
  };
  set(plan_.streams[0], jobs[kRotateOut], jobs[kRotateOut]);
  set(plan_.streams[1], jobs[out ? kRotateCacheOut : kRotateCache], out ? jobs[kRotateOut] : nullptr);
  set(plan_.streams[2], jobs[out ? kCacheOut : kCache], out ? jobs[kOut] : nullptr);
  if (source == kFloat && output == kBfloat16 && !out && (plan_.dim == 64 || plan_.dim == 128 || plan_.dim == 256))
    plan_.together = plan_.target->table->together_bfloat16;
}

Status Planner::make() {
  if (Status s = check_options()) return s;
  if (Status s = check_dtype(Argument::cos, at(Argument::cos), kFloats)) return s;
  if (Status s = check_caches()) return s;
  if (Status s = check_source()) return s;
  if (Status s = check_rotation()) return s;
  if (Status s = check_indices()) return s;
  if (Status s = check_outputs()) return s;
  if (Status s = check_scales()) return s;
  if (Status s = check_columns()) return s;
  if (plan_.options.vendor_limits)
    if (Status s = check_vendor()) return s;
  if (Status s = check_extents(plan_, plan_.batch, plan_.sequence, plan_.extents)) return s;
  if (Status s = find_target(plan_.options.isa, plan_.target)) return s;
  choose_kernels();
  // Measured: 16 quotients take 10 cycles on Intel and 2.5 on Zen 5, and Zen 4 gains nothing by reciprocals. Intel reads int32 x
  // from its third-level cache a fifth faster in order (W1: 62 us instead of 77), Zen 5 is faster with cos and sin in registers;
  // AArch64, not measured, does as Intel.
  const FixedPoint fixed_point = plan_.target->table->fixed_point;
  plan_.use_reciprocals = fixed_point == FixedPoint::everywhere || (fixed_point == FixedPoint::where_division_is_slow && !is_amd());
  plan_.order = columns_of(plan_) >= kBlockedColumns ? kTokenBlocks : is_amd() ? kHeadsInside : kHeadsOutside;
  return {};
}

}  // namespace
}  // namespace detail

View contiguous_view(const void* data, DType dtype, std::int32_t ndim, const std::int64_t* shape) noexcept {
  View view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.ndim = ndim;
  std::int64_t stride = detail::item_size(dtype);
  for (int i = ndim - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    if (__builtin_mul_overflow(stride, shape[i], &stride)) stride = 0;  // refused later: the axes do not nest
  }
  return view;
}

Status make_plan(const Operands& operands, const Options& options, Plan& plan) noexcept {
  if (&operands != &plan.operands) plan.operands = operands;
  if (&options != &plan.options) plan.options = options;
  return detail::Planner(plan).make();
}

}  // namespace kvquant
