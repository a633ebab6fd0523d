// See oracle.hpp. Every float operation below is one statement or one parenthesised operation of type float, compiled with
// -ffp-contract=off (C1).
#include "oracle.hpp"

#include <cstring>
#include <set>

namespace oracle {

using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Numerics;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

namespace {

constexpr std::uint32_t kCanonicalNan = 0x7FC00000u;

bool is_nan(float value) { return (to_bits(value) & 0x7FFFFFFFu) > 0x7F800000u; }

// value / 2^shift, ties to even.
std::uint64_t shift_right_even(std::uint64_t value, int shift) {
  if (shift <= 0) return value << -shift;
  if (shift > 62) return 0;
  const std::uint64_t whole = value >> shift, rest = value - (whole << shift), half = std::uint64_t{1} << (shift - 1);
  const bool up = rest > half || (rest == half && (whole & 1) != 0);
  return whole + (up ? 1 : 0);
}

// binary32 -> a smaller IEEE format with `exponent` exponent bits and `mantissa` stored significand bits.
std::uint16_t narrow(float value, int exponent, int mantissa) {
  const std::uint32_t bits = to_bits(value);
  const std::uint32_t sign = (bits >> 31) << (exponent + mantissa);
  const std::uint32_t infinity = ((1u << exponent) - 1) << mantissa;
  if (is_nan(value)) return static_cast<std::uint16_t>(infinity | (1u << (mantissa - 1)));  // C5: positive and quiet
  const int field = static_cast<int>((bits >> 23) & 0xFF);
  if (field == 0xFF) return static_cast<std::uint16_t>(sign | infinity);

  // |value| = significand * 2^power.
  const std::uint32_t significand = (bits & 0x7FFFFFu) | (field != 0 ? 0x800000u : 0u);
  const int power = (field != 0 ? field : 1) - 150;
  // The target counts in steps of 2^step: its last stored bit, but never finer than its subnormals.
  const int finest = 2 - (1 << (exponent - 1)) - mantissa;
  const int wanted = power + 23 - mantissa;
  const int step = wanted > finest ? wanted : finest;
  const std::uint64_t count = shift_right_even(significand, step - power);
  // `count` holds the leading one of a normal number, so a rounding carry moves into the exponent by itself.
  const std::uint64_t magnitude = (static_cast<std::uint64_t>(step - finest) << mantissa) + count;
  return static_cast<std::uint16_t>(sign | (magnitude < infinity ? static_cast<std::uint32_t>(magnitude) : infinity));
}

// A smaller IEEE format -> binary32, exactly.
float widen(std::uint32_t bits, int exponent, int mantissa) {
  const std::uint32_t sign = ((bits >> (exponent + mantissa)) & 1u) << 31;
  const std::uint32_t field = (bits >> mantissa) & ((1u << exponent) - 1);
  std::uint32_t fraction = bits & ((1u << mantissa) - 1);
  if (field == (1u << exponent) - 1) return from_bits(sign | 0x7F800000u | (fraction << (23 - mantissa)));
  if (field == 0 && fraction == 0) return from_bits(sign);
  int power = (field != 0 ? static_cast<int>(field) : 1) - ((1 << (exponent - 1)) - 1);  // of the leading one, if stored
  if (field != 0) fraction |= 1u << mantissa;
  while ((fraction >> mantissa) == 0 && power > -126) {
    fraction <<= 1;
    --power;
  }
  const bool normal = (fraction >> mantissa) != 0;
  const std::uint32_t stored = (fraction & ((1u << mantissa) - 1)) << (23 - mantissa);
  return from_bits(sign | (normal ? static_cast<std::uint32_t>(power + 127) << 23 : 0u) | stored);
}

}  // namespace

std::uint16_t to_float16(float value) { return narrow(value, 5, 10); }
std::uint16_t to_bfloat16(float value) { return narrow(value, 8, 7); }
float from_float16(std::uint16_t bits) { return widen(bits, 5, 10); }
float from_bfloat16(std::uint16_t bits) { return widen(bits, 8, 7); }

float from_int32(std::int32_t value) {
  const std::uint32_t sign = value < 0 ? 0x80000000u : 0u;
  const std::uint64_t magnitude =
      value < 0 ? static_cast<std::uint64_t>(-static_cast<std::int64_t>(value)) : static_cast<std::uint64_t>(value);
  if (magnitude == 0) return 0.0f;
  const int top = 63 - __builtin_clzll(magnitude);
  const std::uint64_t significand = shift_right_even(magnitude, top - 23);  // [2^23, 2^24], the carry is handled by the sum
  return from_bits(sign | static_cast<std::uint32_t>((static_cast<std::uint64_t>(top + 126) << 23) + significand));
}

std::int8_t quantize(float value, float scale, float offset) {
  const float quotient = value / scale;
  const float shifted = quotient + offset;
  if (is_nan(shifted)) return 0;
  if (shifted >= 128.0f) return 127;
  if (shifted <= -129.0f) return -128;
  int code = static_cast<int>(shifted);                    // toward zero
  const float rest = shifted - static_cast<float>(code);  // exact
  const bool odd = code % 2 != 0;
  if (rest > 0.5f || (rest == 0.5f && odd)) ++code;
  if (rest < -0.5f || (rest == -0.5f && odd)) --code;
  if (code > 127) code = 127;
  if (code < -128) code = -128;
  return static_cast<std::int8_t>(code);
}

namespace {

char* address(const View& view, std::int64_t i = 0, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0) {
  const std::int64_t index[4] = {i, j, k, l};
  char* p = static_cast<char*>(view.data);
  for (int axis = 0; axis < view.ndim; ++axis) p += index[axis] * view.strides[axis];
  return p;
}

template <class T>
T load(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

float load_float(DType dtype, const char* p) {
  if (dtype == DType::float16) return from_float16(load<std::uint16_t>(p));
  if (dtype == DType::bfloat16) return from_bfloat16(load<std::uint16_t>(p));
  return load<float>(p);
}

void store_float(DType dtype, char* p, float value) {  // C5
  if (dtype == DType::float32) {
    if (is_nan(value)) value = from_bits(kCanonicalNan);
    std::memcpy(p, &value, sizeof value);
  } else {
    const std::uint16_t bits = dtype == DType::float16 ? to_float16(value) : to_bfloat16(value);
    std::memcpy(p, &bits, sizeof bits);
  }
}

bool given(const View& view) { return view.dtype != DType::none; }

struct Problem {
  const Operands& operands;
  const Options& options;
  bool packed, three_d;
  std::int64_t batch, sequence, heads_q, heads_kv, dim;

  Problem(const Operands& a, const Options& o) : operands(a), options(o) {
    packed = given(a[Argument::x]);
    const View& source = packed ? a[Argument::x] : a[Argument::q_source];
    three_d = source.ndim == (packed ? 3 : 4);
    batch = source.shape[0];
    sequence = three_d ? source.shape[1] : 1;
    heads_kv = a[Argument::k_cache].shape[2];
    dim = a[Argument::k_cache].shape[3];
    heads_q = packed ? a.size_splits[0] / dim : source.shape[source.ndim - 2];
  }

  // Element (b, s, head, d) of an array [B,S,N,D] or [B,N,D].
  char* element(const View& view, std::int64_t b, std::int64_t s, std::int64_t head, std::int64_t d) const {
    return three_d ? address(view, b, s, head, d) : address(view, b, head, d);
  }

  // part: 0 is q, 1 is k, 2 is v. C2 and C3.
  float dequantized(int part, std::int64_t b, std::int64_t s, std::int64_t head, std::int64_t d) const {
    const std::int64_t first_head = part == 0 ? 0 : part == 1 ? heads_q : heads_q + heads_kv;
    const std::int64_t column = (first_head + head) * dim + d;
    const Argument sources[3] = {Argument::q_source, Argument::k_source, Argument::v_source};
    const View& view = packed ? operands[Argument::x] : operands[sources[part]];
    const char* p = packed ? (three_d ? address(view, b, s, column) : address(view, b, column)) : element(view, b, s, head, d);
    if (view.dtype != DType::int32) return load_float(view.dtype, p);

    const View& bias = operands[Argument::bias];
    const bool integer_bias = given(bias) && bias.dtype == DType::int32;
    std::int32_t x = load<std::int32_t>(p);
    if (integer_bias) {
      const std::uint32_t sum = static_cast<std::uint32_t>(x) + load<std::uint32_t>(address(bias, column));
      std::memcpy(&x, &sum, sizeof x);  // wraps
    }
    float f = from_int32(x);
    f = f * load<float>(address(operands[Argument::weight_scale], column));
    if (given(operands[Argument::activation_scale]))
      f = f * load<float>(address(operands[Argument::activation_scale], b * sequence + s));
    if (given(bias) && !integer_bias) f = f + load_float(bias.dtype, address(bias, column));
    return f;
  }

  bool ascend() const {  // C7 differs from C1 for float16 output only
    return options.numerics == Numerics::ascend && operands[Argument::cos].dtype == DType::float16;
  }
  float step(float value) const { return ascend() ? from_float16(to_float16(value)) : value; }

  // Element d of the token's cos or sin: I10 with positions, else one row per token.
  char* table_element(const View& table, std::int64_t b, std::int64_t s, std::int64_t d) const {
    const View& view = operands[Argument::positions];
    if (!given(view)) return three_d ? address(table, b, s, 0, d) : address(table, b, d);
    const char* p = address(view, b * sequence + s);
    const std::int64_t position = view.dtype == DType::int32 ? load<std::int32_t>(p) : load<std::int64_t>(p);
    return address(table, position, table.shape[1] == dim ? d : d % (dim / 2));
  }

  // C4 and C7.
  float rotated(int part, std::int64_t b, std::int64_t s, std::int64_t head, std::int64_t d) const {
    const std::int64_t half = dim / 2, other = d < half ? d + half : d - half;
    const float self = step(dequantized(part, b, s, head, d));
    const float mate = step(dequantized(part, b, s, head, other));
    const View& cos_view = operands[Argument::cos];
    const View& sin_view = operands[Argument::sin];
    const float cos = load_float(cos_view.dtype, table_element(cos_view, b, s, d));
    const float sin = load_float(sin_view.dtype, table_element(sin_view, b, s, d));
    const float straight = step(self * cos);
    const float crossed = step(mate * sin);
    return d < half ? step(straight - crossed) : step(straight + crossed);
  }

  // Shapes [Nkv,D], [Nkv*D], [Nkv,1], [1] and 0-d.
  float per_column(Argument argument, std::int64_t head, std::int64_t d) const {
    const View& view = operands[argument];
    if (view.ndim == 0) return load<float>(address(view));
    if (view.ndim == 1) return load<float>(address(view, view.shape[0] == 1 ? 0 : head * dim + d));
    return load<float>(address(view, head, view.shape[1] == 1 ? 0 : d));
  }

  // I1-I3: the block and the row in it that token (b, s) is written to. False: it is not cached.
  bool cache_place(std::int64_t b, std::int64_t s, std::int64_t& block, std::int64_t& row) const {
    const View& view = operands[Argument::indices];
    const bool page = options.cache_mode == CacheMode::page;
    const char* p = address(view, page ? b * sequence + s : b);
    const std::int64_t index = view.dtype == DType::int32 ? load<std::int32_t>(p) : load<std::int64_t>(p);
    if (options.skip_padding && index == -1) return false;
    const std::int64_t rows = operands[Argument::k_cache].shape[1];
    block = page ? index / rows : b;
    row = page ? index % rows : index + s;
    return true;
  }

  void quantized(Argument cache, Argument scale, Argument offset, float value, std::int64_t block, std::int64_t row,
                 std::int64_t head, std::int64_t d) const {
    float code_offset = 0.0f;
    if (given(operands[offset])) code_offset = per_column(offset, head, d);
    const std::int8_t code = quantize(value, per_column(scale, head, d), code_offset);
    std::memcpy(address(operands[cache], block, row, head, d), &code, 1);
  }

  void token(std::int64_t b, std::int64_t s) const {
    const DType out = operands[Argument::cos].dtype;
    for (std::int64_t head = 0; head < heads_q; ++head)
      for (std::int64_t d = 0; d < dim; ++d)
        store_float(out, element(operands[Argument::q], b, s, head, d), rotated(0, b, s, head, d));

    std::int64_t block = 0, row = 0;
    const bool cached = cache_place(b, s, block, row);
    for (std::int64_t head = 0; head < heads_kv; ++head)
      for (std::int64_t d = 0; d < dim; ++d) {
        const float k = rotated(1, b, s, head, d), v = dequantized(2, b, s, head, d);
        if (options.kv_output) {
          store_float(out, element(operands[Argument::k], b, s, head, d), k);
          store_float(out, element(operands[Argument::v], b, s, head, d), v);
        }
        if (cached) {
          quantized(Argument::k_cache, Argument::scale_k, Argument::offset_k, k, block, row, head, d);
          quantized(Argument::v_cache, Argument::scale_v, Argument::offset_v, v, block, row, head, d);
        }
      }
  }
};

}  // namespace

void dequant_rope_quant_kvcache(const Operands& operands, const Options& options) {
  const Problem problem(operands, options);
  for (std::int64_t b = 0; b < problem.batch; ++b)
    for (std::int64_t s = 0; s < problem.sequence; ++s) problem.token(b, s);  // in order: the last duplicate wins (I2)
}

std::int64_t tokens(const Operands& operands) {
  const Problem problem(operands, Options{});
  return problem.batch * problem.sequence;
}

std::int64_t cache_rows(const Operands& operands, const Options& options) {
  const Problem problem(operands, options);
  std::set<std::pair<std::int64_t, std::int64_t>> places;
  for (std::int64_t b = 0; b < problem.batch; ++b)
    for (std::int64_t s = 0; s < problem.sequence; ++s) {
      std::int64_t block = 0, row = 0;
      if (problem.cache_place(b, s, block, row)) places.insert({block, row});
    }
  return 2 * static_cast<std::int64_t>(places.size());
}

}  // namespace oracle
