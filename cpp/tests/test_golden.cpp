// Every target against data/golden.bin: calls with the answers of the Python reference, so that machines without Python are
// tied to it too. The file's layout is described in tools/make_golden.py, which makes it. Whole buffers are compared.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"

using namespace kvtest;
using kvquant::Argument;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

namespace {

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }

  const char* take(std::size_t count) {
    REQUIRE(count <= bytes_.size() - at_);
    at_ += count;
    return bytes_.data() + (at_ - count);
  }
  std::uint32_t u8() { return static_cast<unsigned char>(*take(1)); }
  std::uint32_t u32() {
    const std::uint32_t low = u8(), second = u8(), third = u8();
    return low | second << 8 | third << 16 | u8() << 24;
  }
  std::string text() {
    const std::size_t length = u8();
    return std::string(take(length), length);
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  std::vector<char> bytes_;
  std::size_t at_ = 0;
};

Argument operand_named(const std::string& name) {
  int i = 0;
  while (i < kvquant::kOperandCount && name != kvquant::name(static_cast<Argument>(i))) ++i;
  REQUIRE_MESSAGE(i < kvquant::kOperandCount, name);
  return static_cast<Argument>(i);
}

std::size_t size_of(const View& view) {
  std::int64_t count = item_size(view.dtype);
  for (int axis = 0; axis < view.ndim; ++axis) count *= view.shape[axis];
  return static_cast<std::size_t>(count);
}

struct Golden {
  std::string name;
  Operands operands;
  Options options;
  std::vector<std::pair<Argument, const char*>> expected;
};

Golden read_case(Reader& reader, Arena& arena) {
  Golden golden;
  golden.name = reader.text();
  golden.options.cache_mode = static_cast<kvquant::CacheMode>(reader.u8());
  golden.options.numerics = static_cast<kvquant::Numerics>(reader.u8());
  golden.options.kv_output = reader.u8() != 0;
  golden.options.skip_padding = reader.u8() != 0;
  golden.options.allow_duplicates = reader.u8() != 0;
  for (std::int64_t& split : golden.operands.size_splits) split = reader.u32();
  for (std::uint32_t operands = reader.u8(); operands > 0; --operands) {
    const std::string name = reader.text();
    const Argument argument = operand_named(name);
    const auto dtype = static_cast<DType>(reader.u8());
    std::vector<std::int64_t> shape(reader.u8());
    const bool written = reader.u8() != 0;
    for (std::int64_t& extent : shape) extent = reader.u32();
    const View view = golden.operands[argument] = arena.view(name, dtype, shape);
    const std::size_t size = size_of(view), stored = reader.u32() * static_cast<std::size_t>(item_size(dtype));
    const char* const values = reader.take(stored);
    for (std::size_t i = 0; i < size; ++i) static_cast<char*>(view.data)[i] = values[i % stored];
    if (written) golden.expected.emplace_back(argument, reader.take(size));
  }
  return golden;
}

}  // namespace

TEST_CASE("golden: every target gives the bytes of the Python reference") {
  Reader reader(KVQUANT_GOLDEN_FILE);
  REQUIRE_MESSAGE(std::string(reader.take(8), 8) == "KVQGOLD1", KVQUANT_GOLDEN_FILE);
  const std::uint32_t cases = reader.u32();
  CHECK(cases > 0);
  std::vector<std::uint64_t> rows;
  for (int target : available_targets()) rows.push_back(kvquant::target_rows(target));
  for (std::uint32_t i = 0; i < cases; ++i) {
    Arena arena;
    Golden golden = read_case(reader, arena);
    const auto before = arena.snapshot();
    for (const auto& [argument, bytes] : golden.expected)
      std::memcpy(golden.operands[argument].data, bytes, size_of(golden.operands[argument]));
    const auto expected = arena.snapshot();
    for (int target : available_targets()) {
      arena.restore(before);
      golden.options.isa = kvquant::target_name(target);
      const kvquant::Status status = execute(golden.operands, golden.options);
      const std::string what = golden.name + ", " + golden.options.isa;  // doctest prints a const char* as an address
      CHECK_MESSAGE(status.code == kvquant::Code::ok, what);
      const std::string difference = arena.difference(expected);
      CHECK_MESSAGE(difference.empty(), what << ": " << difference);
    }
  }
  CHECK(reader.at_end());
  std::size_t next = 0;
  for (int target : available_targets()) {
    const std::uint64_t written = kvquant::target_rows(target) - rows[next++];
    std::printf("golden: %u cases, %llu rows written by %s\n", cases, static_cast<unsigned long long>(written), kvquant::target_name(target));
    CHECK(written > 0);
  }
}
