// Target "scalar": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table.
#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#define KVQUANT_INLINE inline  // its lanes are in memory anyway
#include "../simd/types.hpp"
#include "../simd/half.hpp"
#include "../simd/scalar.hpp"
#include "../simd/partial.hpp"
#include "../kernel.inl.hpp"
}  // namespace

constexpr KernelTable kScalarTable = make_table();

}  // namespace detail
}  // namespace kvquant
