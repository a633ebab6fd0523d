#include "buffers.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define KVQUANT_TEST_HAS_MMAP 1
#else
#define KVQUANT_TEST_HAS_MMAP 0
#endif

#include "oracle.hpp"

namespace kvtest {

using kvquant::DType;
using kvquant::View;

std::uint64_t Random::bits() {
  std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::int64_t Random::below(std::int64_t limit) {
  return static_cast<std::int64_t>((bits() >> 1) % static_cast<std::uint64_t>(limit));
}

float Random::uniform(float low, float high) {
  const float unit = static_cast<float>(bits() >> 40) * (1.0f / 16777216.0f);
  return low + (high - low) * unit;
}

std::int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::none: return 0;
    case DType::int8: case DType::uint8: case DType::boolean: return 1;
    case DType::float16: case DType::bfloat16: case DType::int16: case DType::uint16: return 2;
    case DType::int32: case DType::uint32: case DType::float32: return 4;
    case DType::complex128: return 16;
    default: return 8;
  }
}

namespace {

constexpr unsigned char kCanary = 0xA7;
constexpr std::size_t kMargin = 128;

#if KVQUANT_TEST_HAS_MMAP
std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
#endif

}  // namespace

Arena::~Arena() {
  for (const Block& block : blocks_) {
#if KVQUANT_TEST_HAS_MMAP
    if (block.mapping != nullptr) {
      munmap(block.mapping, block.mapped);
      continue;
    }
#endif
    delete[] block.begin;
  }
}

char* Arena::allocate(const std::string& label, std::int64_t bytes, Placement placement, int misalign) {
  const std::size_t size = static_cast<std::size_t>(bytes);
  Block block{label, nullptr, 0, 0, nullptr, 0};
#if KVQUANT_TEST_HAS_MMAP
  if (placement != Placement::canaries) {
    const std::size_t page = page_size();
    block.size = std::max<std::size_t>(1, (size + page - 1) / page) * page;
    block.mapped = block.size + 2 * page;
    block.mapping = mmap(nullptr, block.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block.mapping == MAP_FAILED) std::abort();
    block.begin = static_cast<unsigned char*>(block.mapping) + page;
    if (mprotect(block.begin, block.size, PROT_READ | PROT_WRITE) != 0) std::abort();
    block.offset = placement == Placement::guard_front ? 0 : block.size - size;
  } else
#endif
  {
    (void)placement;
    block.size = size + 2 * kMargin + 64;
    block.begin = new unsigned char[block.size];
    const std::size_t address = reinterpret_cast<std::uintptr_t>(block.begin) + kMargin;
    block.offset = kMargin + (64 - address % 64) % 64 + static_cast<std::size_t>(misalign);
  }
  std::memset(block.begin, kCanary, block.size);
  blocks_.push_back(block);
  return reinterpret_cast<char*>(block.begin) + block.offset;
}

View Arena::view(const std::string& label, DType dtype, std::vector<std::int64_t> shape, const Spread& spread,
                 Placement placement) {
  View view;
  view.dtype = dtype;
  view.ndim = static_cast<std::int32_t>(shape.size());
  // Axes in memory order; `order` may name axes that this view does not have.
  std::int64_t extent = item_size(dtype), first = 0;
  bool empty = false;
  for (int i = 3; i >= 0; --i) {
    const int axis = spread.order[i];
    if (axis >= view.ndim) continue;
    const std::int64_t n = shape[static_cast<std::size_t>(axis)];
    const std::int64_t step = extent + spread.gap[axis];
    view.shape[axis] = n;
    empty = empty || n == 0;
    if (n == 1 && spread.junk_unit_strides && axis != view.ndim - 1) {
      view.strides[axis] = (axis % 2 == 0 ? 1 : -1) * ((std::int64_t{1} << 62) + 7 - 2048 * axis);  // in no address space
    } else if (spread.repeated[axis]) {
      view.strides[axis] = 0;
    } else {
      view.strides[axis] = spread.reversed[axis] ? -step : step;
      if (n > 0) {
        if (spread.reversed[axis]) first += (n - 1) * step;
        extent += (n - 1) * step;
      }
    }
  }
  view.data = allocate(label, empty ? 0 : extent + spread.tail, placement, spread.misalign) + (empty ? 0 : first);
  return view;
}

std::vector<unsigned char> Arena::snapshot() const {
  std::vector<unsigned char> bytes;
  for (const Block& block : blocks_) bytes.insert(bytes.end(), block.begin, block.begin + block.size);
  return bytes;
}

void Arena::restore(const std::vector<unsigned char>& bytes) {
  const unsigned char *p = bytes.data(), *const end = p + bytes.size();
  for (const Block& block : blocks_) {
    if (p == end) break;
    std::memcpy(block.begin, p, block.size);
    p += block.size;
  }
}

std::string Arena::difference(const std::vector<unsigned char>& bytes) const {
  const unsigned char* p = bytes.data();
  for (const Block& block : blocks_) {
    if (std::memcmp(block.begin, p, block.size) != 0) {
      std::size_t count = 0, at = block.size;
      for (std::size_t i = 0; i < block.size; ++i)
        if (block.begin[i] != p[i]) {
          if (count == 0) at = i;
          ++count;
        }
      char text[160];
      std::snprintf(text, sizeof text, "%s: %zu bytes differ, the first at %+lld: got 0x%02X, expected 0x%02X",
                    block.label.c_str(), count, static_cast<long long>(at) - static_cast<long long>(block.offset),
                    static_cast<unsigned>(block.begin[at]), static_cast<unsigned>(p[at]));
      return text;
    }
    p += block.size;
  }
  return {};
}

char* element(const View& view, std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) {
  const std::int64_t index[4] = {i, j, k, l};
  char* p = static_cast<char*>(view.data);
  for (int axis = 0; axis < view.ndim; ++axis) p += index[axis] * view.strides[axis];
  return p;
}

void put_bits(char* p, DType dtype, std::uint64_t bits) {
  std::memcpy(p, &bits, static_cast<std::size_t>(item_size(dtype)));  // little endian
}

void put(char* p, DType dtype, double value) {
  switch (dtype) {
    case DType::float32: put_bits(p, dtype, oracle::to_bits(static_cast<float>(value))); break;
    case DType::float16: put_bits(p, dtype, oracle::to_float16(static_cast<float>(value))); break;
    case DType::bfloat16: put_bits(p, dtype, oracle::to_bfloat16(static_cast<float>(value))); break;
    default: put_bits(p, dtype, static_cast<std::uint64_t>(static_cast<std::int64_t>(value)));
  }
}

std::vector<char*> elements(const View& view) {
  std::int64_t n[4] = {1, 1, 1, 1};
  for (int axis = 0; axis < view.ndim; ++axis) n[axis] = view.shape[axis];
  std::vector<char*> all;
  for (std::int64_t i = 0; i < n[0]; ++i)
    for (std::int64_t j = 0; j < n[1]; ++j)
      for (std::int64_t k = 0; k < n[2]; ++k)
        for (std::int64_t l = 0; l < n[3]; ++l) all.push_back(element(view, i, j, k, l));
  return all;
}

void fill(const View& view, double value) {
  for (char* p : elements(view)) put(p, view.dtype, value);
}

namespace {

// float32 bit patterns at which something changes: zeros, subnormals, both narrowing limits and their neighbours, NaN.
constexpr std::uint32_t kSpecialFloats[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00400000, 0x007FFFFF, 0x00800000, 0x80800000,  // zero, subnormal
    0x33000000, 0x33000001, 0x33800000, 0x337FFFFF, 0x387FC000, 0x387FE000, 0x387FEFFF, 0x38800000,  // float16 subnormal
    0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FF000, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,  // overflow
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF,              // inf, NaN
    0x4B800000, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x5F000000, 0x3F000000, 0x42FF0000, 0xC3008000,  // int32, codes
    0x3E89CCD5, 0x3E898000, 0x3E888000, 0x3F800800, 0x3F801000, 0x3F803000,                          // narrowing ties
};
constexpr std::uint16_t kSpecialHalves[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00,
                                            0xFC00, 0x7C01, 0xFE00, 0x7FFF, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x3C00};
constexpr double kHalfSteps[] = {0, 0.5, -0.5, 1, -1, 1.5, -1.5, 2.5, 3.5, -4.5, 63.5, -64.5, 126.5, 127.5, -127.5, -128.5};

}  // namespace

void fill_floats(const View& view, Values values, float scale, Random& random) {
  for (char* p : elements(view)) {
    if (values == Values::special && random.chance(20)) {
      if (view.dtype == DType::float32) put_bits(p, view.dtype, random.pick(kSpecialFloats));
      else put_bits(p, view.dtype, random.pick(kSpecialHalves));
    } else if (values == Values::ties) {
      put(p, view.dtype, scale > 2 ? random.pick(kHalfSteps) : 0.5 * static_cast<double>(random.below(5) - 2));
    } else {
      put(p, view.dtype, random.uniform(-scale, scale));
    }
  }
}

void fill_integers(const View& view, Values values, std::int64_t limit, Random& random) {
  constexpr std::int32_t kSpecial[] = {0, -1, 1, INT32_MAX, INT32_MIN, INT32_MIN + 1, 16777217, -16777217, 16777219,
                                       33554431, 2147483584, 2147483583, -2147483583, 2147483520};
  for (char* p : elements(view)) {
    std::int64_t value = random.below(2 * limit + 1) - limit;
    if (values == Values::special && random.chance(20)) value = random.pick(kSpecial);
    if (values == Values::ties) value = random.below(513) - 256;
    put_bits(p, view.dtype, static_cast<std::uint64_t>(value));
  }
}

void fill_scales(const View& view, Values values, Random& random) {
  constexpr std::uint32_t kSpecial[] = {0x00000001, 0x80000001, 0x00400000, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
                                        0x7E800000, 0x3DCCCCCD, 0x3C010204, 0x3CBEA8E3, 0x40400000, 0xBDCCCCCD};
  constexpr double kTies[] = {1, -1, 2, 0.5, 4, 0.25};
  for (char* p : elements(view)) {
    if (values == Values::special && random.chance(30)) put_bits(p, view.dtype, random.pick(kSpecial));
    else if (values == Values::ties) put(p, view.dtype, random.pick(kTies));
    else put(p, view.dtype, random.uniform(0.01f, 0.4f) * (random.chance(20) ? -1.0f : 1.0f));
  }
}

void fill_offsets(const View& view, Values values, Random& random) {
  constexpr std::uint32_t kSpecial[] = {0x80000000, 0x00000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x42FF0000, 0xC3008000, 0x3F000000};
  for (char* p : elements(view)) {
    if (values == Values::special && random.chance(20)) put_bits(p, view.dtype, random.pick(kSpecial));
    else if (values == Values::ties) put(p, view.dtype, 0.5 * static_cast<double>(random.below(9) - 4));
    else put(p, view.dtype, random.uniform(-20.0f, 20.0f));
  }
}

}  // namespace kvtest
