// What both examples share: a paged int8 cache, one plan made at start-up, and the data of each decode step. An engine has its
// own block tables and buffers; what it hands to kvquant is the plan's views, the pointers of the step, and its workspace.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvquant/kvquant.hpp"

class PagedDecode {
 public:
  static constexpr std::int64_t kBatch = 24, kHeadsQ = 32, kHeadsKv = 8, kDim = 128, kPage = 16, kPages = 128;
  static constexpr int kSteps = 40;  // tokens of each sequence: two full pages and a half

  PagedDecode() {
    using kvquant::Argument;
    using kvquant::DType;
    kvquant::Operands operands;
    const auto set = [&](Argument argument, const void* data, DType dtype, std::vector<std::int64_t> shape) {
      operands[argument] = kvquant::contiguous_view(data, dtype, static_cast<std::int32_t>(shape.size()), shape.data());
    };
    set(Argument::x, x_.data(), DType::float32, {kBatch, kColumns});
    set(Argument::cos, cos_.data(), DType::float32, {kBatch, kDim});
    set(Argument::sin, sin_.data(), DType::float32, {kBatch, kDim});
    set(Argument::indices, slots_.data(), DType::int64, {kBatch});
    set(Argument::scale_k, scale_.data(), DType::float32, {kHeadsKv * kDim});
    set(Argument::scale_v, scale_.data(), DType::float32, {kHeadsKv * kDim});
    set(Argument::q, q_.data(), DType::float32, {kBatch, kHeadsQ, kDim});
    // This engine keeps K and V of a page side by side: kv[page, 2, row, head, :]. Layouts are strides, here in bytes.
    set(Argument::k_cache, kv_.data(), DType::int8, {kPages, kPage, kHeadsKv, kDim});
    operands[Argument::k_cache].strides[0] = 2 * kPageBytes;
    operands[Argument::v_cache] = operands[Argument::k_cache];
    operands[Argument::v_cache].data = kv_.data() + kPageBytes;
    operands.size_splits[0] = kHeadsQ * kDim;
    operands.size_splits[1] = operands.size_splits[2] = kHeadsKv * kDim;
    kvquant::Options options;
    options.cache_mode = kvquant::CacheMode::page;
    stop_on(kvquant::make_plan(operands, options, plan_));  // metadata only: once per model and layout

    call_.batch = kBatch;
    for (int i = 0; i < kvquant::kOperandCount; ++i) call_.data[i] = operands.view[i].data;
    workspace_bytes_ = kvquant::workspace_size(plan_, kBatch);
    workspace_ = std::aligned_alloc(64, (workspace_bytes_ + 63) / 64 * 64);
    if (!workspace_) std::abort();
  }
  PagedDecode(const PagedDecode&) = delete;
  PagedDecode& operator=(const PagedDecode&) = delete;
  ~PagedDecode() { std::free(workspace_); }

  // One step, by one thread: the model's output and the slots of the new tokens, then every check of this call. Afterwards any
  // threads may run any ranges of its tokens.
  void prepare(int step) {
    for (float& value : x_) value = 0.25f * static_cast<float>(step + 1);
    for (std::int64_t b = 0; b < kBatch; ++b) slots_[size(b)] = slot(b, step);
    stop_on(kvquant::prepare(plan_, call_, workspace_, workspace_bytes_, prepared_));
  }
  void run(std::int64_t first, std::int64_t last) { kvquant::run(plan_, prepared_, first, last); }

  // Whether each row holds the code of its step.
  bool holds_all_steps() const {
    for (std::int64_t b = 0; b < kBatch; ++b)
      for (int step = 0; step < kSteps; ++step)
        for (std::int64_t i = 0; i < 2 * kHeadsKv * kDim; ++i) {
          const std::int64_t kv = i / (kHeadsKv * kDim), at = i % (kHeadsKv * kDim), s = slot(b, step);
          if (kv_[size((s / kPage * 2 + kv) * kPageBytes + s % kPage * kHeadsKv * kDim + at)] != step + 1) return false;
        }
    return true;
  }

 private:
  static constexpr std::int64_t kColumns = (kHeadsQ + 2 * kHeadsKv) * kDim, kPageBytes = kPage * kHeadsKv * kDim;
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  // A block table: page p of sequence b.
  static std::int64_t slot(std::int64_t b, int step) { return ((step / kPage * 37 + b * 5) % kPages) * kPage + step % kPage; }
  static void stop_on(const kvquant::Status& status) {
    if (!status) return;
    char text[256];
    kvquant::message(status, text, sizeof text);
    std::fprintf(stderr, "%s\n", text);
    std::exit(1);
  }

  std::vector<float> x_{std::vector<float>(size(kBatch * kColumns))}, q_{std::vector<float>(size(kBatch * kHeadsQ * kDim))};
  std::vector<float> cos_{std::vector<float>(size(kBatch * kDim), 1.0f)}, sin_{std::vector<float>(size(kBatch * kDim), 0.0f)};
  std::vector<float> scale_{std::vector<float>(size(kHeadsKv * kDim), 0.25f)};
  std::vector<std::int8_t> kv_{std::vector<std::int8_t>(size(2 * kPages * kPageBytes))};
  std::vector<std::int64_t> slots_{std::vector<std::int64_t>(size(kBatch))};
  kvquant::Plan plan_;
  kvquant::Call call_;
  kvquant::Prepared prepared_;
  void* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};
