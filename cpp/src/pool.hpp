// The threads behind Python's num_threads: how many a call gets, and how its tokens are shared out. Built into the Python
// extension only; the C++ library starts no threads. Knows plan, prepared and run, not what a token is. docs/threads.md
// tells users what to expect.
#pragma once

#include <cstdint>

#include "kvquant/kvquant.hpp"

namespace kvquant {
namespace pool {

constexpr int kMaxThreads = 256;
// Work is counted in elements of x. An automatic thread count gives each thread at least this many, and a call of fewer than
// two such shares runs on its caller alone. A smaller call than kWorthWaking is over before a worker that sleeps has come and
// warmed up (AVX-512, bfloat16: about 100 us on one thread).
constexpr std::int64_t kShare = 65536, kWorthWaking = std::int64_t{1} << 20;
// Tokens are shared out in multiples of this: the kernels' block of rows.
constexpr std::int64_t kBlockTokens = 4;

// KVQUANT_NUM_THREADS: the most threads that any call may use, at least 1; kMaxThreads if unset or empty; 0 if it is not an
// integer of at least 1. A valid value is read once a process, an invalid one at each use.
int thread_limit() noexcept;

// The threads, the caller's included, for a call of this size. `requested` 0 is automatic: as many as the work feeds, within
// the caller's CPU affinity. Never above thread_limit(), and one where sleeping workers would have to be woken for too little.
int automatic_threads(std::int64_t elements) noexcept;
bool worth_sharing(std::int64_t elements) noexcept;
inline int choose_threads(int requested, std::int64_t tokens, std::int64_t elements) noexcept {
  if (requested == 1 || tokens <= kBlockTokens || (requested == 0 && elements < 2 * kShare)) return 1;
  const int limit = thread_limit(), wanted = requested == 0 ? automatic_threads(elements) : requested;
  const int threads = wanted < limit ? wanted : limit;
  return threads > 1 && !worth_sharing(elements) ? 1 : threads;
}

// run(plan, prepared, 0, prepared.tokens) on up to `threads` threads including this one. Does all the work itself where
// threads are busy with another call or can't be started. Returns when every byte is written; the bytes are the same always. One
// thread is for calls that would have liked more, so that the next one sees how long ago this was.
void run_parallel(const Plan& plan, const Prepared& prepared, int threads) noexcept;

// For tests.
int worker_count() noexcept;                 // threads started and alive in this process
void refuse_starts(bool refuse) noexcept;    // true: behave as if the system refused to start a thread
void always_wake(bool always) noexcept;      // true: share a call however small it is and however long ago the last one was
void hold_locks(int milliseconds) noexcept;  // take every lock there is, and sleep

}  // namespace pool
}  // namespace kvquant
