// I5a: do two strided arrays share a byte? Do the axes of one array overlap each other? Integers only; no data is read.
#include <initializer_list>

#include "check.hpp"

namespace kvquant {
namespace detail {
namespace {

constexpr int kMaxSteps = 100000;

// stride * i with 0 <= i <= last: one axis of an array, or the bytes of its items.
struct Term {
  std::int64_t stride, last;
};

// The axes of up to two arrays by ascending stride, without those that do not move. No axis is empty.
struct Terms {
  Term term[10];
  int count = 0;

  void insert(Term added) {
    int at = count++;
    for (; at > 0 && term[at - 1].stride > added.stride; --at) term[at] = term[at - 1];
    term[at] = added;
  }
  void insert_axes(const View& view) {
    for (int i = 0; i < view.ndim; ++i)
      if (view.shape[i] > 1) insert({view.strides[i] < 0 ? -view.strides[i] : view.strides[i], view.shape[i] - 1});
  }
};

struct Search {
  Term terms[11];  // largest stride first
  std::int64_t reach[12];  // reach[i]: the largest sum of terms i and after
  int count;
  int steps = 0;

  // Whether terms i and after, each within its limits, can sum up to `target`.
  bool solve(int i, std::int64_t target) {
    if (target < 0 || target > reach[i]) return false;
    if (i == count || target == 0) return target == 0;
    if (++steps > kMaxSteps) return true;
    const Term& term = terms[i];
    if (term.stride == 1) return true;  // the last term: a whole interval, checked by reach
    const std::int64_t most = term.last < target / term.stride ? term.last : target / term.stride;
    const std::int64_t rest = target - reach[i + 1];
    const std::int64_t least = rest > 0 ? (rest + term.stride - 1) / term.stride : 0;
    for (std::int64_t n = most; n >= least; --n)
      if (solve(i + 1, target - n * term.stride)) return true;
    return false;
  }
};

}  // namespace

int extent_of(const View& view, Interval& extent) noexcept {
  std::int64_t low = 0, high = item_size(view.dtype);
  bool empty = false;
  int too_far = -1;
  for (int i = 0; i < view.ndim; ++i) {
    std::int64_t span = 0;
    empty |= view.shape[i] == 0;
    const bool overflow = view.shape[i] != 1 && __builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &span);
    if (too_far < 0 && (overflow || span > kMostPerAxis || span < -kMostPerAxis)) too_far = i;
    low += too_far >= 0 || span > 0 ? 0 : span;
    high += too_far >= 0 || span < 0 ? 0 : span;
  }
  extent = empty ? Interval{} : Interval{low, high};
  return empty ? -1 : too_far;
}

bool nests(const View& view) noexcept {
  for (int i = 0; i < view.ndim; ++i)
    if (view.shape[i] == 0) return true;  // its strides mean nothing, and may be too large to compute with
  std::int64_t dense = item_size(view.dtype);
  int ordered = view.ndim;  // axes that nest in the order they are in, as those of nearly every array do
  while (ordered > 0 && (view.shape[ordered - 1] == 1 || view.strides[ordered - 1] >= dense)) {
    --ordered;
    dense += (view.shape[ordered] - 1) * view.strides[ordered];
  }
  if (ordered == 0) return true;
  Terms axes;
  axes.insert_axes(view);
  std::int64_t inside = item_size(view.dtype);
  for (int i = 0; i < axes.count; ++i) {
    if (axes.term[i].stride < inside) return false;
    inside += axes.term[i].last * axes.term[i].stride;  // extent_of has shown that this does not overflow
  }
  return true;
}

bool share_memory(const View& a, const View& b) noexcept {
  Interval at, bt;
  if (extent_of(a, at) >= 0 || extent_of(b, bt) >= 0) return true;
  const auto shift = [](Interval& interval, const void* data) {
    interval.low += static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
    interval.high += static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  };
  shift(at, a.data);
  shift(bt, b.data);
  if (at.high <= bt.low || bt.high <= at.low || at.low == at.high || bt.low == bt.high) return false;
  // A byte of a lies at at.low + (sum of stride * i + byte), one of b at bt.high - 1 - (sum of stride * j + byte), every
  // term non-negative. They meet where all terms together equal bt.high - 1 - at.low.
  Search search;
  Terms all;
  for (const View* view : {&a, &b}) {
    all.insert({1, item_size(view->dtype) - 1});
    all.insert_axes(*view);
  }
  // Terms that fill a gapless interval [0, gapless] act as one of stride 1; terms of equal stride act as one with both
  // ranges. With that, the arrays of real caches leave one or two terms.
  std::int64_t gapless = 0;
  Term merged[10];
  int kept = 0;
  for (int i = 0; i < all.count; ++i) {
    const Term& term = all.term[i];
    if (kept == 0 && term.stride <= gapless + 1) gapless += term.stride * term.last;
    else if (kept > 0 && merged[kept - 1].stride == term.stride) merged[kept - 1].last += term.last;
    else merged[kept++] = term;
  }
  search.count = kept + 1;
  search.terms[kept] = {1, gapless};
  search.reach[kept + 1] = 0;
  search.reach[kept] = gapless;
  for (int i = 0; i < kept; ++i) {
    search.terms[kept - 1 - i] = merged[i];
    search.reach[kept - 1 - i] = search.reach[kept - i] + merged[i].stride * merged[i].last;
  }
  return search.solve(0, bt.high - 1 - at.low);
}

View resized(const Plan& plan, Argument argument, std::int64_t batch, std::int64_t sequence) noexcept {
  View view = plan.operands[argument];
  switch (argument) {
    case Argument::cos:
    case Argument::sin:
      if (plan.operands[Argument::positions].dtype != DType::none) break;  // tables: no token axes
      [[fallthrough]];
    case Argument::x:
    case Argument::q:
    case Argument::k:
    case Argument::v:
    case Argument::q_source:
    case Argument::k_source:
    case Argument::v_source:
      view.shape[0] = batch;
      if (plan.three_d) view.shape[1] = sequence;
      break;
    case Argument::positions:
    case Argument::activation_scale: view.shape[0] = batch * sequence; break;
    case Argument::indices: view.shape[0] = plan.options.cache_mode == CacheMode::page ? batch * sequence : batch; break;
    default: break;
  }
  return view;
}

namespace {
constexpr Argument kWrittenFirst[] = {
    Argument::k_cache, Argument::v_cache, Argument::q, Argument::k, Argument::v, Argument::x, Argument::q_source,
    Argument::k_source, Argument::v_source, Argument::cos, Argument::sin, Argument::positions, Argument::indices,
    Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v, Argument::weight_scale,
    Argument::activation_scale, Argument::bias};
static_assert(sizeof kWrittenFirst / sizeof *kWrittenFirst == kOperandCount);

Status check_extent(const View& view, Argument argument, Interval& extent) {
  const int axis = extent_of(view, extent);
  if (axis >= 0) return fault(Code::too_far, argument, view.strides[axis], kMostPerAxis / (view.shape[axis] - 1), axis);
  if (is_written(argument) && !nests(view)) return fault(Code::nesting, argument);
  return {};
}
}  // namespace

Status check_extents(const Plan& plan, std::int64_t batch, std::int64_t sequence, Extents& extents) noexcept {
  extents.written = extents.count = 0;
  const bool same = batch == plan.batch && sequence == plan.sequence;
  for (const Argument argument : kWrittenFirst) {
    if (plan.operands[argument].dtype == DType::none) continue;
    const bool columns = argument == Argument::weight_scale || argument == Argument::activation_scale || argument == Argument::bias;
    const bool source = argument >= Argument::q_source && argument <= Argument::v_source;
    if ((columns && !plan.integer_x) || (source && plan.packed)) continue;
    auto& extent = extents.of[extents.count];
    extent.argument = argument;
    if (Status s = same ? check_extent(plan.operands[argument], argument, extent.bytes)
                        : check_extent(resized(plan, argument, batch, sequence), argument, extent.bytes))
      return s;
    if (extent.bytes.low == extent.bytes.high) continue;
    ++extents.count;
    extents.written += is_written(argument);
  }
  return {};
}

}  // namespace detail
}  // namespace kvquant
