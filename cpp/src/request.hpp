// What a call from Python brings, and the plan made of it. Built into the extension only; knows arrays as borrowed references.
#pragma once

#include <Python.h>

#include <cstring>
#include <new>

#include "kvquant/kvquant.hpp"

namespace kvquant {

// The arguments of one call or plan as the core wants them. The arrays are borrowed: from the caller's arguments during
// a call, from Plan's own references afterwards.
struct Request {
  Operands operands;
  Options options;
  void* data[kOperandCount] = {};
  PyObject* arrays[kOperandCount] = {};
  int threads = 0;  // 0: automatic
  bool tensors = false;  // the arrays are torch tensors, and results will be
  bool direct = false;   // the tensors did not come through PyTorch's dispatcher
  const Plan* plan = nullptr;  // once checked: `own`, that of the Plan object whose request this is like, or a lent one
  bool* lent = nullptr;        // true while the plan is lent to this request
  union {
    Plan own;  // not written before it is needed: it is larger than all the rest
  };
  Request() {}
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request() {
    if (lent) *lent = false;
  }
};

// Everything that make_plan looks at; compared by fields, as the structures have padding.
inline bool same_metadata(const Request& r, const Operands& operands, const Options& options) {
  for (int i = 0; i < kOperandCount; ++i) {
    const View &a = r.operands.view[i], &b = operands.view[i];
    if (a.dtype != b.dtype) return false;
    if (a.dtype == DType::none) continue;
    std::int64_t differ = (a.ndim ^ b.ndim) | (a.read_only ^ b.read_only);
    for (int axis = 0; axis < 4; ++axis) differ |= (a.shape[axis] ^ b.shape[axis]) | (a.strides[axis] ^ b.strides[axis]);
    if (differ) return false;
  }
  return std::memcmp(r.operands.size_splits, operands.size_splits, sizeof operands.size_splits) == 0 &&
         r.options.cache_mode == options.cache_mode && r.options.numerics == options.numerics &&
         r.options.kv_output == options.kv_output && r.options.skip_padding == options.skip_padding &&
         r.options.allow_duplicates == options.allow_duplicates && r.options.vendor_limits == options.vendor_limits &&
         r.options.isa == options.isa;
}

// make_plan, unless this thread's last plan was made of the same metadata: decode loops repeat theirs call after call. That plan
// is lent for as long as the request lives, or copied to be kept. A call in progress may have it already, as allocating a result may
// run the garbage collector, and that any code.
inline Status check_request(Request& r, bool keep) {
  static thread_local struct {
    Operands operands;
    Options options;
    Plan plan;
    bool made = false, lent = false;
  } last;
  if (!last.lent) {
    if (!last.made || !same_metadata(r, last.operands, last.options)) {
      last.made = false;
      new (&last.plan) Plan;
      if (const Status status = make_plan(r.operands, r.options, last.plan)) return status;
      last.operands = r.operands;
      last.options = r.options;
      last.made = !r.options.isa;  // a name of a target lives as long as its caller wants
    }
    if (keep) {
      r.plan = new (&r.own) Plan(last.plan);
      return {};
    }
    r.plan = &last.plan;
    r.lent = &last.lent;
    last.lent = true;
    return {};
  }
  r.plan = &r.own;
  new (&r.own) Plan;
  return make_plan(r.operands, r.options, r.own);
}

}  // namespace kvquant
