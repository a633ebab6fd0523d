// One decode step of eight sequences into a paged cache, cut into two ranges as two of an engine's own threads would run it.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvquant/kvquant.hpp"

using kvquant::Argument;
using kvquant::DType;

int main() {
  const std::int64_t batch = 8, heads_q = 32, heads_kv = 8, dim = 128, columns = (heads_q + 2 * heads_kv) * dim;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  std::vector<float> x(size(batch * columns), 0.5f), cos(size(batch * dim), 1.0f), sin(size(batch * dim), 0.0f);
  std::vector<float> scale(size(heads_kv * dim), 0.25f), q(size(batch * heads_q * dim));
  std::vector<std::int8_t> k_cache(size(64 * 16 * heads_kv * dim)), v_cache(k_cache.size());
  std::vector<std::int64_t> slots;
  for (std::int64_t b = 0; b < batch; ++b) slots.push_back(b * 16 + 3);

  kvquant::Operands operands;
  const auto set = [&](Argument argument, const void* data, DType dtype, std::vector<std::int64_t> shape) {
    operands[argument] = kvquant::contiguous_view(data, dtype, static_cast<std::int32_t>(shape.size()), shape.data());
  };
  set(Argument::x, x.data(), DType::float32, {batch, columns});
  set(Argument::cos, cos.data(), DType::float32, {batch, dim});
  set(Argument::sin, sin.data(), DType::float32, {batch, dim});
  set(Argument::k_cache, k_cache.data(), DType::int8, {64, 16, heads_kv, dim});
  set(Argument::v_cache, v_cache.data(), DType::int8, {64, 16, heads_kv, dim});
  set(Argument::indices, slots.data(), DType::int64, {batch});
  set(Argument::scale_k, scale.data(), DType::float32, {heads_kv * dim});
  set(Argument::scale_v, scale.data(), DType::float32, {heads_kv * dim});
  set(Argument::q, q.data(), DType::float32, {batch, heads_q, dim});
  operands.size_splits[0] = heads_q * dim;
  operands.size_splits[1] = operands.size_splits[2] = heads_kv * dim;
  kvquant::Options options;
  options.cache_mode = kvquant::CacheMode::page;

  const auto stop_on = [](const kvquant::Status& status) {
    if (!status) return;
    char text[256];
    kvquant::message(status, text, sizeof text);
    std::fprintf(stderr, "%s\n", text);
    std::exit(1);
  };
  kvquant::Plan plan;  // once per model and layout
  stop_on(kvquant::make_plan(operands, options, plan));

  kvquant::Call call;  // every step
  call.batch = batch;
  for (int i = 0; i < kvquant::kOperandCount; ++i) call.data[i] = operands.view[i].data;
  const std::size_t bytes = kvquant::workspace_size(plan, batch);
  void* workspace = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  kvquant::Prepared prepared;
  stop_on(kvquant::prepare(plan, call, workspace, bytes, prepared));
  kvquant::run(plan, prepared, 0, 4);
  kvquant::run(plan, prepared, 4, batch);
  std::free(workspace);

  const std::int8_t stored = k_cache[size(slots[7] * heads_kv * dim)];
  std::printf("q[0] = %g, stored k = %d\n", static_cast<double>(q[0]), stored);
  return stored == 2 && q[0] == 0.5f ? 0 : 1;
}
