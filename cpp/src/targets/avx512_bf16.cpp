// Target "avx512_bf16": AVX-512 with native bfloat16 conversion, and kernels of its own for bfloat16 x.
#include <immintrin.h>

#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "../simd/types.hpp"
#include "../simd/fixed_point.hpp"
#include "../simd/avx512.hpp"
#include "../simd/avx512_bf16.hpp"
#include "../kernel.inl.hpp"
#include "../rotate_bfloat16.inl.hpp"
#include "../together_bfloat16.inl.hpp"

constexpr KernelTable make_bf16_table() {
  KernelTable table = make_table();
  for (auto& sources : table.kernels) sources[kFloat][kBfloat16][kRotateOut] = rotate_out_bfloat16;
  table.together_bfloat16 = together_bfloat16;
  return table;
}
}  // namespace

constexpr KernelTable kAvx512Bf16Table = make_bf16_table();

}  // namespace detail
}  // namespace kvquant
