// A call of the C interface, made from the operands of a C++ call.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "cases.hpp"
#include "kvquant/kvquant.h"

namespace kvtest {

using kvquant::Argument;

// The arrays in the order of kvquant_data: that of the C arguments, then those of kvquant_options.
constexpr Argument kArrays[] = {Argument::x, Argument::cos, Argument::sin, Argument::k_cache, Argument::v_cache, Argument::indices,
                                Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v,
                                Argument::weight_scale, Argument::activation_scale, Argument::bias, Argument::q, Argument::k,
                                Argument::v, Argument::positions};
constexpr int kTensors = static_cast<int>(sizeof kArrays / sizeof kArrays[0]);

struct CCall {
  kvquant_tensor tensors[kTensors] = {};
  bool given[kTensors] = {};
  std::int64_t splits[3] = {};
  const char *quant_mode = "static", *input_layout = "BSND", *cache_mode = "contiguous";
  bool kv_output = false;
  kvquant_options options{};
  kvquant_data data{};
  kvquant_executor* executor = nullptr;
  std::uint64_t workspace_size = 0;
  std::vector<unsigned char> storage;

  CCall() = default;
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;
  ~CCall() { kvquant_destroy(executor); }

  kvquant_tensor* at(Argument argument) {
    int i = 0;
    while (kArrays[i] != argument) ++i;
    return given[i] ? &tensors[i] : nullptr;
  }
  kvquant_status plan() {
    using A = Argument;
    kvquant_destroy(executor);
    return kvquant_dequant_rope_quant_kvcache_get_workspace_size(
        at(A::x), at(A::cos), at(A::sin), at(A::k_cache), at(A::v_cache), at(A::indices), at(A::scale_k), at(A::scale_v),
        at(A::offset_k), at(A::offset_v), at(A::weight_scale), at(A::activation_scale), at(A::bias), splits, quant_mode,
        input_layout, kv_output, cache_mode, at(A::q), at(A::k), at(A::v), &workspace_size, &executor, &options);
  }
  void* workspace() {
    storage.assign(workspace_size + 64, 0xA5);
    return storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
  }
  kvquant_status run() {
    void* const memory = workspace();
    return kvquant_dequant_rope_quant_kvcache(memory, workspace_size, executor, &data);
  }
};

// The pointers of `data` by place in kArrays.
inline std::size_t place_of(int i) { return offsetof(kvquant_data, x) + sizeof(void*) * static_cast<std::size_t>(i); }
inline void* data_at(const kvquant_data& data, int i) {
  void* p;
  std::memcpy(&p, reinterpret_cast<const char*>(&data) + place_of(i), sizeof p);
  return p;
}
inline void set_data(kvquant_data& data, int i, const void* p) {
  std::memcpy(reinterpret_cast<char*>(&data) + place_of(i), &p, sizeof p);
}

// False if strides are not whole elements: C can't say that.
inline bool convert(const kvquant::Operands& operands, const kvquant::Options& options, CCall& call) {
  call.data.size = sizeof call.data;
  for (int i = 0; i < kTensors; ++i) {
    const kvquant::View& view = operands[kArrays[i]];
    call.given[i] = view.dtype != kvquant::DType::none;
    if (!call.given[i]) continue;
    const std::int64_t item = item_size(view.dtype);
    kvquant_tensor& tensor = call.tensors[i];
    tensor.dtype = static_cast<std::int32_t>(view.dtype);
    tensor.ndim = view.ndim;
    for (int axis = 0; axis < 4; ++axis) {
      if (axis < view.ndim && view.strides[axis] % item) return false;
      tensor.shape[axis] = view.shape[axis];
      tensor.strides[axis] = axis < view.ndim ? view.strides[axis] / item : 0;
    }
    set_data(call.data, i, view.data);
  }
  std::memcpy(call.splits, operands.size_splits, sizeof call.splits);
  call.kv_output = options.kv_output;
  call.cache_mode = options.cache_mode == kvquant::CacheMode::page ? "page" : "contiguous";
  call.options = {sizeof(kvquant_options), options.isa, static_cast<std::int32_t>(options.numerics), options.skip_padding,
                  options.allow_duplicates, options.vendor_limits, 0, call.at(Argument::positions)};
  return true;
}

}  // namespace kvtest
