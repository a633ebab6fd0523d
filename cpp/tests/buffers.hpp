// Memory for operands: blocks surrounded by canary bytes or by unreadable pages, strided views into them, and values that
// sit where arithmetic breaks. Knows nothing of the operator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvquant/kvquant.hpp"

namespace kvtest {

// splitmix64: the same sequence on every platform, unlike <random>'s distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  std::int64_t below(std::int64_t limit);  // 0 <= result < limit
  float uniform(float low, float high);
  bool chance(int percent) { return below(100) < percent; }
  template <class T, std::size_t N>
  T pick(const T (&choices)[N]) { return choices[below(static_cast<std::int64_t>(N))]; }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i)
      std::swap(values[i - 1], values[static_cast<std::size_t>(below(static_cast<std::int64_t>(i)))]);
  }

 private:
  std::uint64_t state_;
};

// Where a block lies: between canary bytes, or with its first (last) byte next to an unreadable page.
enum class Placement { canaries, guard_front, guard_back };

// How the elements of a view are spread over memory.
struct Spread {
  int order[4] = {0, 1, 2, 3};    // axes from the outermost in memory to the innermost
  std::int64_t gap[4] = {};       // per axis: bytes added to the stride that dense packing would give
  bool reversed[4] = {};          // per axis: negative stride
  bool repeated[4] = {};          // per axis: stride 0
  bool junk_unit_strides = false; // axes of one element get a meaningless stride
  std::int64_t tail = 0;          // bytes to own beyond the last element (for a second view interleaved with this one)
  int misalign = 0;               // with Placement::canaries: bytes past a 64-byte boundary
};

std::int64_t item_size(kvquant::DType dtype);

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // `bytes` writable bytes, filled with the canary pattern.
  char* allocate(const std::string& label, std::int64_t bytes, Placement placement, int misalign = 0);
  kvquant::View view(const std::string& label, kvquant::DType dtype, std::vector<std::int64_t> shape,
                     const Spread& spread = {}, Placement placement = Placement::canaries);

  // All readable bytes of all blocks, canaries included.
  std::vector<unsigned char> snapshot() const;
  void restore(const std::vector<unsigned char>& bytes);  // blocks allocated after the snapshot stay as they are
  // Empty if memory equals `bytes`, else which block differs first, where, and how.
  std::string difference(const std::vector<unsigned char>& bytes) const;

 private:
  struct Block {
    std::string label;
    unsigned char* begin;  // readable bytes
    std::size_t size;
    std::size_t offset;    // of the bytes handed out
    void* mapping;         // null: new[]
    std::size_t mapped;
  };
  std::vector<Block> blocks_;
};

// Address of one element; missing trailing indices are 0.
char* element(const kvquant::View& view, std::int64_t i = 0, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0);
// Writes `value` converted to the view's dtype (float16 and bfloat16: rounded; integers: truncated), or raw bits.
void put(char* p, kvquant::DType dtype, double value);
void put_bits(char* p, kvquant::DType dtype, std::uint64_t bits);
// All elements of a view, in C order.
std::vector<char*> elements(const kvquant::View& view);
void fill(const kvquant::View& view, double value);

enum class Values {
  plain,    // ordinary magnitudes
  special,  // one in five is NaN, infinite, subnormal, zero, huge or next to a narrowing limit
  ties,     // small multiples of one half, so that products, sums and quotients land on rounding ties
};

// float32, float16 or bfloat16 data around `scale` in magnitude.
void fill_floats(const kvquant::View& view, Values values, float scale, Random& random);
// int32 accumulators.
void fill_integers(const kvquant::View& view, Values values, std::int64_t limit, Random& random);
// Quantisation scales (finite, not zero) and offsets (finite).
void fill_scales(const kvquant::View& view, Values values, Random& random);
void fill_offsets(const kvquant::View& view, Values values, Random& random);

}  // namespace kvtest
