// Target "avx2": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table; and
// a part of its own for Q of bfloat16 x.
#include <immintrin.h>

#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "../simd/types.hpp"
#include "../simd/avx2.hpp"
#include "../simd/partial.hpp"
#include "../simd/estimate.hpp"
#include "../kernel.inl.hpp"
#include "../rotate_bfloat16_avx2.inl.hpp"

constexpr KernelTable make_avx2_table() {
  KernelTable table = make_table();
  for (auto& sources : table.kernels) sources[kFloat][kBfloat16][kRotateOut] = rotate_out_bfloat16;
  return table;
}
}  // namespace

constexpr KernelTable kAvx2Table = make_avx2_table();

}  // namespace detail
}  // namespace kvquant
