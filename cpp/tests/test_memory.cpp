// Which memory an operand covers (I5, I5a): overlap and nesting decided as by listing every byte, and offsets beyond 2^31
// and 2^32 (F01, F71).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cases.hpp"
#include "oracle.hpp"

#if defined(__linux__) && UINTPTR_MAX > 0xFFFFFFFFu
#include <sys/mman.h>
#define KVQUANT_TEST_HAS_LARGE_MEMORY 1
#endif

using namespace kvtest;
using kvquant::Argument;
using kvquant::Code;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

namespace {

std::set<char*> bytes_of(const View& view) {
  std::set<char*> bytes;
  for (char* p : elements(view))
    for (std::int64_t i = 0; i < item_size(view.dtype); ++i) bytes.insert(p + i);
  return bytes;
}

// I5a: sorted by stride, each stride is at least the bytes of all axes inside it.
bool nests(const View& view) {
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;
  for (int axis = 0; axis < view.ndim; ++axis)
    if (view.shape[axis] > 1) axes.push_back({std::abs(view.strides[axis]), view.shape[axis]});
  std::sort(axes.begin(), axes.end());
  std::int64_t inside = item_size(view.dtype);
  for (const auto& axis : axes) {
    if (axis.first < inside) return false;
    inside += (axis.second - 1) * axis.first;
  }
  return true;
}

// A view of the given shape somewhere in `memory`, strides drawn so that many nest and many interleave.
View draw_view(DType dtype, std::vector<std::int64_t> shape, char* memory, std::int64_t size, Random& random, bool written) {
  View view;
  for (;;) {
    view.dtype = dtype;
    view.ndim = static_cast<std::int32_t>(shape.size());
    std::int64_t low = 0, high = item_size(dtype), inside = high;
    std::vector<int> order;
    for (int axis = 0; axis < view.ndim - 1; ++axis) order.push_back(axis);
    random.shuffle(order);
    order.insert(order.begin(), view.ndim - 1);
    for (int axis : order) {
      const std::int64_t n = shape[static_cast<std::size_t>(axis)];
      std::int64_t stride = axis == view.ndim - 1 ? item_size(dtype) : inside * random.pick({1, 1, 2, 2, 3, 4}) + random.pick({0, 0, 0, 1, -1, 4});
      if (axis != view.ndim - 1 && random.chance(written ? 3 : 15)) stride = random.pick({0, 1, 6});
      if (axis != view.ndim - 1 && random.chance(20)) stride = -stride;
      view.shape[axis] = n;
      view.strides[axis] = stride;
      (stride < 0 ? low : high) += (n - 1) * stride;
      inside = high - low;
    }
    const std::int64_t room = size - (high - low);
    if (room < 0) continue;
    view.data = memory + random.below(room + 1) - low;
    return view;
  }
}

}  // namespace

TEST_CASE("memory: overlap and nesting equal a list of all bytes") {
  Random random(77);
  int counts[3] = {};
  for (int round = 0; round < 30000; ++round) {
    Case c;
    c.x = c.out = round % 2 == 0 ? DType::float32 : DType::bfloat16;
    c.batch = 1 + random.below(3);
    c.sequence = 1 + random.below(2);
    c.heads_q = 1 + random.below(2);
    c.heads_kv = 1 + random.below(2);
    c.dim = 2 + 2 * random.below(2);
    c.page_rows = 2;
    Setup setup(c);
    auto& [arena, a, options] = setup;
    char* const memory = arena.allocate("shared", 400, Placement::canaries);
    const View k = a[Argument::k_cache];
    Argument first = Argument::k_cache, second = Argument::v_cache;
    if (round % 4 < 2) {
      for (Argument argument : {first, second})
        a[argument] = draw_view(DType::int8, {k.shape[0], k.shape[1], k.shape[2], k.shape[3]}, memory, random.pick({100, 200, 400}), random, true);
    } else {
      first = Argument::q;
      second = Argument::x;
      a[first] = draw_view(c.out, {c.batch, c.sequence, c.heads_q, c.dim}, memory, random.pick({150, 300, 400}), random, true);
      a[second] = draw_view(c.x, {c.batch, c.sequence, (c.heads_q + 2 * c.heads_kv) * c.dim}, memory, 400, random, false);
    }
    bool shared = false;
    const std::set<char*> bytes = bytes_of(a[second]);
    for (char* p : bytes_of(a[first])) shared = shared || bytes.count(p) != 0;
    const bool nested = nests(a[first]) && (second == Argument::x || nests(a[second]));
    const Code expected = !nested ? Code::nesting : shared ? Code::overlap : Code::ok;
    ++counts[expected == Code::ok ? 0 : expected == Code::overlap ? 1 : 2];
    if (expected == Code::ok) {
      const std::string mismatch = compare(arena, a, options, static_cast<std::uint64_t>(round));
      REQUIRE_MESSAGE(mismatch.empty(), "round " << round << ": " << mismatch);
    } else {
      const auto before = arena.snapshot();
      const kvquant::Status status = execute(a, options);
      REQUIRE_MESSAGE(status.code == expected, "round " << round);
      REQUIRE(arena.difference(before) == "");
    }
  }
  for (int count : counts) CHECK(count > 2000);
}

#if KVQUANT_TEST_HAS_LARGE_MEMORY
namespace {

// Moves the contents of `view` to lazily mapped memory where `axis` has the given stride.
struct Spacious {
  void* memory = MAP_FAILED;
  std::size_t size = 0;
  View view;

  Spacious(const View& from, int axis, std::int64_t stride) : view(from) {
    std::int64_t low = 0, high = item_size(from.dtype);
    view.strides[axis] = stride;
    for (int i = 0; i < view.ndim; ++i) {
      const std::int64_t span = (view.shape[i] - 1) * view.strides[i];
      (span < 0 ? low : high) += span;
    }
    size = static_cast<std::size_t>(high - low);
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    view.data = static_cast<char*>(memory) - low;
    set(contents(from));
  }
  ~Spacious() {
    if (memory != MAP_FAILED) munmap(memory, size);
  }
  static std::vector<char> contents(const View& v) {
    std::vector<char> bytes;
    for (char* p : elements(v)) bytes.insert(bytes.end(), p, p + item_size(v.dtype));
    return bytes;
  }
  void set(const std::vector<char>& bytes) const {
    const char* from = bytes.data();
    for (char* p : elements(view)) {
      std::memcpy(p, from, static_cast<std::size_t>(item_size(view.dtype)));
      from += item_size(view.dtype);
    }
  }
};

}  // namespace

TEST_CASE("memory: offsets beyond 2^31 and 2^32, for every operand and axis (F01, F71)") {
  int cases = 0;
  for (bool packed : {true, false})
    for (Argument argument : {Argument::x, Argument::q_source, Argument::k_source, Argument::v_source, Argument::cos, Argument::sin,
                              Argument::k_cache, Argument::v_cache, Argument::q, Argument::k, Argument::v, Argument::indices,
                              Argument::scale_k, Argument::offset_v, Argument::weight_scale, Argument::activation_scale, Argument::bias})
      for (int axis = 0; axis < 3; ++axis)
        for (std::int64_t stride : {(std::int64_t{1} << 31) + 64, (std::int64_t{1} << 32) + 192, -(std::int64_t{1} << 31) - 64})
          for (kvquant::CacheMode mode : {kvquant::CacheMode::page, kvquant::CacheMode::contiguous}) {
            Case c;
            c.batch = c.sequence = 2;
            c.heads_q = c.heads_kv = 2;
            c.dim = 2;
            c.page_rows = 2;
            c.packed = packed;
            c.mode = mode;
            c.kv_output = c.offset_v = c.activation_scale = true;
            c.bias = DType::float32;
            Setup setup(c);
            auto& [arena, a, options] = setup;
            const View small = a[argument];
            // The last axis of an array has unit stride; vectors may have any.
            const bool vector = small.ndim == 1 || argument == Argument::scale_k || argument == Argument::offset_v;
            if (small.dtype == DType::none || axis >= small.ndim - (vector ? 0 : 1) || small.shape[axis] < 2) continue;
            const Spacious spacious(small, axis, stride);
            if (spacious.memory == MAP_FAILED) {
              MESSAGE("no address space for " << kvquant::name(argument));
              continue;
            }
            ++cases;
            a[argument] = spacious.view;
            const auto before = arena.snapshot();
            const auto contents = Spacious::contents(spacious.view);
            oracle::dequant_rope_quant_kvcache(a, options);
            const auto expected = arena.snapshot();
            const auto expected_contents = Spacious::contents(spacious.view);
            for (int target : available_targets()) {
              arena.restore(before);
              spacious.set(contents);
              options.isa = kvquant::target_name(target);
              INFO(kvquant::target_name(target) << " " << kvquant::name(argument) << " axis " << axis << " stride " << stride);
              CHECK(execute(a, options).code == Code::ok);
              CHECK(arena.difference(expected) == "");
              CHECK(Spacious::contents(spacious.view) == expected_contents);
            }
          }
  CHECK(cases > 100);
}
#endif
