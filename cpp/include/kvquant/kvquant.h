/* kvquant for C: dequantise -> split QKV -> rotary embedding -> quantise K and V to int8 -> scatter into the KV cache, in one
 * pass on the CPU. The rules (C1-C8, I1-I10), and shapes and dtypes of all operands, are in docs/contract.md.
 *
 * Two phases with the arguments of aclnnDequantRopeQuantKvcache, in its order:
 *
 *   kvquant_dequant_rope_quant_kvcache_get_workspace_size   metadata only: makes an executor, says how large a workspace is
 *   kvquant_dequant_rope_quant_kvcache                      data: checks every value, then writes; as often as you like
 *
 * An executor is immutable: any number of threads may use one at the same time, each with a workspace of its own. To spread
 * one call over threads, kvquant_prepare and kvquant_run are the two halves of the second phase.
 *
 * Every function but the first phase and kvquant_destroy allocates nothing. None prints, throws or starts a thread. C11, C++17.
 */
#ifndef KVQUANT_KVQUANT_H
#define KVQUANT_KVQUANT_H

#include <stddef.h>
#include <stdint.h>
#ifndef __cplusplus
#include <stdbool.h>
#endif

#if defined(_WIN32)
#define KVQUANT_C_API
#else
#define KVQUANT_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when a program must be compiled anew; compare it with kvquant_abi(). Structures that begin with `size` grow at their
 * end without that: the fields that a program does not know, or the library does not know, count as zero. A set field that the
 * library does not know is refused. */
#define KVQUANT_ABI 1

/* What every function that can fail returns. On anything but KVQUANT_OK, kvquant_last_message() says what is wrong and no
 * operand has been written. */
typedef int32_t kvquant_status;
enum {
  KVQUANT_OK = 0,
  KVQUANT_ERR_PARAM_NULLPTR = 161001, /* a required argument or data pointer is null */
  KVQUANT_ERR_PARAM_INVALID = 161002  /* anything else: dtype, shape, stride, overlap, index, scale, option, out of memory */
};

/* Element types. kvquant_tensor.dtype takes any number, so that an error can name what it got. */
enum {
  KVQUANT_INT8 = 1,
  KVQUANT_INT32 = 2,
  KVQUANT_INT64 = 3,
  KVQUANT_FLOAT16 = 4,
  KVQUANT_BFLOAT16 = 5,
  KVQUANT_FLOAT32 = 6
};

/* What the first phase knows of an operand. Strides are in elements and may be negative or zero where docs/contract.md (I5,
 * I5a) allows it. */
typedef struct kvquant_tensor {
  int32_t dtype;
  int32_t ndim; /* 0 to 4 */
  int64_t shape[4];
  int64_t strides[4];
} kvquant_tensor;

/* A contiguous (C order) tensor; reads ndim (at most 4) lengths from `shape`. */
KVQUANT_C_API kvquant_tensor kvquant_contiguous(int32_t dtype, int32_t ndim, const int64_t* shape);

enum { KVQUANT_NUMERICS_FP32 = 0, KVQUANT_NUMERICS_ASCEND = 1 };

/* What the original has no arguments for. All zero is the default. */
typedef struct kvquant_options {
  size_t size;              /* sizeof(kvquant_options) */
  const char* isa;          /* name of a target, e.g. "avx2"; null or empty: what KVQUANT_ISA names, else the best */
  int32_t numerics;         /* KVQUANT_NUMERICS_FP32, or KVQUANT_NUMERICS_ASCEND: the roundings of the NPU's kernel (C7) */
  uint8_t skip_padding;     /* 1: tokens with index -1 are rotated but not cached (I3: padding_index=-1) */
  uint8_t allow_duplicates; /* 1: of equal indices the last token wins; 0: they are an error (I2) */
  uint8_t vendor_limits;    /* 1: also refuse what the NPU operator refuses (I8) */
  uint8_t reserved;         /* 0 */
  const kvquant_tensor* positions; /* null, or [B*S] int32 or int64: cos and sin are tables [P,D] or [P,D/2] (I10) */
} kvquant_options;

typedef struct kvquant_executor kvquant_executor;

/* First phase: looks at metadata and makes `*executor`, to be given to kvquant_destroy. Nothing that the arguments point at is
 * needed afterwards.
 *
 * B, S, Nq, Nkv, D, H = (Nq + 2 * Nkv) * D as in docs/contract.md; [B,S,...] is [B,...] where x has two dimensions.
 *   x                  [B,S,H] int32, or the dtype of cos
 *   cos, sin           [B,S,1,D] ([B,D] for x of two dimensions) float16, bfloat16 or float32: the output dtype; tables with
 *                      options->positions
 *   k_cache, v_cache   [C1,C2,Nkv,D] int8, written by the second phase
 *   indices            int32 or int64, cache_mode "contiguous": [B]; "page": [B*S]
 *   scale_k, scale_v   [Nkv,D], [Nkv*D], [Nkv,1], [1] or [] float32
 *   offset_k, offset_v null, or as scale_k
 *   weight_scale       [H] float32; required for int32 x, otherwise not looked at, as the next two
 *   activation_scale   null, or [B*S] float32
 *   bias               null, or [H] int32, float32, float16 or bfloat16
 *   size_splits        three integers: Nq*D, Nkv*D, Nkv*D
 *   quant_mode         "static" or null
 *   input_layout       "BSND" or null
 *   kv_output          whether the rotated K and the dequantised V are also written to k and v
 *   cache_mode         "contiguous", "page" or null, which is "contiguous"
 *   q                  [B,S,Nq,D] of the output dtype
 *   k, v               [B,S,Nkv,D] of the output dtype; null without kv_output
 *   workspace_size     out: bytes of workspace that a call of this B and S needs
 *   executor           out; null on error
 *   options            null: defaults
 */
KVQUANT_C_API kvquant_status kvquant_dequant_rope_quant_kvcache_get_workspace_size(
    const kvquant_tensor* x, const kvquant_tensor* cos, const kvquant_tensor* sin, const kvquant_tensor* k_cache,
    const kvquant_tensor* v_cache, const kvquant_tensor* indices, const kvquant_tensor* scale_k, const kvquant_tensor* scale_v,
    const kvquant_tensor* offset_k, const kvquant_tensor* offset_v, const kvquant_tensor* weight_scale,
    const kvquant_tensor* activation_scale, const kvquant_tensor* bias, const int64_t* size_splits, const char* quant_mode,
    const char* input_layout, bool kv_output, const char* cache_mode, const kvquant_tensor* q, const kvquant_tensor* k,
    const kvquant_tensor* v, uint64_t* workspace_size, kvquant_executor** executor, const kvquant_options* options);

/* Null is allowed. No thread may be using the executor. */
KVQUANT_C_API void kvquant_destroy(kvquant_executor* executor);

/* Bytes of workspace for a call of another B and S; 0 if there can't be such a call. */
KVQUANT_C_API uint64_t kvquant_workspace_size(const kvquant_executor* executor, int64_t batch, int64_t sequence);

/* What the second phase knows of a call: its size and pointers. Operands that were null in the first phase are ignored;
 * strides are those of the first phase, for any B and S. */
typedef struct kvquant_data {
  size_t size;             /* sizeof(kvquant_data) */
  int64_t batch, sequence; /* B and S of this call (S = 1 for x of two dimensions); both zero: those of the first phase */
  const void *x, *cos, *sin;
  void *k_cache, *v_cache;
  const void *indices, *scale_k, *scale_v, *offset_k, *offset_v, *weight_scale, *activation_scale, *bias;
  void *q, *k, *v;
  const void* positions;
} kvquant_data;

/* Second phase: checks indices, scales, offsets and overlap, then writes q, k, v and the cache rows, on this thread. The same
 * executor and workspace may be used again, after the data or the pointers have changed.
 * workspace: 64-byte aligned, `workspace_size` bytes or more; its contents mean nothing before and after. */
KVQUANT_C_API kvquant_status kvquant_dequant_rope_quant_kvcache(void* workspace, uint64_t workspace_size,
                                                                const kvquant_executor* executor, const kvquant_data* data);

/* The second phase in two halves, for an engine's own threads. kvquant_prepare makes every check and leaves its result in the
 * workspace, which must then stay as it is. kvquant_run writes the tokens first <= t < last of 0 <= t < B*S (what lies outside
 * is left out) and can't fail: it may be called by any thread, for ranges that do not intersect also at the same time. After a
 * kvquant_prepare that failed, don't call it. */
KVQUANT_C_API kvquant_status kvquant_prepare(void* workspace, uint64_t workspace_size, const kvquant_executor* executor,
                                             const kvquant_data* data);
KVQUANT_C_API void kvquant_run(const void* workspace, const kvquant_executor* executor, int64_t first, int64_t last);

/* What was wrong with the last call on this thread that failed: one line in the words of Python and C++, naming the argument,
 * what was expected and what came. Empty before the first failure; changes at the next one. Never null. */
KVQUANT_C_API const char* kvquant_last_message(void);

KVQUANT_C_API const char* kvquant_version(void); /* "major.minor.patch" */
KVQUANT_C_API int32_t kvquant_abi(void);         /* KVQUANT_ABI of the library */

#ifdef __cplusplus
}
#endif
#endif
