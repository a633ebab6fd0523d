// What a call from Python brings, and the plan made of it. Built into the extension only; knows arrays as borrowed references.
#pragma once

#include <Python.h>

#include <cstring>
#include <new>

#include "kvquant/kvquant.hpp"

namespace kvquant {

// A plan, and which operands it was made of, as bits 1 << Argument: make_plan adds views of absent results.
struct Made {
  Plan plan;
  std::uint32_t given = 0;
};

// A thread's last plan.
struct LastPlan {
  Made made;
  bool valid = false, lent = false;
};

// The arguments of one call or plan. The arrays are borrowed: from the caller's arguments during a call, from Plan's own
// references afterwards.
struct Request {
  PyObject* arrays[kOperandCount] = {};  // null: not given
  void* data[kOperandCount] = {};
  std::int64_t size_splits[3];
  Options options;
  int threads = 0;       // 0: automatic
  bool tensors = false;  // the arrays are torch tensors, and results will be
  bool direct = false;   // the tensors did not come through PyTorch's dispatcher
  const Made* made = nullptr;  // once checked: `own`, that of the Plan object whose request this is like, or `last`
  LastPlan* last = nullptr;    // while it is lent to this request
  union {
    Made own;  // not written before it is needed: it is larger than all the rest
  };
  Request() {}
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request() {
    if (last) last->lent = false;
  }
};

// What a thread's last call prepared, so that a loop of calls with the same scales need not copy, check and invert them anew. In
// use from prepare to run only, where no Python code runs.
struct Kept {
  Prepared prepared;
  char* workspace;
  std::size_t bytes;
};
inline Kept& kept_by_thread() {
  alignas(64) static thread_local char workspace[40960];  // beyond that, it is allocated by each call
  static thread_local Kept kept{{}, workspace, sizeof workspace};
  return kept;
}

// Which operands were given, as bits. C3: for float x three of them have no effect and are not looked at, whatever they are.
inline std::uint32_t looked_at(const Request& r, bool integer_x) {
  std::uint32_t given = 0;
  for (int i = 0; i < kOperandCount; ++i) given |= static_cast<std::uint32_t>(r.arrays[i] != nullptr) << i;
  const auto bit = [](Argument argument) { return std::uint32_t{1} << static_cast<int>(argument); };
  return integer_x ? given : given & ~(bit(Argument::weight_scale) | bit(Argument::activation_scale) | bit(Argument::bias));
}

// What make_plan looks at, of one operand; of at most four dimensions, as those of `known` are.
inline bool same_metadata(const View& view, const View& known) {
  if (view.dtype != known.dtype || view.ndim != known.ndim || view.read_only != known.read_only) return false;
  for (int axis = 0; axis < view.ndim; ++axis)
    if (view.shape[axis] != known.shape[axis] || view.strides[axis] != known.strides[axis]) return false;
  return true;
}

inline bool same_options(const Request& r, const Plan& plan) {
  const Options& options = plan.options;
  return std::memcmp(r.size_splits, plan.operands.size_splits, sizeof r.size_splits) == 0 &&
         r.options.cache_mode == options.cache_mode && r.options.numerics == options.numerics &&
         r.options.kv_output == options.kv_output && r.options.skip_padding == options.skip_padding &&
         r.options.allow_duplicates == options.allow_duplicates && r.options.vendor_limits == options.vendor_limits &&
         r.options.isa == options.isa;
}

// Decode loops repeat their metadata call after call, so a thread keeps its last plan. It is lent for as long as the request
// lives. A call in progress may have it already, as allocating a result may run the garbage collector, and that any code: then
// nothing is lent.
inline void borrow_last_plan(Request& r) {
  static thread_local LastPlan last;
  if (last.lent) return;
  last.lent = true;
  r.last = &last;
}

// Makes room for another plan: in the last one's place or, without, in the request itself.
inline Made& new_plan(Request& r) {
  if (r.last) r.last->valid = false;
  Made& made = *new (r.last ? &r.last->made : &r.own) Made;
  std::memcpy(made.plan.operands.size_splits, r.size_splits, sizeof r.size_splits);
  made.plan.options = r.options;
  return made;
}

// Lets a checked request outlive its call.
inline void keep_plan(Request& r) {
  if (!r.last) return;
  r.made = new (&r.own) Made(*r.made);
  r.last->lent = false;
  r.last = nullptr;
}

}  // namespace kvquant
