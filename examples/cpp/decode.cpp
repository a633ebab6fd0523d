// A paged decode loop with std::thread workers, each of which runs its own range of every step's tokens.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "paged_decode.hpp"

int main() {
  constexpr int kWorkers = 3;
  PagedDecode decode;
  std::mutex mutex;
  std::condition_variable changed;
  int steps_ready = 0, ranges_done = 0;

  const auto worker = [&](std::int64_t first, std::int64_t last) {
    for (int step = 0; step < PagedDecode::kSteps; ++step) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return steps_ready > step; });
      }
      decode.run(first, last);
      const std::lock_guard<std::mutex> lock(mutex);
      ++ranges_done;
      changed.notify_all();
    }
  };
  std::vector<std::thread> workers;
  for (std::int64_t i = 0; i < kWorkers; ++i)
    workers.emplace_back(worker, PagedDecode::kBatch * i / kWorkers, PagedDecode::kBatch * (i + 1) / kWorkers);

  for (int step = 0; step < PagedDecode::kSteps; ++step) {
    decode.prepare(step);
    std::unique_lock<std::mutex> lock(mutex);
    ++steps_ready;
    changed.notify_all();
    changed.wait(lock, [&] { return ranges_done == kWorkers * (step + 1); });
  }
  for (std::thread& thread : workers) thread.join();

  const bool ok = decode.holds_all_steps();
  std::printf("%d steps on %d threads: %s\n", PagedDecode::kSteps, kWorkers, ok ? "all rows as expected" : "WRONG ROWS");
  return ok ? 0 : 1;
}
