// Target "neon": the kernel template over this ISA's block, compiled with this ISA's flags, seen from outside as one table.
#include <arm_neon.h>

#include "../kernel.hpp"

namespace kvquant {
namespace detail {
namespace {
#include "../simd/types.hpp"
#include "../simd/neon.hpp"
#include "../simd/partial.hpp"
#include "../kernel.inl.hpp"
}  // namespace

constexpr KernelTable kNeonTable = make_table();

}  // namespace detail
}  // namespace kvquant
