// What the comparison of targets (runner.cpp) and the record of the run (main.cpp) share.
#pragma once

#include <cstdint>

namespace kvtest {

constexpr int kMostTargets = 16;
inline std::uint64_t compared[kMostTargets];  // calls on each target that were compared and equal

}  // namespace kvtest
