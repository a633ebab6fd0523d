// The same decode loop in an engine that has a parallel_for: kvquant is one more loop body.
#include <atomic>
#include <thread>

#include "paged_decode.hpp"

// Stands for the engine's own: calls body(first, last) on pieces of [0, count), on several threads.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  std::atomic<std::int64_t> next{0};
  const auto take_pieces = [&] {
    for (std::int64_t first; (first = next.fetch_add(grain)) < count;) body(first, first + grain < count ? first + grain : count);
  };
  std::thread helper(take_pieces);
  take_pieces();
  helper.join();
}

int main() {
  PagedDecode decode;
  for (int step = 0; step < PagedDecode::kSteps; ++step) {
    decode.prepare(step);
    parallel_for(PagedDecode::kBatch, 4, [&](std::int64_t first, std::int64_t last) { decode.run(first, last); });
  }
  const bool ok = decode.holds_all_steps();
  std::printf("%d steps by parallel_for: %s\n", PagedDecode::kSteps, ok ? "all rows as expected" : "WRONG ROWS");
  return ok ? 0 : 1;
}
