"""A decode step of one attention layer in PyTorch with an int8 cache, eager and compiled. Prints whether both are equal."""
import torch

import kvquant.torch

heads_q, heads_kv, dim, blocks, block_size = 8, 2, 64, 32, 16


def decode(kv, x, tables, positions, slots, lengths, block_table, scale):
    """kv [2,blocks,block_size,Nkv,D] int8, x [B,H]: writes this step's K and V, attends over each sequence's cache."""
    q, *_ = kvquant.torch.dequant_rope_quant_kvcache(
        x, tables[0], tables[1], kv[0], kv[1], slots, scale, scale, [heads_q * dim, heads_kv * dim, heads_kv * dim],
        positions=positions, cache_mode="page")
    k, v = (kv[:, block_table].float() * scale).reshape(2, x.shape[0], -1, heads_kv, dim).transpose(2, 3)  # [B,Nkv,L,D]
    seen = torch.arange(k.shape[2]) < lengths[:, None, None, None]
    grouped = q.float().reshape(x.shape[0], heads_kv, heads_q // heads_kv, dim)
    return torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=seen).reshape(x.shape[0], -1)


torch.manual_seed(0)
batch, columns = 3, (heads_q + 2 * heads_kv) * dim
angle = torch.outer(torch.arange(512), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
tables = torch.stack([angle.cos(), angle.sin()]).to(torch.bfloat16)  # [2,P,D/2]: one value serves both halves of a head
block_table = torch.randperm(blocks)[: batch * 4].reshape(batch, 4)
positions = torch.tensor([5, 40, 17])
slots = block_table[torch.arange(batch), positions // block_size] * block_size + positions % block_size
kv = torch.randint(-128, 128, (2, blocks, block_size, heads_kv, dim), dtype=torch.int8)
x = torch.randn(batch, columns, dtype=torch.bfloat16)
operands = (x, tables, positions, slots, positions + 1, block_table, torch.tensor(0.03))

kv_compiled = kv.clone()
with torch.inference_mode():
    eager = decode(kv, *operands)
    compiled = torch.compile(decode, fullgraph=True)(kv_compiled, *operands)
equal = torch.equal(kv, kv_compiled) and torch.allclose(eager, compiled, rtol=1e-4, atol=1e-4)
print(f"attention output {list(eager.shape)}, cache {list(kv.shape)}; eager and compiled are {'equal' if equal else 'DIFFERENT'}")
raise SystemExit(not equal)
