// The C interface: C structures -> Operands, Options and Call; Status -> number and message. Decides nothing about the operator.
#include "kvquant/kvquant.h"

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "check.hpp"

struct kvquant_executor {
  kvquant::Plan plan;
};

namespace kvquant {
namespace {

static_assert(KVQUANT_INT8 == static_cast<int>(DType::int8) && KVQUANT_INT32 == static_cast<int>(DType::int32) &&
              KVQUANT_INT64 == static_cast<int>(DType::int64) && KVQUANT_FLOAT16 == static_cast<int>(DType::float16) &&
              KVQUANT_BFLOAT16 == static_cast<int>(DType::bfloat16) && KVQUANT_FLOAT32 == static_cast<int>(DType::float32));
static_assert(KVQUANT_NUMERICS_FP32 == static_cast<int>(Numerics::fp32) &&
              KVQUANT_NUMERICS_ASCEND == static_cast<int>(Numerics::ascend));

// The arrays of the vendor's argument lists, in its order, then those of kvquant_options.
constexpr Argument kArrays[] = {Argument::x, Argument::cos, Argument::sin, Argument::k_cache, Argument::v_cache, Argument::indices,
                                Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v,
                                Argument::weight_scale, Argument::activation_scale, Argument::bias, Argument::q, Argument::k,
                                Argument::v, Argument::positions};
constexpr int kArrayCount = static_cast<int>(sizeof(kArrays) / sizeof(kArrays[0]));

// Touched by failures only: in a library loaded at run time a thread's first access allocates.
thread_local char last_message[256];

__attribute__((format(printf, 2, 3))) kvquant_status fail(kvquant_status code, const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(last_message, sizeof(last_message), format, values);
  va_end(values);
  return code;
}

kvquant_status null_pointer(const char* argument) {
  return fail(KVQUANT_ERR_PARAM_NULLPTR, "%s: required, got nothing", argument);
}

kvquant_status result(const Status& status) {
  if (!status) return KVQUANT_OK;
  message(status, last_message, sizeof(last_message));
  return status.code == Code::missing ? KVQUANT_ERR_PARAM_NULLPTR : KVQUANT_ERR_PARAM_INVALID;
}

// The sizes of the structures' first version.
constexpr std::size_t kOptionsV1 = offsetof(kvquant_options, reserved) + sizeof(kvquant_options::reserved);
constexpr std::size_t kDataV1 = offsetof(kvquant_data, v) + sizeof(kvquant_data::v);

// Copies a caller's structure, which may be the first version (shorter) or newer (longer, but then zero beyond what is known here).
template <class Struct>
kvquant_status copy_sized(const char* name, const Struct* from, std::size_t least, Struct& to) {
  const std::size_t size = from->size;
  if (size < least || size > 4096)
    return fail(KVQUANT_ERR_PARAM_INVALID, "%s: expected size %zu, got %zu", name, sizeof(Struct), size);
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i])
      return fail(KVQUANT_ERR_PARAM_INVALID,
                  "%s: expected zero in the fields that this library does not know, got a value at byte %zu", name, i);
  std::memcpy(&to, bytes, size < sizeof(Struct) ? least : sizeof(Struct));
  return KVQUANT_OK;
}

View view_of(const kvquant_tensor& tensor) {
  View view;
  view.dtype = static_cast<DType>(tensor.dtype);
  // A tensor is there, so it must not count as absent.
  if (view.dtype == DType::none) view.dtype = DType::other;
  view.ndim = tensor.ndim;
  for (int i = 0; i < 4; ++i) {
    view.shape[i] = tensor.shape[i];
    // What exceeds 64 bits exceeds any operand (refused as too large), or belongs to an axis of one element (not looked at).
    if (__builtin_mul_overflow(tensor.strides[i], detail::item_size(view.dtype), &view.strides[i])) view.strides[i] = INT64_MAX;
  }
  return view;
}

// A null string stands for the first choice. Returns its number, or -1 after a failure.
int choice_of(const char* argument, const char* text, const char* first, const char* second = nullptr) {
  if (!text || std::strcmp(text, first) == 0) return 0;
  if (second && std::strcmp(text, second) == 0) return 1;
  const kvquant_status code = KVQUANT_ERR_PARAM_INVALID;
  if (second) fail(code, "%s: expected '%s' or '%s', got '%.64s'", argument, first, second, text);
  else fail(code, "%s: expected '%s', got '%.64s'", argument, first, text);
  return -1;
}

kvquant_status set_options(const kvquant_options* given, Options& options, const kvquant_tensor*& positions) {
  if (!given) return KVQUANT_OK;
  kvquant_options known{};
  if (const kvquant_status code = copy_sized("options", given, kOptionsV1, known)) return code;
  if (known.reserved) return fail(KVQUANT_ERR_PARAM_INVALID, "options: expected 0 in reserved, got %d", known.reserved);
  options.numerics = static_cast<Numerics>(known.numerics);
  options.skip_padding = known.skip_padding;
  options.allow_duplicates = known.allow_duplicates;
  options.vendor_limits = known.vendor_limits;
  options.isa = known.isa;
  positions = known.positions;
  return KVQUANT_OK;
}

// The prepared call lies at the head of the caller's workspace.
constexpr std::size_t kHead = (sizeof(Prepared) + detail::kAlign - 1) / detail::kAlign * detail::kAlign;

std::uint64_t workspace_bytes(const Plan& plan, std::int64_t batch, std::int64_t sequence) {
  std::int64_t tokens = 0;
  if (batch < 0 || sequence < 0 || __builtin_mul_overflow(batch, sequence, &tokens)) return 0;
  const std::size_t bytes = workspace_size(plan, tokens);
  return bytes || tokens == 0 ? kHead + bytes : 0;
}

}  // namespace
}  // namespace kvquant

using namespace kvquant;

kvquant_tensor kvquant_contiguous(std::int32_t dtype, std::int32_t ndim, const std::int64_t* shape) {
  kvquant_tensor tensor{};
  tensor.dtype = dtype;
  tensor.ndim = ndim;
  std::int64_t stride = 1;
  for (int i = (ndim < 4 ? ndim : 4) - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.strides[i] = stride;
    if (__builtin_mul_overflow(stride, shape[i], &stride)) stride = 0;  // refused later: the axes do not nest
  }
  return tensor;
}

kvquant_status kvquant_dequant_rope_quant_kvcache_get_workspace_size(
    const kvquant_tensor* x, const kvquant_tensor* cos, const kvquant_tensor* sin, const kvquant_tensor* k_cache,
    const kvquant_tensor* v_cache, const kvquant_tensor* indices, const kvquant_tensor* scale_k, const kvquant_tensor* scale_v,
    const kvquant_tensor* offset_k, const kvquant_tensor* offset_v, const kvquant_tensor* weight_scale,
    const kvquant_tensor* activation_scale, const kvquant_tensor* bias, const std::int64_t* size_splits, const char* quant_mode,
    const char* input_layout, bool kv_output, const char* cache_mode, const kvquant_tensor* q, const kvquant_tensor* k,
    const kvquant_tensor* v, std::uint64_t* workspace_size, kvquant_executor** executor, const kvquant_options* options) {
  if (!executor) return null_pointer("executor");
  *executor = nullptr;
  if (!workspace_size) return null_pointer("workspace_size");
  if (!size_splits) return null_pointer("size_splits");
  Options wanted;
  const kvquant_tensor* positions = nullptr;
  if (const kvquant_status code = set_options(options, wanted, positions)) return code;
  // That an optional one is missing where it is required is for make_plan to say.
  const kvquant_tensor* const tensors[kArrayCount] = {x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, offset_k, offset_v,
                                                      weight_scale, activation_scale, bias, q, k, v, positions};
  const auto optional = [&](Argument argument) {
    return (argument >= Argument::offset_k && argument <= Argument::positions) ||
           (!kv_output && (argument == Argument::k || argument == Argument::v));
  };
  Operands operands;
  for (int i = 0; i < kArrayCount; ++i) {
    if (tensors[i]) operands[kArrays[i]] = view_of(*tensors[i]);
    else if (!optional(kArrays[i])) return null_pointer(name(kArrays[i]));
  }
  std::memcpy(operands.size_splits, size_splits, sizeof(operands.size_splits));

  wanted.kv_output = kv_output;
  const int mode = choice_of("cache_mode", cache_mode, "contiguous", "page");
  if (mode < 0 || choice_of("quant_mode", quant_mode, "static") < 0 || choice_of("input_layout", input_layout, "BSND") < 0)
    return KVQUANT_ERR_PARAM_INVALID;
  wanted.cache_mode = static_cast<CacheMode>(mode);

  Plan plan;
  if (const kvquant_status code = result(make_plan(operands, wanted, plan))) return code;
  plan.options.isa = nullptr;  // the caller's string; the target is chosen
  const std::uint64_t bytes = workspace_bytes(plan, plan.batch, plan.sequence);
  void* const memory = std::malloc(sizeof(kvquant_executor));
  if (!memory) return fail(KVQUANT_ERR_PARAM_INVALID, "executor: out of memory");
  *executor = new (memory) kvquant_executor{plan};
  *workspace_size = bytes;
  return KVQUANT_OK;
}

void kvquant_destroy(kvquant_executor* executor) { std::free(executor); }

std::uint64_t kvquant_workspace_size(const kvquant_executor* executor, std::int64_t batch, std::int64_t sequence) {
  return executor ? workspace_bytes(executor->plan, batch, sequence) : 0;
}

kvquant_status kvquant_prepare(void* workspace, std::uint64_t workspace_size, const kvquant_executor* executor,
                               const kvquant_data* data) {
  if (!executor) return null_pointer("executor");
  if (!data) return null_pointer("data");
  if (!workspace) return null_pointer("workspace");
  kvquant_data known{};
  if (const kvquant_status code = copy_sized("data", data, kDataV1, known)) return code;
  const Plan& plan = executor->plan;
  const bool same = known.batch == 0 && known.sequence == 0;
  Call call;
  call.batch = same ? plan.batch : known.batch;
  call.sequence = same ? plan.sequence : known.sequence;
  const void* const pointers[kArrayCount] = {
      known.x, known.cos, known.sin, known.k_cache, known.v_cache, known.indices, known.scale_k, known.scale_v, known.offset_k,
      known.offset_v, known.weight_scale, known.activation_scale, known.bias, known.q, known.k, known.v,
      known.positions};
  for (int i = 0; i < kArrayCount; ++i)
    if (plan.operands[kArrays[i]].dtype != DType::none) call[kArrays[i]] = const_cast<void*>(pointers[i]);

  const std::uint64_t bytes = workspace_bytes(plan, call.batch, call.sequence), needed = bytes ? bytes : kHead;
  if (workspace_size < needed || reinterpret_cast<std::uintptr_t>(workspace) % detail::kAlign)
    return result(detail::fault(Code::workspace, Argument::workspace, static_cast<std::int64_t>(workspace_size),
                                static_cast<std::int64_t>(needed)));
  auto* const prepared = new (workspace) Prepared;
  return result(prepare(plan, call, static_cast<char*>(workspace) + kHead, workspace_size - kHead, *prepared));
}

void kvquant_run(const void* workspace, const kvquant_executor* executor, std::int64_t first, std::int64_t last) {
  run(executor->plan, *static_cast<const Prepared*>(workspace), first, last);
}

kvquant_status kvquant_dequant_rope_quant_kvcache(void* workspace, std::uint64_t workspace_size, const kvquant_executor* executor,
                                                  const kvquant_data* data) {
  const kvquant_status code = kvquant_prepare(workspace, workspace_size, executor, data);
  if (code == KVQUANT_OK) kvquant_run(workspace, executor, 0, INT64_MAX);
  return code;
}

const char* kvquant_last_message(void) { return last_message; }
const char* kvquant_version(void) { return KVQUANT_VERSION; }
std::int32_t kvquant_abi(void) { return KVQUANT_ABI; }
