// Calls at the edge of the contract: vendor limits (I8), empty calls (I7), numbers that overflow, the workspace, messages,
// and good input that must not be refused.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cases.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::Code;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::Status;
using kvquant::VendorRule;
using kvquant::View;

namespace {

struct Built : Setup {
  using Setup::Setup;
  Status run() { return execute(a, options); }
};

Case vendor_case() {
  Case c;
  c.batch = 2;
  c.sequence = 3;
  c.heads_q = 4;
  c.heads_kv = 2;  // H = 128
  c.kv_output = c.offset_k = c.offset_v = c.activation_scale = true;
  c.bias = DType::int32;
  return c;
}

Status with_vendor_limits(const Case& c) {
  Built built(c);
  const auto before = built.arena.snapshot();
  CHECK(built.run().code == Code::ok);
  built.arena.restore(before);
  built.options.vendor_limits = true;
  const Status status = built.run();
  if (status) CHECK(built.arena.difference(before) == "");
  return status;
}

}  // namespace

TEST_CASE("vendor limits: what the vendor's operator accepts is accepted, with the same bytes") {
  for (DType out : {DType::float16, DType::bfloat16})
    for (bool integers : {true, false})
      for (CacheMode mode : {CacheMode::page, CacheMode::contiguous})
        for (ScaleShape shape : {ScaleShape::heads_dim, ScaleShape::flat}) {
          Case c = vendor_case();
          c.out = out;
          c.x = integers ? DType::int32 : out;
          c.mode = mode;
          for (ScaleShape& s : c.scale_shape) s = shape;
          Built built(c);
          built.options.vendor_limits = true;
          CHECK(compare(built.arena, built.a, built.options, 0) == "");
        }
}

TEST_CASE("vendor limits: each rule refuses what works without them") {
  const auto expect = [](const char* what, const Case& c, Code code, VendorRule rule) {
    INFO(what);
    const Status status = with_vendor_limits(c);
    CHECK(status.code == code);
    if (code == Code::vendor) CHECK(status.expected == static_cast<std::int64_t>(rule));
    char text[256];
    CHECK(kvquant::message(status, text, sizeof text) > 0);
    CHECK(std::strstr(text, kvquant::name(status.argument)) != nullptr);
  };
  Case c = vendor_case();
  c.heads_q = 253;  // H = 257 * 16 = 4112
  expect("H > 4096", c, Code::vendor, VendorRule::h_limit);
  c = vendor_case();
  c.heads_q = 5;  // H = 144
  expect("H % 64", c, Code::vendor, VendorRule::h_multiple);
  c = vendor_case();
  c.dim = 8;
  c.heads_q = 4;
  c.heads_kv = 2;  // H = 64
  expect("D % 16", c, Code::vendor, VendorRule::d_multiple);
  for (int which = 0; which < 2; ++which) {
    c = vendor_case();
    (which == 0 ? c.offset_k : c.offset_v) = false;
    expect("lone offset", c, Code::vendor, VendorRule::lone_offset);
  }
  for (CacheLayout layout : {CacheLayout::pages_interleaved, CacheLayout::values_interleaved, CacheLayout::head_major, CacheLayout::padded_page}) {
    c = vendor_case();
    c.cache_layout = layout;
    expect("strided cache", c, Code::vendor, VendorRule::strided);
  }
  for (OutputLayout layout : {OutputLayout::padded, OutputLayout::head_major, OutputLayout::fused}) {
    c = vendor_case();
    c.output_layout = layout;
    expect("strided output", c, Code::vendor, VendorRule::strided);
  }
  c = vendor_case();
  c.padding = true;
  expect("padding", c, Code::vendor, VendorRule::padding);
  c = vendor_case();
  c.duplicates = true;
  expect("duplicates", c, Code::vendor, VendorRule::duplicates);
  c = vendor_case();
  c.tables = Case::Tables::full;
  expect("positions", c, Code::vendor, VendorRule::positions);
  for (int i = 0; i < 4; ++i)
    for (ScaleShape shape : {ScaleShape::heads_one, ScaleShape::one, ScaleShape::scalar}) {
      c = vendor_case();
      c.scale_shape[i] = shape;
      expect("scale shape", c, Code::vendor, VendorRule::scale_shape);
    }
  c = vendor_case();
  c.out = DType::float32;
  expect("float32 cos", c, Code::vendor_dtype, VendorRule::h_limit);
  c.x = DType::float32;
  expect("float32 x", c, Code::vendor_dtype, VendorRule::h_limit);
  c = vendor_case();
  c.index = DType::int64;
  expect("int64 indices", c, Code::vendor_dtype, VendorRule::h_limit);
}

TEST_CASE("empty calls (I7): shapes and dtypes are checked, values are not, nothing is written") {
  for (CacheMode mode : {CacheMode::page, CacheMode::contiguous})
    for (int kind = 0; kind < 3; ++kind) {
      Case c = vendor_case();
      c.mode = mode;
      c.batch = kind == 0 ? 0 : 2;
      c.sequence = kind == 0 ? 3 : 0;
      c.three_d = kind != 2;
      if (kind == 2) c.batch = 0, c.sequence = 1;
      Built built(c);
      for (Argument argument : {Argument::scale_k, Argument::offset_v})
        put_bits(elements(built.a[argument])[0], DType::float32, 0x7FC00000);
      for (char* p : elements(built.a[Argument::indices])) put_bits(p, c.index, 0xFFFFFF00u);
      const auto before = built.arena.snapshot();
      CHECK(built.run().code == Code::ok);
      CHECK(built.arena.difference(before) == "");
      for (Argument argument : {Argument::x, Argument::cos, Argument::indices, Argument::scale_k, Argument::q, Argument::bias}) {
        const View good = built.a[argument];
        built.a[argument].dtype = DType::uint8;
        CHECK(built.run().code == Code::dtype);
        built.a[argument] = good;
        built.a[argument].shape[good.ndim - 1] += 1;
        const Status status = built.run();
        CHECK(status.code != Code::ok);
        built.a[argument] = good;
      }
      CHECK(built.arena.difference(before) == "");
    }
}

TEST_CASE("overflow: shapes and strides near 2^63 are answered, never followed") {
  const std::int64_t huge[] = {INT64_MAX, INT64_MIN, INT64_MIN + 1, std::int64_t{1} << 62, std::int64_t{1} << 61, std::int64_t{1} << 33,
                               -(std::int64_t{1} << 62), 0x7FFFFFFF0, -1};
  for (bool packed : {true, false})
    for (bool vendor : {false, true}) {
      Case c = vendor_case();
      c.packed = packed;
      Built built(c);
      built.options.vendor_limits = vendor;
      const auto before = built.arena.snapshot();
      for (int i = 0; i < kvquant::kOperandCount; ++i) {
        const View good = built.a.view[i];
        for (int axis = 0; axis < good.ndim; ++axis)
          for (std::int64_t n : huge)
            for (int what = 1; what < 4; ++what) {
              if (what & 1) built.a.view[i].shape[axis] = n;
              if (what & 2) built.a.view[i].strides[axis] = n;
              kvquant::Plan plan;
              const Status status = kvquant::make_plan(built.a, built.options, plan);
              if (!status) {
                // A large stride or cache in itself is legal metadata; values must then be refused before they are followed.
                const std::size_t size = kvquant::workspace_size(plan, plan.batch * plan.sequence);
                std::vector<char> storage(size + 64);
                char* workspace = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
                kvquant::Call call;
                call.batch = plan.batch;
                call.sequence = plan.sequence;
                for (int j = 0; j < kvquant::kOperandCount; ++j) call.data[j] = built.a.view[j].data;
                kvquant::Prepared prepared;
                const auto a = static_cast<Argument>(i);
                const bool values_read = a == Argument::indices || a == Argument::scale_k || a == Argument::scale_v ||
                                         a == Argument::offset_k || a == Argument::offset_v || a == Argument::weight_scale ||
                                         a == Argument::bias;
                // prepare follows the strides of the operands that it reads, so only absurd ones may be given to it.
                if (!values_read) (void)kvquant::prepare(plan, call, workspace, size, prepared);
              }
              built.a.view[i] = good;
            }
      }
      CHECK(built.arena.difference(before) == "");
    }
}

TEST_CASE("overflow: batch, heads and splits that agree with each other") {
  for (bool packed : {true, false})
    for (bool vendor : {false, true})
      for (std::int64_t n : {std::int64_t{1} << 31, std::int64_t{1} << 40, std::int64_t{1} << 60, std::int64_t{1} << 62, INT64_MAX}) {
        Case c = vendor_case();
        c.packed = packed;
        for (int axis = 0; axis < 2; ++axis) {  // B or S of everything
          Built built(c);
          built.options.vendor_limits = vendor;
          for (Argument a : {Argument::x, Argument::cos, Argument::sin, Argument::q, Argument::k, Argument::v, Argument::q_source,
                             Argument::k_source, Argument::v_source})
            built.a[a].shape[axis] = n;
          built.a[Argument::indices].shape[0] = built.a[Argument::activation_scale].shape[0] =
              static_cast<std::int64_t>(static_cast<std::uint64_t>(n) * (axis == 0 ? 3u : 2u));
          CHECK(built.run().code != Code::ok);
        }
        Built built(c);  // Nq
        built.options.vendor_limits = vendor;
        built.a[Argument::q_source].shape[2] = built.a[Argument::q].shape[2] = n;
        built.a.size_splits[0] = static_cast<std::int64_t>(static_cast<std::uint64_t>(n) * 16u);
        CHECK(built.run().code != Code::ok);
        Built caches(c);  // Nkv and D
        for (int axis = 2; axis < 4; ++axis) {
          caches.a[Argument::k_cache].shape[axis] = caches.a[Argument::v_cache].shape[axis] = n;
          CHECK(caches.run().code != Code::ok);
        }
      }
}

TEST_CASE("overflow: calls larger than their plan") {
  Built built(vendor_case());
  kvquant::Plan plan;
  REQUIRE(kvquant::make_plan(built.a, built.options, plan).code == Code::ok);
  alignas(64) static char workspace[65536];
  for (std::int64_t batch : {std::int64_t{-1}, std::int64_t{1} << 29, std::int64_t{1} << 31, std::int64_t{1} << 61, INT64_MAX, INT64_MIN})
    for (std::int64_t sequence : {std::int64_t{3}, std::int64_t{1} << 32, INT64_MAX, std::int64_t{-1}}) {
      kvquant::Call call;
      call.batch = batch;
      call.sequence = sequence;
      for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = built.a.view[i].data;
      kvquant::Prepared prepared;
      CHECK(kvquant::prepare(plan, call, workspace, sizeof workspace, prepared).code != Code::ok);
      kvquant::run(plan, prepared, 0, INT64_MAX);  // nothing was prepared
    }
  for (std::int64_t tokens : {std::int64_t{-1}, INT64_MIN, std::int64_t{1} << 40, INT64_MAX}) (void)kvquant::workspace_size(plan, tokens);
}

TEST_CASE("workspace: too small, absent or misaligned") {
  Built built(vendor_case());
  kvquant::Plan plan;
  REQUIRE(kvquant::make_plan(built.a, built.options, plan).code == Code::ok);
  const std::size_t size = kvquant::workspace_size(plan, 6);
  REQUIRE(size > 0);
  std::vector<unsigned char> storage(size + 256, 0xA5);
  unsigned char* aligned = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
  kvquant::Call call;
  call.batch = 2;
  call.sequence = 3;
  for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = built.a.view[i].data;
  const auto before = built.arena.snapshot();
  const auto expect = [&](void* workspace, std::size_t bytes) {
    kvquant::Prepared prepared;
    const Status status = kvquant::prepare(plan, call, workspace, bytes, prepared);
    CHECK(status.code == Code::workspace);
    CHECK(status.argument == Argument::workspace);
    char text[256];
    kvquant::message(status, text, sizeof text);
    CHECK(std::strstr(text, "workspace") != nullptr);
  };
  expect(aligned, 0);
  expect(aligned, size - 1);
  expect(aligned, size / 2);
  expect(nullptr, size);
  for (int shift : {1, 8, 32}) expect(aligned + shift, size + 64);
  for (unsigned char byte : storage) CHECK(byte == 0xA5);
  CHECK(built.arena.difference(before) == "");
}

TEST_CASE("messages: one line, terminated, cut at capacity, for every code and argument") {
  for (int code = -1; code < 40; ++code)
    for (int argument = 0; argument <= static_cast<int>(Argument::none); ++argument)
      for (std::int64_t n : {std::int64_t{0}, std::int64_t{5}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
        Status status;
        status.code = static_cast<Code>(code);
        status.argument = static_cast<Argument>(argument);
        status.got = status.expected = n;
        status.position = n == 5 ? n : -1;
        char text[300];
        std::memset(text, 'x', sizeof text);
        const std::size_t length = kvquant::message(status, text, sizeof text);
        REQUIRE(length < sizeof text);
        REQUIRE(std::strlen(text) == length);
        REQUIRE(length > 0);
        REQUIRE(std::strchr(text, '\n') == nullptr);
        for (std::size_t capacity : {std::size_t{1}, std::size_t{2}, std::size_t{9}}) {
          char cut[16];
          std::memset(cut, 'x', sizeof cut);
          const std::size_t short_length = kvquant::message(status, cut, capacity);
          REQUIRE(short_length == std::strlen(cut));
          REQUIRE(short_length <= capacity - 1);
          REQUIRE(std::memcmp(cut, text, short_length) == 0);
          REQUIRE(cut[capacity] == 'x');
        }
        (void)kvquant::message(status, nullptr, 0);
      }
}

TEST_CASE("messages: the numbers of lengths that are too large or negative") {
  const auto text_after = [](const std::function<void(Operands&)>& change) {
    Built built(vendor_case());
    change(built.a);
    char text[256];
    kvquant::message(built.run(), text, sizeof text);
    return std::string(text);
  };
  CHECK(text_after([](Operands& a) { a.size_splits[0] = INT64_MAX; }) ==
        "size_splits[0]: expected at most 1099511627776, got 9223372036854775807");
  CHECK(text_after([](Operands& a) { a.size_splits[0] = -16; }) == "size_splits[0]: expected at least 0, got -16");
  CHECK(text_after([](Operands& a) { a[Argument::x].shape[0] = 1 << 29; }) ==
        "x: expected at most 1073741824 tokens (B*S), got 1610612736");
  CHECK(text_after([](Operands& a) { a[Argument::x].shape[1] = INT64_MAX; }) ==
        "x: axis 1: expected at most 1073741824, got 9223372036854775807");
  CHECK(text_after([](Operands& a) { a[Argument::x].shape[0] = INT64_MIN; }) ==
        "x: axis 0: expected at least 0, got -9223372036854775808");
}

TEST_CASE("good input is not refused") {
  Case c = vendor_case();
  SUBCASE("read-only inputs") {
    Built built(c);
    for (Argument a : {Argument::x, Argument::cos, Argument::sin, Argument::indices, Argument::scale_k, Argument::scale_v, Argument::bias})
      built.a[a].read_only = true;
    CHECK(compare(built.arena, built.a, built.options, 0) == "");
  }
  SUBCASE("all tokens are padding") {
    Built built(c);
    built.options.skip_padding = true;
    for (char* p : elements(built.a[Argument::indices])) put_bits(p, c.index, 0xFFFFFFFFu);
    CHECK(compare(built.arena, built.a, built.options, 0) == "");
  }
  SUBCASE("scales broadcast with stride 0 (F65)") {
    Built built(c);
    for (Argument a : {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v})
      built.a[a].strides[0] = built.a[a].strides[1] = 0;
    built.a[Argument::weight_scale].strides[0] = built.a[Argument::bias].strides[0] = built.a[Argument::activation_scale].strides[0] = 0;
    CHECK(compare(built.arena, built.a, built.options, 0) == "");
  }
  SUBCASE("no query heads") {
    c.heads_q = 0;
    CHECK(compare(c) == "");
    Built built(c);
    built.a[Argument::q].data = nullptr;
    CHECK(compare(built.arena, built.a, built.options, 0) == "");
  }
  SUBCASE("one input serves as several: cos is sin, the scales are the offsets") {
    Built built(c);
    built.a[Argument::sin] = built.a[Argument::cos];
    built.a[Argument::scale_v] = built.a[Argument::offset_k] = built.a[Argument::offset_v] = built.a[Argument::scale_k];
    CHECK(compare(built.arena, built.a, built.options, 0) == "");
  }
  SUBCASE("duplicates allowed in a long call, all tokens in one row (F11)") {
    c.batch = 1024;
    c.sequence = 1;
    Built built(c);
    built.options.allow_duplicates = true;
    for (char* p : elements(built.a[Argument::indices])) put_bits(p, c.index, 3);
    CHECK(compare(built.arena, built.a, built.options, 0, true) == "");
  }
}
