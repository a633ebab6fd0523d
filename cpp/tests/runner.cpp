// Plan -> prepare -> run in a fenced workspace, and the comparison of every target with the oracle (cases.hpp).
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cases.hpp"
#include "compared.hpp"
#include "oracle.hpp"

namespace kvtest {

using kvquant::Argument;
using kvquant::Call;
using kvquant::Operands;
using kvquant::Options;
using kvquant::Plan;
using kvquant::Prepared;
using kvquant::Status;

namespace {

void run_cut(const Plan& plan, const Prepared& prepared, Cut cut, std::uint64_t seed) {
  const std::int64_t tokens = prepared.tokens;
  Random random(seed);
  if (cut == Cut::whole) {
    kvquant::run(plan, prepared, 0, tokens);
  } else if (cut == Cut::three) {
    std::int64_t a = random.below(tokens + 1), b = random.below(tokens + 1);
    if (a > b) std::swap(a, b);
    kvquant::run(plan, prepared, b, tokens);
    kvquant::run(plan, prepared, 0, a);
    kvquant::run(plan, prepared, a, b);
  } else {
    std::vector<std::int64_t> order(static_cast<std::size_t>(tokens));
    for (std::int64_t t = 0; t < tokens; ++t) order[static_cast<std::size_t>(t)] = t;
    random.shuffle(order);
    for (std::int64_t t : order) kvquant::run(plan, prepared, t, t + 1);
  }
}

}  // namespace

Status execute(const Operands& operands, const Options& options, Cut cut, std::uint64_t seed, std::string& violation) {
  Plan plan;
  if (const Status status = kvquant::make_plan(operands, options, plan)) return status;
  // All ways, whatever this CPU prefers.
  plan.use_reciprocals = seed % 2 == 0;
  if (const auto order = seed / 2 % 4) plan.order = static_cast<kvquant::detail::Order>(order - 1);
  Call call;
  call.batch = plan.batch;
  call.sequence = plan.sequence;
  for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = operands.view[i].data;

  const std::size_t size = kvquant::workspace_size(plan, plan.batch * plan.sequence);
  constexpr std::size_t kFence = 64;
  std::vector<unsigned char> storage(size + 2 * kFence + 64, 0xA5);
  unsigned char* workspace = storage.data() + kFence;
  workspace += (64 - reinterpret_cast<std::uintptr_t>(workspace) % 64) % 64;
  Prepared prepared;
  const Status status = kvquant::prepare(plan, call, workspace, size, prepared);
  if (!status) {
    if (prepared.tokens != plan.batch * plan.sequence) violation = "prepared.tokens is not B*S";
    run_cut(plan, prepared, cut, seed);
  } else if (status.code == kvquant::Code::workspace) {
    violation = "workspace_size() bytes were not enough for prepare";
  }
  const auto written = [](const unsigned char* first, const unsigned char* last) {
    return std::any_of(first, last, [](unsigned char byte) { return byte != 0xA5; });
  };
  if (written(storage.data(), workspace) || written(workspace + size, storage.data() + storage.size()))
    violation = "bytes outside the workspace were written";
  return status;
}

Status execute(const Operands& operands, const Options& options) {
  std::string ignored;
  return execute(operands, options, Cut::whole, 0, ignored);
}

std::vector<int> available_targets() {
  const char* const only = std::getenv("KVQUANT_TEST_TARGET");  // for the long tests, which may share processors by target
  std::vector<int> targets;
  for (int i = 0; i < kvquant::target_count(); ++i)
    if (kvquant::target_missing(i) == nullptr && (!only || std::strcmp(only, kvquant::target_name(i)) == 0)) targets.push_back(i);
  return targets;
}

int target_index(const char* name) {
  for (int i = 0; i < kvquant::target_count(); ++i)
    if (std::strcmp(kvquant::target_name(i), name) == 0) return i;
  return -1;
}

std::string compare(Arena& arena, const Operands& operands, Options options, std::uint64_t seed, bool all_cuts) {
  const std::vector<unsigned char> before = arena.snapshot();
  oracle::dequant_rope_quant_kvcache(operands, options);
  const std::vector<unsigned char> expected = arena.snapshot();
  const auto rows = static_cast<std::uint64_t>(oracle::cache_rows(operands, options));
  for (int target : available_targets())
    for (int cut = 0; cut < 3; ++cut) {
      if (!all_cuts && (seed + static_cast<std::uint64_t>(target)) % 3 != static_cast<std::uint64_t>(cut)) continue;
      arena.restore(before);
      options.isa = kvquant::target_name(target);
      const std::uint64_t rows_before = kvquant::target_rows(target);
      std::string violation;
      const Status status = execute(operands, options, static_cast<Cut>(cut), seed, violation);
      if (status) {
        char text[512];
        kvquant::message(status, text, sizeof text);
        violation = std::string("unexpected error: ") + text;
      }
      if (violation.empty()) violation = arena.difference(expected);
      if (violation.empty() && kvquant::target_rows(target) - rows_before != rows)
        violation = "target_rows() rose by " + std::to_string(kvquant::target_rows(target) - rows_before) + ", expected " + std::to_string(rows);
      if (!violation.empty()) return std::string(options.isa) + ", cut " + std::to_string(cut) + ": " + violation;
      ++compared[target];
    }
  return {};
}

std::string compare(const Case& c, bool all_cuts) {
  Arena arena;
  Operands operands;
  Options options;
  build(c, arena, operands, options);
  const std::string mismatch = compare(arena, operands, options, c.seed, all_cuts);
  return mismatch.empty() ? mismatch : mismatch + "\n  in " + describe(c);
}

}  // namespace kvtest
