// One pool a process, made at the first call that wants a second thread, and never destroyed: threads may sleep in it while
// the process ends. One call owns it at a time; others find it taken and run alone, so nothing ever waits for a lock that a
// call holds. fork() copies the memory but not the threads, so the child forgets the pool, locked or not, and starts anew.
#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvquant {
namespace pool {
namespace {

// A thread that waits looks this long before it sleeps: longer than the gap between the calls of a busy loop, too short to
// be seen by a neighbour.
constexpr std::chrono::microseconds kSpin{30};
// The fewest and the most elements of x that a thread takes at once where shares are cut: a microsecond or two, below which the
// taking costs more than it balances, and tens of microseconds, so that a thread that loses its CPU does not keep much work from
// the others.
constexpr std::int64_t kMinPiece = 16384, kMaxPiece = 262144;

// Where the calling thread may run.
struct Cpus {
#if defined(__linux__)
  cpu_set_t set;
  Cpus() noexcept { CPU_ZERO(&set); }
  bool read() noexcept { return sched_getaffinity(0, sizeof(set), &set) == 0; }
  void apply() const noexcept { sched_setaffinity(0, sizeof(set), &set); }
  int count() const noexcept { return CPU_COUNT(&set); }
  bool operator==(const Cpus& other) const noexcept { return CPU_EQUAL(&set, &other.set); }
  static int current() noexcept { return sched_getcpu(); }
  void remove(int cpu) noexcept { CPU_CLR(static_cast<std::size_t>(cpu), &set); }
#else
  bool read() noexcept { return false; }
  void apply() const noexcept {}
  int count() const noexcept { return 0; }
  bool operator==(const Cpus&) const noexcept { return true; }
  static int current() noexcept { return -1; }
  void remove(int) noexcept {}
#endif
};

int cpu_count(const Cpus& cpus) noexcept {
  if (cpus.count() > 0) return cpus.count();
  const long online = sysconf(_SC_NPROCESSORS_ONLN);  // no affinity here, or more CPUs than cpu_set_t has bits
  return online < 1 ? 1 : online > kMaxThreads ? kMaxThreads : static_cast<int>(online);
}

void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// Whether `done` came true within kSpin.
template <class Done>
bool spin(Done done) noexcept {
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return false;
}

// The gate lets workers into a job and counts them out, in one word so that each step is one atomic operation:
// number of the job << 32 | vacancies << 16 | workers inside. A worker may look at the job's fields only while it is inside.
constexpr std::uint64_t kInside = 1, kVacancy = std::uint64_t{1} << 16, kNumber = std::uint64_t{1} << 32;
constexpr std::uint64_t inside(std::uint64_t gate) { return gate % kVacancy; }
constexpr std::uint64_t vacancies(std::uint64_t gate) { return gate % kNumber / kVacancy; }
constexpr std::uint64_t number(std::uint64_t gate) { return gate / kNumber; }
static_assert(kMaxThreads < kNumber / kVacancy, "vacancies have 16 bits");

struct Job {
  const Plan* plan;
  const Prepared* prepared;
  int threads;
  std::int64_t min_piece, max_piece;  // tokens
  Cpus cpus;  // the caller's
  bool has_cpus;
  int cpu;  // that the caller is on; -1: not known
  bool spins;  // a CPU for each thread: nobody is kept from work by one that spins
};

// The tokens that one thread begins with, and others help with when they have done theirs.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};  // the first that nobody has taken
  std::int64_t last = 0;
};

struct Pool {
  alignas(64) std::atomic<std::uint64_t> gate{0};
  alignas(64) Job job{};
  Share shares[kMaxThreads];
  std::mutex mutex;  // for sleeping: the gate opens, and the last worker leaves, under it or before it is taken
  std::condition_variable opened, left;
  std::atomic<int> workers{0};  // started
  std::atomic<int> numbers{1};  // each worker takes one when it begins; a job's caller is number 0
};

// Plain pointers and flags without destructors: nothing here is torn down while the process ends.
std::atomic<Pool*> the_pool{nullptr};
std::atomic<bool> owned{false};
std::atomic<bool> starts_refused{false}, always_wakes{false};
std::atomic<int> limit{0};  // 0: not read yet
std::atomic<Clock::rep> last_end{0};  // when the last call that wanted threads was done: from then on workers spin
std::atomic<int> spinning{0};  // the workers of the last call that wanted threads, if all of them came: until they sleep, they come
Clock::rep now() noexcept { return Clock::now().time_since_epoch().count(); }

void forget() noexcept {
  the_pool.store(nullptr, std::memory_order_relaxed);
  owned.store(false, std::memory_order_relaxed);
}
// Registered when the module is loaded: a fork during the very first call must find it.
const bool forgets_after_fork = pthread_atfork(nullptr, nullptr, forget) == 0;

// How many tokens to take from a share in which `left` are left: half, so that pieces are long at first, where each costs a
// call of run, and short in the end, where the others wait for the last. run likes groups of 16 tokens, the kernels blocks.
std::int64_t piece(const Job& job, std::int64_t left) noexcept {
  std::int64_t tokens = left / 2 < job.max_piece ? left / 2 : job.max_piece;
  tokens -= tokens % (tokens >= 16 ? 16 : kBlockTokens);
  return tokens < job.min_piece ? job.min_piece : tokens;
}

// Each thread has the same share in every call of the same shape: what is in its CPU's cache is worked on there again.
void run_shares(Pool& pool, int own) noexcept {
  const Job& job = pool.job;
  for (int i = 0; i < job.threads; ++i) {
    Share& share = pool.shares[(own + i) % job.threads];
    std::int64_t first = share.next.load(std::memory_order_relaxed);
    while (first < share.last) {
      const std::int64_t end = first + piece(job, share.last - first), last = end < share.last ? end : share.last;
      if (!share.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      run(*job.plan, *job.prepared, first, last);
      first = share.next.load(std::memory_order_relaxed);
    }
  }
}

// Two for each one that wakes: all are awake after a few steps, and the caller itself pays for two.
void wake_two(Pool& pool, std::uint64_t places) noexcept {
  if (places > 0) pool.opened.notify_one();
  if (places > 1) pool.opened.notify_one();
}

// The gate of the next job. Sleeps until there is one.
std::uint64_t await_job(Pool& pool, std::uint64_t seen, bool spins) noexcept {
  const auto is_new = [&] { return number(pool.gate.load(std::memory_order_acquire)) != seen; };
  if (!spins || !spin(is_new)) {
    std::unique_lock<std::mutex> lock(pool.mutex);
    pool.opened.wait(lock, is_new);
  }
  return pool.gate.load(std::memory_order_acquire);
}

// Moves the calling worker to the CPUs of the job's caller, but not onto the one that the caller itself is on: a system that
// sees no common cache wakes it right there, and then both take turns until the load is balanced, milliseconds later.
void follow(const Job& job, Cpus& callers) noexcept {
  if (!job.has_cpus || (job.cpus == callers && (job.cpu < 0 || job.cpu != Cpus::current()))) return;
  callers = job.cpus;
  Cpus own = callers;
  if (job.cpu >= 0 && own.count() > 1) own.remove(job.cpu);
  own.apply();
}

void* work(void* given) noexcept {
  Pool& pool = *static_cast<Pool*>(given);
  const int index = pool.numbers.fetch_add(1, std::memory_order_relaxed);
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "kvquant");
#endif
  Cpus callers;
  callers.read();
  std::uint64_t seen = 0;
  bool spins = false;
  for (;;) {
    std::uint64_t gate = await_job(pool, seen, spins);
    spins = false;
    while (vacancies(gate) > 0 && !pool.gate.compare_exchange_weak(gate, gate - kVacancy + kInside, std::memory_order_acq_rel,
                                                                   std::memory_order_acquire)) {
    }
    seen = number(gate);
    if (vacancies(gate) == 0) continue;  // came late: the job is closed, or has enough workers
    wake_two(pool, vacancies(gate) - 1);
    follow(pool.job, callers);
    spins = pool.job.spins;
    run_shares(pool, index % pool.job.threads);
    if (inside(pool.gate.fetch_sub(kInside, std::memory_order_acq_rel)) == 1) {
      { std::lock_guard<std::mutex> lock(pool.mutex); }
      pool.left.notify_one();
    }
  }
  return nullptr;
}

// Signals go to the program's own threads, except those that a thread raises by its own instructions: a fault in here has to
// reach the handler that reports it.
bool start_worker(Pool& pool) noexcept {
  if (starts_refused.load(std::memory_order_relaxed)) return false;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int own_fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&blocked, own_fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, work, &pool) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return started;
}

// The pool with up to `workers` workers, owned by the caller; null if there is nobody to help.
Pool* acquire(int workers) noexcept {
  if (owned.exchange(true, std::memory_order_acquire)) return nullptr;
  Pool* pool = the_pool.load(std::memory_order_relaxed);
  if (!pool && forgets_after_fork) {
    pool = new (std::nothrow) Pool;
    the_pool.store(pool, std::memory_order_release);
  }
  if (pool) {
    while (pool->workers.load(std::memory_order_relaxed) < workers && start_worker(*pool))
      pool->workers.fetch_add(1, std::memory_order_relaxed);
    if (pool->workers.load(std::memory_order_relaxed) > 0) return pool;
  }
  owned.store(false, std::memory_order_release);
  return nullptr;
}

}  // namespace

int thread_limit() noexcept {
  int value = limit.load(std::memory_order_relaxed);
  if (value > 0) return value;
  const char* text = std::getenv("KVQUANT_NUM_THREADS");
  if (!text || !*text) {
    value = kMaxThreads;
  } else {
    for (; *text >= '0' && *text <= '9'; ++text) {
      value = 10 * value + (*text - '0');
      if (value > kMaxThreads) value = kMaxThreads;
    }
    if (*text) value = 0;
  }
  limit.store(value, std::memory_order_relaxed);
  return value;
}

int automatic_threads(std::int64_t elements) noexcept {
  Cpus cpus;  // asked each time: it is the calling thread's own, may change, and costs a fraction of a microsecond
  cpus.read();
  const int count = cpu_count(cpus);
  return elements / kShare < count ? static_cast<int>(elements / kShare) : count;
}

bool worth_sharing(std::int64_t elements) noexcept {
  if (elements >= kWorthWaking || always_wakes.load(std::memory_order_relaxed)) return true;
  return Clock::duration(now() - last_end.load(std::memory_order_relaxed)) < kSpin;
}

void run_parallel(const Plan& plan, const Prepared& prepared, int threads) noexcept {
  if (threads > kMaxThreads) threads = kMaxThreads;
  const std::int64_t columns = (plan.heads_q + 2 * plan.heads_kv) * plan.dim;
  const std::int64_t blocks = (prepared.tokens + kBlockTokens - 1) / kBlockTokens;
  if (blocks < threads) threads = static_cast<int>(blocks);
  Pool* const pool = threads > 1 ? acquire(threads - 1) : nullptr;
  if (!pool) {
    run(plan, prepared, 0, prepared.tokens);
    spinning.store(0, std::memory_order_relaxed);
    last_end.store(now(), std::memory_order_relaxed);
    return;
  }
  const auto places = static_cast<std::uint64_t>(threads - 1);
  Job& job = pool->job;
  job.plan = &plan;
  job.prepared = &prepared;
  job.threads = threads;
  job.has_cpus = job.cpus.read();
  job.cpu = Cpus::current();
  job.spins = threads <= cpu_count(job.cpus);
  // A small call whose workers still spin needs nothing balanced, so that each share is one piece: what one thread takes over from
  // another is in the wrong cache, in this call and the next.
  const bool whole = prepared.tokens * columns < kWorthWaking && spinning.load(std::memory_order_relaxed) >= threads - 1;
  job.min_piece = whole ? prepared.tokens : kMinPiece / columns / kBlockTokens * kBlockTokens;
  if (job.min_piece < kBlockTokens) job.min_piece = kBlockTokens;
  job.max_piece = kMaxPiece / columns;
  for (int i = 0; i < threads; ++i) {
    pool->shares[i].next.store(i * blocks / threads * kBlockTokens, std::memory_order_relaxed);
    pool->shares[i].last = i + 1 < threads ? (i + 1) * blocks / threads * kBlockTokens : prepared.tokens;
  }
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    const std::uint64_t previous = number(pool->gate.load(std::memory_order_relaxed));
    pool->gate.store((previous + 1) * kNumber + places * kVacancy, std::memory_order_release);
  }
  wake_two(*pool, places);
  run_shares(*pool, 0);
  // Closed: who has not come yet finds no vacancy, so only those that hold a piece are waited for. If all have come, they need not
  // wait for the gate, through which they are about to leave.
  const bool full = vacancies(pool->gate.load(std::memory_order_relaxed)) == 0;
  if (!full) pool->gate.fetch_and(~(kNumber - kVacancy), std::memory_order_acq_rel);
  spinning.store(full && job.spins ? threads - 1 : 0, std::memory_order_relaxed);
  const auto is_empty = [&] { return inside(pool->gate.load(std::memory_order_acquire)) == 0; };
  if (job.spins ? !spin(is_empty) : !is_empty()) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->left.wait(lock, is_empty);
  }
  owned.store(false, std::memory_order_release);
  last_end.store(now(), std::memory_order_relaxed);
}

int worker_count() noexcept {
  const Pool* const pool = the_pool.load(std::memory_order_acquire);
  return pool ? pool->workers.load(std::memory_order_relaxed) : 0;
}

void refuse_starts(bool refuse) noexcept { starts_refused.store(refuse, std::memory_order_relaxed); }

void always_wake(bool always) noexcept { always_wakes.store(always, std::memory_order_relaxed); }

void hold_locks(int milliseconds) noexcept {
  // Asleep: on a single CPU one that spins would see `owned` only where the owner was interrupted.
  while (owned.exchange(true, std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  if (Pool* const pool = the_pool.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> lock(pool->mutex);
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  }
  owned.store(false, std::memory_order_release);
}

}  // namespace pool
}  // namespace kvquant
