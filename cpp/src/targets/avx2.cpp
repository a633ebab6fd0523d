// Target "avx2": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table; and
// parts of its own where that block is too wide for its registers.
#include <immintrin.h>

#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "../simd/types.hpp"
#include "../simd/avx2.hpp"
#include "../simd/partial.hpp"
#include "../kernel.inl.hpp"
#include "../rotate_bfloat16_avx2.inl.hpp"
#include "../simd/fixed_point.hpp"
#include "../parts_avx2.inl.hpp"
}  // namespace

constexpr KernelTable kAvx2Table = make_avx2_table();

}  // namespace detail
}  // namespace kvquant
