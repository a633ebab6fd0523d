// Every error of the contract (I1-I8), planted one at a time into a call that works: the right code and argument, a message
// that names the argument, not one byte written, and the next call works.
#include <doctest/doctest.h>

#include <algorithm>
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

using Call = Setup;
using Plant = std::function<void(Call&)>;

enum class Base { page, contiguous, sources, floats, tables };
// int32 -> float16, B=2, S=3, Nq=4, Nkv=2, D=16 (H=128): also inside the vendor's limits.
void make(Base base, Call& call) {
  Case c;
  c.batch = 2;
  c.sequence = 3;
  c.heads_q = 4;
  c.heads_kv = 2;
  c.kv_output = true;
  c.activation_scale = c.offset_k = c.offset_v = true;
  c.bias = DType::float32;
  c.mode = base == Base::contiguous ? CacheMode::contiguous : CacheMode::page;
  c.packed = base != Base::sources;
  if (base == Base::floats) c.x = c.out = DType::float32;
  if (base == Base::tables) c.tables = Case::Tables::half, c.position = DType::int64;
  build(c, call.arena, call.a, call.options);
  if (base != Base::contiguous)
    for (int t = 0; t < 6; ++t) put_bits(element(call.a[Argument::indices], t), DType::int32, static_cast<std::uint64_t>(t));
}

struct Fault {
  const char* name;
  Base base;
  Plant plant;
  std::vector<Code> codes;  // the first is the one we expect; the others are as good
  std::vector<Argument> arguments;
  std::int64_t position = -1;  // checked unless negative
};

Plant absent(Argument arg) { return [=](Call& c) { c.a[arg] = View{}; }; }
Plant null(Argument arg) { return [=](Call& c) { c.a[arg].data = nullptr; }; }
Plant dtype(Argument arg, DType d) { return [=](Call& c) { c.a[arg].dtype = d; }; }
Plant ndim(Argument arg, std::int32_t n) { return [=](Call& c) { c.a[arg].ndim = n; }; }
Plant shape(Argument arg, int axis, std::int64_t n) { return [=](Call& c) { c.a[arg].shape[axis] = n; }; }
Plant stride(Argument arg, int axis, std::int64_t n) { return [=](Call& c) { c.a[arg].strides[axis] = n; }; }
Plant read_only(Argument arg) { return [=](Call& c) { c.a[arg].read_only = true; }; }
Plant bits(Argument arg, int i, std::uint64_t value) {
  return [=](Call& c) { put_bits(elements(c.a[arg])[static_cast<std::size_t>(i)], c.a[arg].dtype, value); };
}
// `to` shares memory with `from`, `bytes` away.
Plant alias(Argument to, Argument from, std::int64_t bytes = 0) {
  return [=](Call& c) { c.a[to].data = static_cast<char*>(c.a[from].data) + bytes; };
}
Plant index(int i, std::int64_t value) { return bits(Argument::indices, i, static_cast<std::uint64_t>(value)); }
Plant wide_index(int i, std::int64_t value) {
  return [=](Call& c) {
    c.a[Argument::indices] = c.arena.view("indices64", DType::int64, {6});
    for (int t = 0; t < 6; ++t)
      put_bits(element(c.a[Argument::indices], t), DType::int64, static_cast<std::uint64_t>(t == i ? value : t));
  };
}
Plant all(std::vector<Plant> plants) {
  return [=](Call& c) {
    for (const Plant& plant : plants) plant(c);
  };
}

using A = Argument;

std::vector<Fault> faults() {
  std::vector<Fault> list;
  const auto add = [&](const char* name, Base base, Plant plant, std::vector<Code> codes, std::vector<Argument> arguments,
                       std::int64_t position = -1) { list.push_back({name, base, plant, codes, arguments, position}); };

  for (A arg : {A::x, A::cos, A::sin, A::k_cache, A::v_cache, A::indices, A::scale_k, A::scale_v, A::weight_scale, A::q, A::k, A::v}) {
    add("absent", Base::page, absent(arg), {Code::missing}, {arg});
    add("null", Base::page, null(arg), {Code::missing}, {arg});
  }
  for (A arg : {A::activation_scale, A::bias, A::offset_k, A::offset_v}) add("null", Base::page, null(arg), {Code::missing}, {arg});
  for (A arg : {A::k_source, A::v_source}) add("absent", Base::sources, absent(arg), {Code::missing}, {arg});
  for (A arg : {A::q_source, A::k_source, A::v_source}) add("null", Base::sources, null(arg), {Code::missing}, {arg});
  add("absent", Base::sources, absent(A::q_source), {Code::missing}, {A::q_source, A::x});

  for (A arg : {A::x, A::cos, A::sin, A::k_cache, A::v_cache, A::indices, A::scale_k, A::scale_v, A::offset_k, A::offset_v,
                A::weight_scale, A::activation_scale, A::bias, A::q, A::k, A::v})
    for (DType d : {DType::boolean, DType::uint8, DType::int16, DType::uint32, DType::uint64, DType::float64, DType::complex64,
                    DType::other, static_cast<DType>(99), static_cast<DType>(-5)}) {
      add("dtype", Base::page, dtype(arg, d), {Code::dtype}, {arg});
    }
  for (A arg : {A::sin, A::q, A::k, A::v}) {
    add("dtype differs from cos", Base::page, dtype(arg, DType::float32), {Code::dtype}, {arg});
    add("dtype differs from cos", Base::page, dtype(arg, DType::bfloat16), {Code::dtype}, {arg});
  }
  add("float x of another dtype than cos", Base::page, dtype(A::x, DType::float32), {Code::dtype}, {A::x, A::cos});
  add("int64 x", Base::page, dtype(A::x, DType::int64), {Code::dtype}, {A::x});
  add("int32 cos", Base::page, dtype(A::cos, DType::int32), {Code::dtype}, {A::cos});
  for (A arg : {A::scale_k, A::offset_v, A::weight_scale, A::activation_scale})
    add("float16 scale", Base::page, dtype(arg, DType::float16), {Code::dtype}, {arg});
  add("float32 indices", Base::page, dtype(A::indices, DType::float32), {Code::dtype}, {A::indices});
  add("int8 indices", Base::page, dtype(A::indices, DType::int8), {Code::dtype}, {A::indices});
  add("int64 bias", Base::page, dtype(A::bias, DType::int64), {Code::dtype}, {A::bias});
  for (A arg : {A::k_source, A::v_source})
    add("sources of two dtypes", Base::sources, dtype(arg, DType::float16), {Code::dtype}, {arg});

  for (A arg : {A::x, A::cos, A::sin, A::k_cache, A::v_cache, A::indices, A::weight_scale, A::activation_scale, A::bias, A::q, A::k, A::v})
    for (std::int32_t n : {-1, 0, 5, 64})
      add("ndim", Base::page, ndim(arg, n), {Code::ndim}, {arg});
  for (A arg : {A::scale_k, A::scale_v, A::offset_k, A::offset_v})
    for (std::int32_t n : {-1, 3, 5}) add("ndim", Base::page, ndim(arg, n), {Code::scale_shape, Code::ndim}, {arg});

  for (A arg : {A::cos, A::sin, A::q, A::k, A::v})
    for (int axis = 0; axis < 4; ++axis)
      for (std::int64_t n : {std::int64_t{0}, std::int64_t{5}, std::int64_t{-1}, INT64_MAX})
        add("shape", Base::page, shape(arg, axis, n), {Code::shape}, {arg});
  for (A arg : {A::q_source, A::k_source, A::v_source})
    for (std::int64_t n : {std::int64_t{0}, std::int64_t{17}, std::int64_t{-1}})
      add("shape", Base::sources, shape(arg, 3, n), {Code::shape, Code::head_dim}, {arg});
  for (A arg : {A::indices, A::weight_scale, A::activation_scale, A::bias})
    for (std::int64_t n : {0, 1, 5, 7, 127, 129, -1}) add("length", Base::page, shape(arg, 0, n), {Code::shape}, {arg});
  add("length", Base::contiguous, shape(A::indices, 0, 6), {Code::shape}, {A::indices});
  add("width (F24)", Base::page, shape(A::x, 2, 127), {Code::shape}, {A::x, A::size_splits});
  for (int axis = 0; axis < 2; ++axis) {
    for (std::int64_t n : {std::int64_t{-2}, INT64_MIN}) {
      add("negative B or S", Base::page, shape(A::x, axis, n), {Code::too_few}, {A::x});
      add("negative B or S", Base::sources, shape(A::q_source, axis, n), {Code::too_few}, {A::q_source});
    }
    for (std::int64_t n : {std::int64_t{1} << 30, std::int64_t{1} << 31, INT64_MAX})  // times the other axis
      add("more than 2^30 tokens", Base::page, shape(A::x, axis, n), {Code::too_large}, {A::x});
  }
  for (std::int64_t n : {std::int64_t{-1}, INT64_MIN}) add("negative Nq", Base::sources, shape(A::q_source, 2, n), {Code::too_few}, {A::q_source});
  add("Nq*D beyond 2^40", Base::sources, shape(A::q_source, 2, INT64_MAX), {Code::too_large}, {A::q_source});
  for (std::int64_t n : {(std::int64_t{1} << 40) + 16, INT64_MAX})
    add("Nq*D beyond 2^40", Base::page, [=](Call& c) { c.a.size_splits[0] = n; }, {Code::too_large}, {A::size_splits}, 0);
  for (int axis = 2; axis < 4; ++axis)
    add("Nkv*D beyond 2^40", Base::page, all({shape(A::k_cache, axis, INT64_MAX - 1), shape(A::v_cache, axis, INT64_MAX - 1)}),
        {Code::too_large}, {A::k_cache});
  for (Argument arg : {A::x, A::k_cache, A::indices})
    for (std::int64_t n : {(std::int64_t{1} << 58) + 4, INT64_MAX - 3, INT64_MIN + 4})
      add("an axis spans more than 2^58 bytes", Base::page, stride(arg, 0, n), {Code::too_far}, {arg});
  for (int axis = 0; axis < 4; ++axis)
    add("caches differ", Base::page, shape(A::v_cache, axis, 1), {Code::shape}, {A::v_cache, A::k_cache});
  for (int axis = 0; axis < 4; ++axis)
    for (std::int64_t n : {std::int64_t{-1}, INT64_MIN})
      add("negative axis of the caches", Base::page, all({shape(A::k_cache, axis, n), shape(A::v_cache, axis, n)}), {Code::too_few}, {A::k_cache});
  for (std::int64_t n : {0, -64, 16, 63, 128})
    for (int i = 0; i < 3; ++i)
      add("size_splits", Base::page, [=](Call& c) { c.a.size_splits[i] = n; }, {i == 0 && n < 0 ? Code::too_few : Code::shape},
          {A::size_splits, A::x});
  add("fewer blocks than batches", Base::contiguous, all({shape(A::k_cache, 0, 1), shape(A::v_cache, 0, 1)}),
      {Code::too_few, Code::shape}, {A::k_cache});

  for (A arg : {A::scale_k, A::scale_v, A::offset_k, A::offset_v}) {
    add("scale shape", Base::page, shape(arg, 0, 1), {Code::scale_shape}, {arg});
    add("scale shape", Base::page, shape(arg, 1, 2), {Code::scale_shape}, {arg});
    add("scale shape", Base::page, shape(arg, 1, 0), {Code::scale_shape}, {arg});
    add("scale shape [D]", Base::page, all({ndim(arg, 1), shape(arg, 0, 16)}), {Code::scale_shape}, {arg});
    add("scale shape [Nkv]", Base::page, all({ndim(arg, 1), shape(arg, 0, 2)}), {Code::scale_shape}, {arg});
  }
  for (std::int64_t n : {0, 15, 1})
    add("head size", Base::page, all({shape(A::k_cache, 3, n), shape(A::v_cache, 3, n)}), {Code::head_dim}, {A::k_cache});
  add("no heads (F15)", Base::page, all({shape(A::k_cache, 2, 0), shape(A::v_cache, 2, 0)}), {Code::heads}, {A::k_cache});

  for (A arg : {A::cos, A::sin, A::k_cache, A::v_cache, A::q, A::k, A::v})
    for (std::int64_t n : {0, -2, 3, 32}) add("unit stride", Base::page, stride(arg, 3, n), {Code::unit_stride}, {arg});
  add("unit stride", Base::page, stride(A::x, 2, 8), {Code::unit_stride}, {A::x});
  add("unit stride", Base::sources, stride(A::v_source, 3, 8), {Code::unit_stride}, {A::v_source});
  for (A arg : {A::k_cache, A::v_cache, A::q, A::k, A::v})
    for (int axis = 0; axis < 3; ++axis)
      for (std::int64_t n : {0, 1, 15, -15}) add("nesting", Base::page, stride(arg, axis, n), {Code::nesting}, {arg});
  for (A arg : {A::k_cache, A::v_cache, A::q, A::k, A::v}) add("read-only", Base::page, read_only(arg), {Code::read_only}, {arg});

  add("q over x", Base::page, alias(A::q, A::x), {Code::overlap}, {A::q});
  add("q over the last byte of x", Base::page, alias(A::q, A::x, 2 * 3 * 128 * 4 - 1), {Code::overlap}, {A::q});
  add("k over q", Base::page, alias(A::k, A::q), {Code::overlap}, {A::k, A::q});
  add("v over k, shifted", Base::page, alias(A::v, A::k, 2), {Code::overlap}, {A::k, A::v});
  add("v_cache over k_cache", Base::page, alias(A::v_cache, A::k_cache), {Code::overlap}, {A::k_cache, A::v_cache});
  add("v_cache over k_cache by one byte", Base::page,
      [](Call& c) {
        Spread spread;
        spread.gap[0] = spread.gap[1] = spread.gap[2] = spread.tail = 16;
        const View& k = c.a[A::k_cache];
        c.a[A::k_cache] = c.a[A::v_cache] =
            c.arena.view("kv", DType::int8, {k.shape[0], k.shape[1], k.shape[2], k.shape[3]}, spread);
        c.a[A::v_cache].data = static_cast<char*>(c.a[A::v_cache].data) + 15;
      },
      {Code::overlap}, {A::k_cache, A::v_cache});
  for (A arg : {A::cos, A::sin, A::indices, A::scale_k, A::scale_v, A::offset_k, A::offset_v, A::weight_scale, A::activation_scale, A::bias}) {
    add("an input inside q", Base::page, alias(arg, A::q, 8), {Code::overlap}, {A::q, arg});
    add("an input inside v_cache", Base::page, alias(arg, A::v_cache, 8), {Code::overlap}, {A::v_cache, arg});
  }

  for (A arg : {A::scale_k, A::scale_v}) {
    for (std::uint64_t b : {0x00000000u, 0x80000000u, 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFF800001u})
      for (int i : {0, 17, 31}) add("scale", Base::page, bits(arg, i, b), {Code::scale}, {arg}, i);
  }
  for (A arg : {A::offset_k, A::offset_v})
    for (std::uint64_t b : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu})
      for (int i : {0, 31}) add("offset", Base::page, bits(arg, i, b), {Code::offset}, {arg}, i);

  for (int i : {0, 3, 5}) {
    for (std::int64_t value : {-1, -2, 8, 1000, INT32_MIN, INT32_MAX})
      add("index", Base::page, all({shape(A::k_cache, 0, 2), shape(A::v_cache, 0, 2), index(i, value)}), {Code::index}, {A::indices}, i);
    for (std::int64_t value : {std::int64_t{-1}, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1, -(std::int64_t{1} << 32), INT64_MIN, INT64_MAX,
                               std::int64_t{1} << 62})
      add("int64 index", Base::page, wide_index(i, value), {Code::index}, {A::indices}, i);
    for (std::int64_t value : {std::int64_t{-2}, INT64_MIN})
      add("index with padding", Base::page, all({wide_index(i, value), [](Call& c) { c.options.skip_padding = c.options.allow_duplicates = true; }}),
          {Code::index}, {A::indices}, i);
  }
  for (std::int64_t value : {-1, -2, 100, INT32_MIN, INT32_MAX})
    add("contiguous index", Base::contiguous, index(1, value), {Code::index}, {A::indices}, 1);
  add("contiguous index: C2 - S + 1", Base::contiguous, [](Call& c) { index(1, c.a[A::k_cache].shape[1] - 3 + 1)(c); }, {Code::index}, {A::indices}, 1);
  add("sequence longer than the cache", Base::contiguous, all({shape(A::k_cache, 1, 2), shape(A::v_cache, 1, 2), index(0, 0), index(1, 0)}),
      {Code::index}, {A::indices}, 0);
  add("no blocks (F15)", Base::page, all({shape(A::k_cache, 0, 0), shape(A::v_cache, 0, 0)}), {Code::too_few}, {A::k_cache});
  add("no rows (F15)", Base::page, all({shape(A::k_cache, 1, 0), shape(A::v_cache, 1, 0)}), {Code::too_few}, {A::k_cache});
  add("duplicate", Base::page, wide_index(5, 2), {Code::duplicate}, {A::indices}, 5);
  add("duplicate beside padding", Base::page, all({wide_index(5, 0), [](Call& c) { c.options.skip_padding = true; }}), {Code::duplicate}, {A::indices}, 5);

  // I10: tables of at most 9 rows of D/2 = 8 columns, int64 positions.
  add("null", Base::tables, null(A::positions), {Code::missing}, {A::positions});
  for (DType d : {DType::boolean, DType::int16, DType::uint32, DType::uint64, DType::float32, DType::other})
    add("dtype", Base::tables, dtype(A::positions, d), {Code::dtype}, {A::positions});
  for (std::int32_t n : {-1, 0, 2, 5}) add("ndim", Base::tables, ndim(A::positions, n), {Code::ndim}, {A::positions});
  for (std::int64_t n : {0, 1, 5, 7, -1}) add("length", Base::tables, shape(A::positions, 0, n), {Code::shape}, {A::positions});
  for (A arg : {A::cos, A::sin}) {
    for (std::int32_t n : {-1, 1, 3, 4, 5}) add("table ndim", Base::tables, ndim(arg, n), {Code::ndim}, {arg});
    for (std::int64_t n : {std::int64_t{0}, std::int64_t{4}, std::int64_t{7}, std::int64_t{15}, std::int64_t{32}, INT64_MAX})
      add("table width", Base::tables, shape(arg, 1, n), {Code::table_shape}, {arg});
    add("table width", Base::tables, shape(arg, 1, -8), {Code::too_few}, {arg});
    add("unit stride", Base::tables, stride(arg, 1, 4), {Code::unit_stride}, {arg});
  }
  add("tables differ", Base::tables, shape(A::sin, 1, 16), {Code::shape}, {A::sin});
  add("tables differ", Base::tables, shape(A::sin, 0, 10), {Code::shape}, {A::sin});
  add("rows of each token with positions", Base::page, [](Call& c) { c.a[A::positions] = c.a[A::indices]; }, {Code::ndim},
      {A::cos});
  for (int i : {0, 3, 5})
    for (std::int64_t value : {std::int64_t{-1}, std::int64_t{9}, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 1, INT64_MIN,
                               INT64_MAX})
      add("position (F21)", Base::tables, bits(A::positions, i, static_cast<std::uint64_t>(value)), {Code::index}, {A::positions},
          i);
  add("no table rows", Base::tables, all({shape(A::cos, 0, 0), shape(A::sin, 0, 0)}), {Code::index}, {A::positions}, 0);
  for (A arg : {A::cos, A::sin, A::positions}) add("an input inside q", Base::tables, alias(arg, A::q), {Code::overlap}, {A::q});

  add("cache_mode", Base::page, [](Call& c) { c.options.cache_mode = static_cast<CacheMode>(2); }, {Code::option}, {A::cache_mode});
  add("numerics", Base::page, [](Call& c) { c.options.numerics = static_cast<kvquant::Numerics>(-1); }, {Code::option}, {A::numerics});
  add("k without kv_output", Base::page, [](Call& c) { c.options.kv_output = false; }, {Code::unexpected}, {A::k});
  for (const char* name : {"no_such_isa", "avx", "AVX2 ", "scalar,"})
    add("isa", Base::page, [=](Call& c) { c.options.isa = name; }, {Code::isa_unknown}, {A::isa});
  for (int i = 0; i < kvquant::target_count(); ++i)
    if (kvquant::target_missing(i) != nullptr)
      add("isa", Base::page, [=](Call& c) { c.options.isa = kvquant::target_name(i); }, {Code::isa_unavailable}, {A::isa});
  return list;
}

std::string text_of(const Status& status) {
  char text[512];
  const std::size_t length = kvquant::message(status, text, sizeof text);
  return std::string(text, length);
}

// What a message calls got is the value that was given, and what it calls expected is not met by it.
void check_numbers(const Status& status, const Operands& a) {
  const bool few = status.code == Code::too_few, large = status.code == Code::too_large;
  if (status.code != Code::shape && !few && !large) return;
  CHECK((few ? status.got < status.expected : large ? status.got > status.expected : status.got != status.expected));
  if (status.argument == Argument::size_splits) CHECK(status.got == a.size_splits[status.position]);
  else if (status.axis >= 0) CHECK(status.got == a[status.argument].shape[status.axis]);
  else CHECK(status.got == a[status.argument].shape[0] * a[status.argument].shape[1]);
}

void check_fault(const Fault& fault, const char* isa) {
  Call call;
  make(fault.base, call);
  call.options.isa = isa;
  const Operands good = call.a;
  const Options good_options = call.options;
  const auto good_bytes = call.arena.snapshot();
  fault.plant(call);
  const auto before = call.arena.snapshot();
  std::string violation;
  const Status status = execute(call.a, call.options, Cut::whole, 0, violation);
  const std::string text = text_of(status);
  INFO(fault.name << ", argument " << kvquant::name(fault.arguments[0]) << ", isa " << isa << ": code "
                  << static_cast<int>(status.code) << ", \"" << text << "\"");
  CHECK(std::count(fault.codes.begin(), fault.codes.end(), status.code) == 1);
  CHECK(std::count(fault.arguments.begin(), fault.arguments.end(), status.argument) == 1);
  if (fault.position >= 0) CHECK(status.position == fault.position);
  check_numbers(status, call.a);
  CHECK(violation == "");
  CHECK(call.arena.difference(before) == "");
  CHECK(text.find(kvquant::name(status.argument)) != std::string::npos);
  CHECK(text.find('\n') == std::string::npos);
  call.arena.restore(good_bytes);
  CHECK(compare(call.arena, good, good_options, 0) == "");
}

}  // namespace

TEST_CASE("errors: code, argument, message, nothing written, next call works") {
  const std::vector<Fault> list = faults();
  for (int target : available_targets())
    for (const Fault& fault : list) check_fault(fault, kvquant::target_name(target));
  MESSAGE(list.size() << " faults");
}
