// Target "avx2": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table.
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
}  // namespace

constexpr KernelTable kAvx2Table = make_table();

}  // namespace detail
}  // namespace kvquant
