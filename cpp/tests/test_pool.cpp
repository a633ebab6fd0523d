// The extension's thread pool (cpp/src/pool.hpp): same bytes from any number of threads and callers, also where threads can't
// be started and across fork. Built to be run under the thread sanitizer as well.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "../src/pool.hpp"
#include "kvquant/kvquant.hpp"

using kvquant::Argument;
using kvquant::DType;
namespace pool = kvquant::pool;

namespace {

constexpr std::int64_t kHeadsQ = 3, kHeadsKv = 2, kDim = 34, kColumns = (kHeadsQ + 2 * kHeadsKv) * kDim, kRows = 300;

// One call with memory of its own. `expected` is what a single run over all tokens leaves in it.
class Work {
 public:
  Work(std::int64_t tokens, float seed)
      : x_(size(tokens * kColumns)), cos_(size(tokens * kDim)), sin_(cos_.size()), q_(size(tokens * kHeadsQ * kDim)),
        k_cache_(size(kRows * kHeadsKv * kDim)), v_cache_(k_cache_.size()), indices_(size(tokens)) {
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = seed * static_cast<float>(static_cast<int>(i * 37 % 211) - 105);
    for (std::size_t i = 0; i < cos_.size(); ++i) {
      cos_[i] = static_cast<float>(i % 19) / 19;
      sin_[i] = static_cast<float>(i % 23) / 23;
    }
    for (std::size_t t = 0; t < indices_.size(); ++t) indices_[t] = static_cast<std::int32_t>(t * 7 % 251);  // some occur twice
    kvquant::Operands a;
    const std::int64_t x[] = {tokens, kColumns}, table[] = {tokens, kDim}, cache[] = {kRows, 1, kHeadsKv, kDim}, one[] = {1};
    a[Argument::x] = kvquant::contiguous_view(x_.data(), DType::float32, 2, x);
    a[Argument::cos] = kvquant::contiguous_view(cos_.data(), DType::float32, 2, table);
    a[Argument::sin] = kvquant::contiguous_view(sin_.data(), DType::float32, 2, table);
    a[Argument::k_cache] = kvquant::contiguous_view(k_cache_.data(), DType::int8, 4, cache);
    a[Argument::v_cache] = kvquant::contiguous_view(v_cache_.data(), DType::int8, 4, cache);
    a[Argument::indices] = kvquant::contiguous_view(indices_.data(), DType::int32, 1, &tokens);
    a[Argument::scale_k] = a[Argument::scale_v] = kvquant::contiguous_view(&scale_, DType::float32, 1, one);
    a.size_splits[0] = kHeadsQ * kDim;
    a.size_splits[1] = a.size_splits[2] = kHeadsKv * kDim;
    kvquant::Options options;
    options.cache_mode = kvquant::CacheMode::page;
    options.allow_duplicates = true;
    REQUIRE(!kvquant::make_plan(a, options, plan_));
    call_.batch = tokens;
    for (int i = 0; i < kvquant::kOperandCount; ++i) call_.data[i] = a.view[i].data;
    call_[Argument::q] = q_.data();
    storage_.resize(kvquant::workspace_size(plan_, tokens) + 64);
    run([](const kvquant::Plan& plan, const kvquant::Prepared& prepared) { kvquant::run(plan, prepared, 0, prepared.tokens); });
    expected_ = bytes();
  }

  template <class Run>
  void run(Run run) {
    std::fill(q_.begin(), q_.end(), -7.0f);
    std::fill(k_cache_.begin(), k_cache_.end(), std::int8_t{77});
    std::fill(v_cache_.begin(), v_cache_.end(), std::int8_t{77});
    char* const workspace = storage_.data() + (64 - reinterpret_cast<std::uintptr_t>(storage_.data()) % 64) % 64;
    kvquant::Prepared prepared;
    REQUIRE(!kvquant::prepare(plan_, call_, workspace, storage_.size() - 64, prepared));
    run(plan_, prepared);
  }

  // Whether `threads` threads leave the same bytes.
  bool right(int threads) {
    run([=](const kvquant::Plan& plan, const kvquant::Prepared& prepared) { pool::run_parallel(plan, prepared, threads); });
    return bytes() == expected_;
  }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::string bytes() const {
    return std::string(reinterpret_cast<const char*>(q_.data()), q_.size() * sizeof(float)) +
           std::string(reinterpret_cast<const char*>(k_cache_.data()), k_cache_.size()) +
           std::string(reinterpret_cast<const char*>(v_cache_.data()), v_cache_.size());
  }

  std::vector<float> x_, cos_, sin_, q_;
  std::vector<std::int8_t> k_cache_, v_cache_;
  std::vector<std::int32_t> indices_;
  float scale_ = 0.5f;
  kvquant::Plan plan_;
  kvquant::Call call_;
  std::vector<char> storage_;
  std::string expected_;
};

}  // namespace

TEST_CASE("pool: no thread before one is wanted") {
  CHECK(pool::worker_count() == 0);
  Work work(257, 0.25f);
  for (int threads : {1, 0, -1}) CHECK(work.right(threads));
  Work few(4, 0.25f), none(0, 0.25f);
  CHECK(few.right(8));  // one block
  CHECK(none.right(8));
  CHECK(pool::worker_count() == 0);
}

TEST_CASE("pool: alone where no thread can be started") {
  Work work(257, 0.25f);
  const int before = pool::worker_count();
  pool::refuse_starts(true);
  CHECK(work.right(200));
  CHECK(pool::worker_count() == before);
  pool::refuse_starts(false);
}

TEST_CASE("pool: same bytes from any number of threads") {
  Work work(257, 0.5f);
  for (int round = 0; round < 20; ++round)
    for (int threads : {2, 3, 8, 32, 1000}) CHECK(work.right(threads));
  CHECK(pool::worker_count() == 64);  // 257 tokens are 65 blocks, and the caller takes one
  Work five(5, 0.5f);
  CHECK(five.right(2));
  Work large(pool::kWorthWaking / kColumns + 1, 0.5f);  // its shares are cut into pieces
  for (int threads : {2, 3, 8}) CHECK(large.right(threads));
}

TEST_CASE("pool: many callers at once") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i)
    callers.emplace_back([&wrong, i] {
      Work work(60 + 37 * i, 0.125f * static_cast<float>(i + 1));
      for (int round = 0; round < 60; ++round) wrong += !work.right(2 + (round + i) % 5);
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST_CASE("pool: calls with pauses, so that workers sleep between them") {
  Work work(257, 0.5f);
  for (int round = 0; round < 40; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
    CHECK(work.right(3));
  }
}

TEST_CASE("pool: the number of threads") {
  CHECK(pool::thread_limit() == pool::kMaxThreads);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(pool::choose_threads(8, 4096, pool::kWorthWaking - 1) == 1);
  CHECK(pool::choose_threads(8, 4096, pool::kWorthWaking) == 8);
  pool::always_wake(true);
  CHECK(pool::choose_threads(1, 4096, 1 << 30) == 1);
  CHECK(pool::choose_threads(8, 4096, 100) == 8);
  CHECK(pool::choose_threads(8, 4, 100) == 1);
  CHECK(pool::choose_threads(1 << 20, 4096, 100) == pool::kMaxThreads);
  CHECK(pool::choose_threads(0, 4096, 2 * pool::kShare - 1) == 1);
  CHECK(pool::choose_threads(0, 4, 1 << 30) == 1);
  const int automatic = pool::choose_threads(0, 4096, std::int64_t{1} << 40);
  CHECK(automatic >= 1);
  CHECK(automatic <= static_cast<int>(std::thread::hardware_concurrency()));
  CHECK(pool::choose_threads(0, 4096, 2 * pool::kShare) == (automatic < 2 ? automatic : 2));
}

// The thread sanitizer stops a program that starts threads in a forked child, the address sanitizer's locks do not survive fork.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("pool: a forked child starts anew, whatever the parent was doing") {
  Work work(257, 0.5f);
  CHECK(work.right(4));
  std::atomic<bool> stop{false};
  std::thread caller([&stop] {
    Work other(257, 0.25f);
    while (!stop) other.right(4);
  });
  for (int i = 0; i < 20; ++i) {
    std::thread holder;
    if (i % 2) holder = std::thread([] { pool::hold_locks(10); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      const bool fresh = pool::worker_count() == 0;
      _exit(fresh && work.right(4) && pool::worker_count() == 3 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    if (holder.joinable()) holder.join();
    CHECK(work.right(4));
  }
  stop = true;
  caller.join();
}
#endif
