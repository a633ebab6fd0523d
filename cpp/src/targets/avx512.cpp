// Target "avx512": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table.
#include <immintrin.h>

#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "../simd/types.hpp"
#include "../simd/fixed_point.hpp"
#include "../simd/avx512.hpp"
#include "../simd/avx512_plain.hpp"
#include "../kernel.inl.hpp"
}  // namespace

constexpr KernelTable kAvx512Table = make_table();

}  // namespace detail
}  // namespace kvquant
