/* The published example of aclnnDequantRopeQuantKvcache, written anew for the CPU: 320 sequences, one token each, Nq = 8, Nkv = 1,
 * D = 128, int32 x -> float16, contiguous caches [320,1280,1,128]. (In print, activation scale and bias have other sizes than
 * the operator takes; here they are [320] and [1280].)
 *
 * A call moves from the NPU by these changes: aclTensor -> kvquant_tensor, the stream -> the pointers of this call. */
#include <stdio.h>
#include <stdlib.h>

#include "kvquant/kvquant.h"

enum { B = 320, S = 1, NQ = 8, NKV = 1, D = 128, H = (NQ + 2 * NKV) * D, C2 = 1280 };

static void* allocate(size_t bytes) {
  void* const p = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!p) abort();
  return p;
}

static kvquant_tensor tensor(int32_t dtype, int32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  return kvquant_contiguous(dtype, ndim, shape);
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, kvquant_last_message());
  return 1;
}

int main(void) {
  if (kvquant_abi() != KVQUANT_ABI) return failed("this program was compiled for another version of the library");

  int32_t* const x = allocate(sizeof(int32_t) * B * S * H);
  uint16_t* const cos = allocate(sizeof(uint16_t) * B * S * D); /* float16, by its bits */
  uint16_t* const sin = allocate(sizeof(uint16_t) * B * S * D);
  int8_t* const k_cache = calloc((size_t)B * C2 * NKV * D, 1);
  int8_t* const v_cache = calloc((size_t)B * C2 * NKV * D, 1);
  int32_t* const indices = allocate(sizeof(int32_t) * B);
  float* const scale = allocate(sizeof(float) * NKV * D);
  float* const offset = allocate(sizeof(float) * NKV * D);
  float* const weight_scale = allocate(sizeof(float) * H);
  float* const activation_scale = allocate(sizeof(float) * B * S);
  float* const bias = allocate(sizeof(float) * H);
  uint16_t* const q = allocate(sizeof(uint16_t) * B * S * NQ * D);
  uint16_t* const k = allocate(sizeof(uint16_t) * B * S * NKV * D);
  uint16_t* const v = allocate(sizeof(uint16_t) * B * S * NKV * D);
  if (!k_cache || !v_cache) abort();
  for (int i = 0; i < B * S * H; ++i) x[i] = i % H / D; /* the number of the head: q 0-7, k 8, v 9 */
  for (int i = 0; i < B * S * D; ++i) {
    cos[i] = 0x0000; /* a quarter turn: (a, b) becomes (-b, a) */
    sin[i] = 0x3C00;
  }
  for (int b = 0; b < B; ++b) {
    indices[b] = (b * 7) % C2;
    activation_scale[b] = 2.0f;
  }
  for (int d = 0; d < NKV * D; ++d) {
    scale[d] = 0.5f;
    offset[d] = 3.0f;
  }
  for (int h = 0; h < H; ++h) {
    weight_scale[h] = 0.25f;
    bias[h] = 1.0f;
  }

  /* First phase: metadata. Once for each layout. */
  const kvquant_tensor x_tensor = tensor(KVQUANT_INT32, 3, B, S, H, 0), table = tensor(KVQUANT_FLOAT16, 4, B, S, 1, D);
  const kvquant_tensor cache = tensor(KVQUANT_INT8, 4, B, C2, NKV, D), index_tensor = tensor(KVQUANT_INT32, 1, B, 0, 0, 0);
  const kvquant_tensor per_channel = tensor(KVQUANT_FLOAT32, 1, NKV * D, 0, 0, 0);
  const kvquant_tensor per_column = tensor(KVQUANT_FLOAT32, 1, H, 0, 0, 0), per_token = tensor(KVQUANT_FLOAT32, 1, B * S, 0, 0, 0);
  const kvquant_tensor q_tensor = tensor(KVQUANT_FLOAT16, 4, B, S, NQ, D), kv_tensor = tensor(KVQUANT_FLOAT16, 4, B, S, NKV, D);
  const int64_t size_splits[3] = {NQ * D, NKV * D, NKV * D};
  uint64_t workspace_size = 0;
  kvquant_executor* executor = NULL;
  if (kvquant_dequant_rope_quant_kvcache_get_workspace_size(
          &x_tensor, &table, &table, &cache, &cache, &index_tensor, &per_channel, &per_channel, &per_channel, &per_channel,
          &per_column, &per_token, &per_column, size_splits, "static", "BSND", true, "contiguous", &q_tensor, &kv_tensor,
          &kv_tensor, &workspace_size, &executor, NULL) != KVQUANT_OK)
    return failed("first phase");

  /* Second phase: data. At every step. */
  void* const workspace = allocate(workspace_size);
  const kvquant_data data = {.size = sizeof(kvquant_data),
                             .batch = B,
                             .sequence = S,
                             .x = x,
                             .cos = cos,
                             .sin = sin,
                             .k_cache = k_cache,
                             .v_cache = v_cache,
                             .indices = indices,
                             .scale_k = scale,
                             .scale_v = scale,
                             .offset_k = offset,
                             .offset_v = offset,
                             .weight_scale = weight_scale,
                             .activation_scale = activation_scale,
                             .bias = bias,
                             .q = q,
                             .k = k,
                             .v = v};
  if (kvquant_dequant_rope_quant_kvcache(workspace, workspace_size, executor, &data) != KVQUANT_OK) return failed("second phase");

  /* Head h dequantises to h * 0.25 * 2 + 1: k 5, v 5.5. The turn negates the first half of k. Codes: 2 * value + 3. */
  int wrong = 0;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t d = 0; d < D; ++d) {
      const int64_t at = (b * C2 + indices[b]) * D + d;
      wrong += k_cache[at] != (d < D / 2 ? -7 : 13) || v_cache[at] != 14;
      wrong += k[b * D + d] != (d < D / 2 ? 0xC500 : 0x4500) || v[b * D + d] != 0x4580; /* -5, 5, 5.5 */
    }
  printf("%d tokens, %llu bytes of workspace, %d wrong values\n", B * S, (unsigned long long)workspace_size, wrong);

  /* What an error looks like: nothing has been written, and the next call works. */
  indices[17] = C2;
  const kvquant_status status = kvquant_dequant_rope_quant_kvcache(workspace, workspace_size, executor, &data);
  printf("status %d: %s\n", (int)status, kvquant_last_message());

  kvquant_destroy(executor);
  free(workspace);
  free(x), free(cos), free(sin), free(k_cache), free(v_cache), free(indices), free(scale), free(offset);
  free(weight_scale), free(activation_scale), free(bias), free(q), free(k), free(v);
  return wrong == 0 && status == KVQUANT_ERR_PARAM_INVALID ? 0 : 1;
}
