// The workloads of workloads.toml through the C++ library, without Python: prepare + run of each target against the limit of
// the machine. Before a combination is timed, its bytes are compared with the tests' oracle (cpp/tests/oracle.hpp); if one
// differs the program ends with exit code 1. Options: those of Google Benchmark. Names: W1/hot/avx512/threads:1.
#include <benchmark/benchmark.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "buffers.hpp"
#include "kvquant/kvquant.hpp"
#include "limit.hpp"
#include "oracle.hpp"
#include "pool.hpp"

namespace {

using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;

struct Workload {
  const char* name;
  std::int64_t batch, sequence, heads_q, heads_kv, dim;
  DType x, output, bias;
  bool offsets, kv_output, head_major;
  CacheMode cache_mode;
  std::int64_t blocks, slots, calls;

  std::int64_t tokens() const { return batch * sequence; }
  std::int64_t width() const { return (heads_q + 2 * heads_kv) * dim; }
};

constexpr Workload kWorkloads[] = {
#include "workloads.inc"
};

// hot: the same buffers again; rows: other cache rows at each call; cold: other buffers at each call.
enum class Memory { hot, rows, cold };
constexpr const char* kMemoryNames[] = {"hot", "rows", "cold"};
constexpr std::int64_t kRowSets = 1024, kColdBytes = 160'000'000, kColdSets = 8192;  // as in workloads.py

constexpr Argument kWritten[] = {Argument::q, Argument::k, Argument::v, Argument::k_cache, Argument::v_cache};
bool is_cache(Argument a) { return a == Argument::k_cache || a == Argument::v_cache; }

std::int64_t bytes_of(const kvquant::View& view) {
  std::int64_t bytes = view.dtype == DType::none ? 0 : kvtest::item_size(view.dtype);
  for (int i = 0; i < view.ndim; ++i) bytes *= view.shape[i];
  return bytes;
}

struct Set {
  kvquant::Operands operands;
  kvquant::Call call;
  std::vector<std::int32_t> rows;
};

// The operand sets of one workload and state, and what the oracle writes for the first.
class Sets {
 public:
  Sets(const Workload& w, Memory memory) : w_(w), random_(1) {
    for (std::int64_t i = 0; i < w.blocks; ++i) blocks_.push_back(i);
    random_.shuffle(blocks_);
    add_set(nullptr);
    const std::int64_t count = memory == Memory::hot ? 1
                               : memory == Memory::rows ? kRowSets
                               : w.calls != 0 ? w.calls
                               : std::clamp<std::int64_t>(kColdBytes / useful_bytes() + 1, 3, kColdSets);
    while (static_cast<std::int64_t>(sets_.size()) < count) add_set(memory == Memory::rows ? &sets_[0] : nullptr);
    for (const Set& set : sets_) limits_.push_back(limit_call(set));
    options_.cache_mode = w.cache_mode;
    options_.kv_output = w.kv_output;

    kvquant::Operands expected = sets_[0].operands;
    for (Argument a : kWritten)
      if (expected[a].dtype != DType::none) expected[a].data = allocate(bytes_of(expected[a]));
    oracle::dequant_rope_quant_kvcache(expected, options_);
    expected_ = expected;
  }

  const std::vector<Set>& sets() const { return sets_; }
  const std::vector<LimitCall>& limits() const { return limits_; }
  const kvquant::Options& options() const { return options_; }

  void share_among(int threads) {
    for (Set& set : sets_) set.call.threads = threads;
  }

  std::int64_t useful_bytes() const {
    std::int64_t bytes = 2 * w_.tokens() * w_.heads_kv * w_.dim;
    for (int i = 0; i < kvquant::kOperandCount; ++i)
      if (!is_cache(static_cast<Argument>(i))) bytes += bytes_of(sets_[0].operands.view[i]);
    return bytes;
  }

  void clear_written() const {
    for (Argument a : kWritten) {
      const kvquant::View& view = sets_[0].operands[a];
      if (view.dtype != DType::none) std::memset(view.data, 0, static_cast<std::size_t>(bytes_of(view)));
    }
  }

  bool as_expected() const {
    return std::all_of(std::begin(kWritten), std::end(kWritten), [&](Argument a) {
      const kvquant::View& view = sets_[0].operands[a];
      return view.dtype == DType::none ||
             std::memcmp(view.data, expected_[a].data, static_cast<std::size_t>(bytes_of(view))) == 0;
    });
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  void* allocate(std::int64_t bytes) {
    const std::size_t size = (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
    memory_.emplace_back(std::aligned_alloc(64, size));
    return std::memset(memory_.back().get(), 0, size);
  }

  // Fills operands[a], unless it is shared with the first set.
  kvquant::View& add(Set& set, Argument a, DType dtype, std::vector<std::int64_t> shape) {
    kvquant::View& view = set.operands[a];
    view = kvquant::contiguous_view(nullptr, dtype, static_cast<std::int32_t>(shape.size()), shape.data());
    view.data = is_cache(a) && !sets_.empty() ? sets_[0].operands[a].data : allocate(bytes_of(view));
    return view;
  }

  void add_set(const Set* but_indices) {
    const std::int64_t b = w_.batch, s = w_.sequence, kv = w_.heads_kv, d = w_.dim;
    Set set;
    if (but_indices != nullptr) {
      set.operands = but_indices->operands;
    } else {
      const auto floats = [&](Argument a, DType dtype, std::vector<std::int64_t> shape, float scale) {
        kvtest::fill_floats(add(set, a, dtype, std::move(shape)), kvtest::Values::plain, scale, random_);
      };
      if (w_.x == DType::int32) {
        kvtest::fill_integers(add(set, Argument::x, DType::int32, {b, s, w_.width()}), kvtest::Values::plain, 20000, random_);
        floats(Argument::weight_scale, DType::float32, {w_.width()}, 1e-4f);
        floats(Argument::activation_scale, DType::float32, {b * s}, 1.0f);
        if (w_.bias != DType::none) floats(Argument::bias, w_.bias, {w_.width()}, 0.1f);
      } else {
        floats(Argument::x, w_.x, {b, s, w_.width()}, 1.0f);
      }
      for (Argument a : {Argument::cos, Argument::sin}) floats(a, w_.output, {b, s, 1, d}, 1.0f);
      for (Argument a : {Argument::scale_k, Argument::scale_v})
        kvtest::fill_scales(add(set, a, DType::float32, {kv, d}), kvtest::Values::plain, random_);
      if (w_.offsets)
        for (Argument a : {Argument::offset_k, Argument::offset_v})
          kvtest::fill_offsets(add(set, a, DType::float32, {kv, d}), kvtest::Values::plain, random_);
      set.operands.size_splits[0] = w_.heads_q * d;
      set.operands.size_splits[1] = set.operands.size_splits[2] = kv * d;
      add(set, Argument::q, w_.output, {b, s, w_.heads_q, d});
      if (w_.kv_output)
        for (Argument a : {Argument::k, Argument::v}) add(set, a, w_.output, {b, s, kv, d});
      for (Argument a : {Argument::k_cache, Argument::v_cache}) {
        kvquant::View& view = add(set, a, DType::int8, {w_.blocks, w_.slots, kv, d});
        if (w_.head_major) {
          view.strides[1] = d;
          view.strides[2] = w_.slots * d;
        }
      }
    }
    fill_indices(set);
    set.call.batch = b;
    set.call.sequence = s;
    set.call.kept = true;  // as from Python
    for (int i = 0; i < kvquant::kOperandCount; ++i) set.call.data[i] = set.operands.view[i].data;
    sets_.push_back(std::move(set));
  }

  void fill_indices(Set& set) {
    const bool page = w_.cache_mode == CacheMode::page;
    const kvquant::View& cache = set.operands[Argument::k_cache];
    kvquant::View& view = set.operands[Argument::indices];
    const std::int64_t count = page ? w_.tokens() : w_.batch;
    view = kvquant::contiguous_view(allocate(4 * count), DType::int32, 1, &count);
    auto* indices = static_cast<std::int32_t*>(view.data);
    if (page && w_.sequence == 1) random_.shuffle(blocks_);  // each sequence writes into a block of its own
    for (std::int64_t t = 0; t < w_.tokens(); ++t) {
      std::int64_t block = t / w_.sequence, slot;
      if (!page) {
        if (t % w_.sequence == 0)
          indices[block] = static_cast<std::int32_t>(random_.below(w_.slots - w_.sequence + 1));
        slot = indices[block] + t % w_.sequence;
      } else {  // a prefill fills one block after another, wherever they lie
        const std::int64_t place = (static_cast<std::int64_t>(sets_.size()) * w_.tokens() + t) % (w_.blocks * w_.slots);
        block = blocks_[static_cast<std::size_t>(w_.sequence == 1 ? t : place / w_.slots)];
        slot = w_.sequence == 1 ? random_.below(w_.slots) : place % w_.slots;
        indices[t] = static_cast<std::int32_t>(block * w_.slots + slot);
      }
      set.rows.push_back(static_cast<std::int32_t>((block * cache.strides[0] + slot * cache.strides[1]) / w_.dim));
    }
  }

  LimitCall limit_call(const Set& set) const {
    const auto pointer = [&](Argument a) { return static_cast<char*>(set.call[a]); };
    return {w_.tokens(), w_.heads_q, w_.heads_kv, w_.dim, kvtest::item_size(w_.x),
            set.operands[Argument::k_cache].strides[2], set.rows.data(),
            pointer(Argument::x), pointer(Argument::cos), pointer(Argument::sin),
            pointer(Argument::q), pointer(Argument::k), pointer(Argument::v),
            pointer(Argument::k_cache), pointer(Argument::v_cache)};
  }

  const Workload& w_;
  kvtest::Random random_;
  std::vector<std::int64_t> blocks_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::vector<Set> sets_;
  std::vector<LimitCall> limits_;
  kvquant::Options options_;
  kvquant::Operands expected_;
};

// Seconds per call of the fastest kind of stores: the median of samples over some 10 ms each.
double limit_seconds(const std::vector<LimitCall>& calls, int threads) {
  const auto count = static_cast<std::int64_t>(calls.size());
  double fastest = 1e9;
  for (int stores : {kOrdinary, kStreamRows, kStreamAll}) {
    if (kvquant_limit_admits(calls.data(), stores) == 0) continue;
    std::int64_t position = 0;
    double one[3];
    kvquant_limit_time(calls.data(), count, &position, stores, threads, 3, 1, one);
    const auto repeats = std::clamp<std::int64_t>(static_cast<std::int64_t>(30e-6 / one[2]), 1, 1000);
    const auto samples = std::clamp<std::int64_t>(static_cast<std::int64_t>(10e-3 / one[2]) / repeats, 5, 300);
    std::vector<double> seconds(static_cast<std::size_t>(samples));
    kvquant_limit_time(calls.data(), count, &position, stores, threads, samples, repeats, seconds.data());
    std::nth_element(seconds.begin(), seconds.begin() + samples / 2, seconds.end());
    fastest = std::min(fastest, seconds[static_cast<std::size_t>(samples / 2)]);
  }
  return fastest;
}

// Of this thread's work, which a neighbour on the same CPU does not lengthen; of the world where several threads share the work.
double clock_seconds(int threads) {
  timespec now;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

bool failed = false;

void measure(benchmark::State& state, const Workload& w, Memory memory, const char* isa, int threads) {
  // Benchmarks of the same workload and state follow each other, and each is called several times.
  static std::unique_ptr<Sets> sets;
  static std::pair<const Workload*, Memory> current;
  if (sets == nullptr || current != std::make_pair(&w, memory)) {
    sets.reset();
    sets = std::make_unique<Sets>(w, memory);
    current = {&w, memory};
  }
  const auto fail = [&](const char* why) {
    failed = true;
    state.SkipWithError(why);
  };

  kvquant::Options options = sets->options();
  options.isa = isa;
  kvquant::Plan plan;
  kvquant::Prepared prepared;
  char text[256];
  if (const kvquant::Status status = kvquant::make_plan(sets->sets()[0].operands, options, plan)) {
    kvquant::message(status, text, sizeof text);
    return fail(text);
  }
  const std::size_t size = kvquant::workspace_size(plan, w.tokens());
  const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, (size + 63) / 64 * 64), std::free);
  const auto call = [&](const Set& set) {
    const kvquant::Status status = kvquant::prepare(plan, set.call, workspace.get(), size, prepared);
    if (threads == 1) kvquant::run(plan, prepared, 0, prepared.tokens);
    else kvquant::pool::run_parallel(plan, prepared, threads);
    return status.code == kvquant::Code::ok;
  };
  sets->share_among(threads);
  sets->clear_written();
  if (!call(sets->sets()[0]) || !sets->as_expected()) return fail("bytes differ from the oracle");

  const double limit = limit_seconds(sets->limits(), threads);
  auto set = sets->sets().begin();
  const double start = clock_seconds(threads);
  for (auto _ : state) {
    call(*set);
    if (++set == sets->sets().end()) set = sets->sets().begin();
  }
  const double seconds = (clock_seconds(threads) - start) / static_cast<double>(state.iterations());
  const auto tokens = static_cast<double>(w.tokens());
  state.counters["ns/token"] = seconds * 1e9 / tokens;
  state.counters["GB/s"] = static_cast<double>(sets->useful_bytes()) * 1e-9 / seconds;
  state.counters["limit_ns/token"] = limit * 1e9 / tokens;
  state.counters["share"] = limit / seconds;
  state.counters["bytes_equal"] = 1;
}

int usable_cpus() {
  cpu_set_t cpus;
  return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> thread_counts = {1};
  if (usable_cpus() > 1) thread_counts.push_back(usable_cpus());
  for (const Workload& w : kWorkloads)
    for (Memory memory : {Memory::hot, Memory::rows, Memory::cold}) {
      if (memory == Memory::rows && w.sequence > 1) continue;  // a prefill writes other rows by nature
      for (int target = 0; target < kvquant::target_count(); ++target) {
        if (kvquant::target_missing(target) != nullptr) continue;
        const char* isa = kvquant::target_name(target);
        for (int threads : thread_counts) {
          const std::string name = std::string(w.name) + '/' + kMemoryNames[static_cast<int>(memory)] + '/' + isa +
                                   "/threads:" + std::to_string(threads);
          auto* b = benchmark::RegisterBenchmark(name.c_str(), [&w, memory, isa, threads](benchmark::State& state) {
            measure(state, w, memory, isa, threads);
          });
          b->Unit(benchmark::kMicrosecond);
          if (threads > 1) b->UseRealTime();
        }
      }
    }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (benchmark::RunSpecifiedBenchmarks() == 0) {
    std::fprintf(stderr, "no benchmark ran\n");
    return 1;
  }
  return failed ? 1 : 0;
}
