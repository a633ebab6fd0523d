// The words for every Status, the same in C++, C and Python. A line names the argument, what was expected and what came.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "kvquant/kvquant.hpp"

namespace kvquant {
namespace {

const char* dtype_name(std::int64_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::none: return "nothing";
    case DType::int8: return "int8";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::float32: return "float32";
    case DType::boolean: return "bool";
    case DType::uint8: return "uint8";
    case DType::int16: return "int16";
    case DType::uint16: return "uint16";
    case DType::uint32: return "uint32";
    case DType::uint64: return "uint64";
    case DType::float64: return "float64";
    case DType::complex64: return "complex64";
    case DType::complex128: return "complex128";
    case DType::other: break;
  }
  return "an unknown dtype";
}

// By bits: under flush-to-zero a comparison or printf could call a subnormal zero.
const char* float_class(std::int64_t bits) {
  const auto word = static_cast<std::uint32_t>(bits);
  if ((word & 0x7FFFFFFFu) > 0x7F800000u) return "nan";
  if (word == 0x7F800000u) return "inf";
  if (word == 0xFF800000u) return "-inf";
  return word >> 31 ? "-0.0" : "0.0";
}

const char* vendor_rule(std::int64_t rule) {
  switch (static_cast<VendorRule>(rule)) {
    case VendorRule::h_limit: return "H of at most 4096";
    case VendorRule::h_multiple: return "H to be a multiple of 64";
    case VendorRule::d_multiple: return "D to be a multiple of 16";
    case VendorRule::lone_offset: return "offset_k and offset_v to come together";
    case VendorRule::strided: return "a contiguous array";
    case VendorRule::padding: return "None";
    case VendorRule::duplicates: return "False";
    case VendorRule::scale_shape: return "shape [Nkv, D] or [Nkv*D]";
    case VendorRule::positions: return "cos and sin of each token instead";
  }
  return "";
}

// snprintf into the rest of a buffer; keeps the length that fits.
class Line {
 public:
  Line(char* buffer, std::size_t capacity) : buffer_(buffer), capacity_(capacity) {
    if (capacity_) buffer_[0] = '\0';
  }
  template <class... Values>
  void add(const char* format, Values... values) {
    if (length_ + 1 >= capacity_) return;
    const int wanted = std::snprintf(buffer_ + length_, capacity_ - length_, format, values...);
    if (wanted > 0) length_ += static_cast<std::size_t>(wanted);
    if (length_ >= capacity_) length_ = capacity_ - 1;
  }
  void add(const char* text) { add("%s", text); }
  std::size_t length() const { return length_; }

 private:
  char* buffer_;
  std::size_t capacity_, length_ = 0;
};

void add_dtypes(Line& line, std::int64_t set) {
  bool first = true;
  for (int i = 0; i < 32; ++i)
    if (set >> i & 1) {
      line.add(first ? "%s" : " or %s", dtype_name(i));
      first = false;
    }
}

void add_isa(Line& line, const Status& status) {
  line.add(status.expected ? "environment variable KVQUANT_ISA: " : "isa: ");
  if (status.code == Code::isa_unknown) {
    line.add("unknown name; expected one of");
    for (int i = 0; i < target_count(); ++i) line.add(i ? ", %s" : " %s", target_name(i));
  } else {
    const bool known = status.position >= 0 && status.position < target_count();
    const int index = known ? static_cast<int>(status.position) : 0;
    const char* missing = known ? target_missing(index) : nullptr;
    line.add("%s can't run on this machine, which lacks %s", known ? target_name(index) : "it", missing ? missing : "a feature");
  }
}

}  // namespace

const char* name(Argument argument) noexcept {
  static const char* const names[] = {"x",           "cos",         "sin",          "k_cache",          "v_cache",
                                      "indices",     "scale_k",     "scale_v",      "offset_k",         "offset_v",
                                      "weight_scale", "activation_scale", "bias",   "positions",        "q",
                                      "k",           "v",           "q_source",     "k_source",         "v_source",
                                      "size_splits", "cache_mode",  "numerics",    "padding_index", "allow_duplicates", "isa",
                                      "workspace",   "call"};
  return names[static_cast<int>(argument)];
}

std::size_t message(const Status& status, char* buffer, std::size_t capacity) noexcept {
  Line line(buffer, capacity);
  const auto got = status.got, expected = status.expected;
  if (status.code == Code::ok) {
    line.add("ok");
    return line.length();
  }
  if (status.code == Code::isa_unknown || status.code == Code::isa_unavailable) {
    add_isa(line, status);
    return line.length();
  }
  line.add("%s", name(status.argument));
  if (status.position >= 0) line.add("[%" PRId64 "]", status.position);
  line.add(": ");
  const bool one_axis = status.code == Code::shape || status.code == Code::too_few || status.code == Code::too_large ||
                        status.code == Code::too_far;
  if (one_axis && status.axis >= 0) line.add("axis %d: ", status.axis);
  switch (status.code) {
    case Code::missing: line.add("required, got nothing"); break;
    case Code::dtype:
      line.add("expected dtype ");
      add_dtypes(line, expected);
      line.add(", got %s", dtype_name(got));
      break;
    case Code::ndim: line.add("expected %" PRId64 " dimensions, got %" PRId64, expected, got); break;
    case Code::shape: line.add("expected %" PRId64 ", got %" PRId64, expected, got); break;
    case Code::too_few: line.add("expected at least %" PRId64 ", got %" PRId64, expected, got); break;
    case Code::too_large:
      line.add("expected at most %" PRId64, expected);
      if (status.axis < 0 && status.argument != Argument::size_splits) line.add(" tokens (B*S)");
      line.add(", got %" PRId64, got);
      break;
    case Code::too_far: line.add("expected a stride within +-%" PRId64 " bytes, got %" PRId64, expected, got); break;
    case Code::scale_shape:
      line.add("expected shape [Nkv, D], [Nkv*D], [Nkv, 1], [1] or [], got ");
      if (status.axis < 0) line.add("%" PRId64 " axes", got);
      else line.add("%" PRId64 " on axis %d, not %" PRId64, got, status.axis, expected);
      break;
    case Code::table_shape:
      line.add("expected a table [P, D] or [P, D/2] with D = %" PRId64 ", got %" PRId64 " on the last axis", expected, got);
      break;
    case Code::head_dim: line.add("expected an even head size D of at least 2 on the last axis, got %" PRId64, got); break;
    case Code::heads: line.add("expected at least one head (Nkv) on axis 2, got %" PRId64, got); break;
    case Code::unit_stride:
      line.add("expected unit stride (%" PRId64 " bytes) on the last axis, got %" PRId64 " bytes", expected, got);
      break;
    case Code::nesting: line.add("expected a written array whose elements do not overlap, got axes that overlap each other"); break;
    case Code::overlap: line.add("expected memory of its own for a written array, got memory shared with %s", name(status.other)); break;
    case Code::read_only: line.add("expected a writeable array, got a read-only one"); break;
    case Code::scale: line.add("expected a finite, non-zero float32, got %s", float_class(got)); break;
    case Code::offset: line.add("expected a finite float32, got %s", float_class(got)); break;
    case Code::index:
      if (status.argument == Argument::positions) line.add("expected 0 <= position < %" PRId64 ", got %" PRId64, expected, got);
      else if (expected > 0) line.add("expected 0 <= index < %" PRId64 ", got %" PRId64, expected, got);
      else line.add("expected no index (S tokens do not fit into the cache's axis 1), got %" PRId64, got);
      break;
    case Code::duplicate: line.add("expected unique indices, got %" PRId64 " as at position %" PRId64, got, expected); break;
    case Code::option: line.add("expected a defined value, got %" PRId64, got); break;
    case Code::unexpected: line.add("expected nothing without kv_output, got an array"); break;
    case Code::vendor_dtype: line.add("vendor_limits refuses dtype %s", dtype_name(got)); break;
    case Code::vendor: line.add("vendor_limits: expected %s, got %" PRId64, vendor_rule(expected), got); break;
    case Code::workspace: line.add("expected %" PRId64 " bytes, 64-byte aligned, got %" PRId64, expected, got); break;
    default: line.add("invalid"); break;
  }
  return line.length();
}

}  // namespace kvquant
