"""Tensor parallelism: each rank owns some heads of x, of the scales and of the cache. python tensor_parallel.py RANKS

A layer's weights are split by heads, so a rank's GEMM gives the q, k and v columns of its heads, and kvquant needs nothing from
other ranks. Here rank 0 gathers everything and compares it with one process that did all heads.
"""
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import kvquant.torch

heads_q, heads_kv, dim, tokens, blocks, block_size = 16, 4, 64, 24, 4, 16


def operands():
    """The whole layer's operands; the same in every process."""
    generator = torch.Generator().manual_seed(7)
    heads = heads_q + 2 * heads_kv
    return {
        "x": torch.randint(-9999, 9999, (tokens, heads, dim), generator=generator, dtype=torch.int32),
        "weight_scale": torch.rand(heads, dim, generator=generator) * 1e-3,
        "bias": torch.randn(heads, dim, generator=generator),
        "activation_scale": torch.rand(tokens, generator=generator) + 0.5,
        "scale_k": torch.rand(heads_kv, dim, generator=generator) / 20 + 0.01,
        "scale_v": torch.rand(heads_kv, dim, generator=generator) / 20 + 0.01,
        "tables": torch.randn(2, 64, dim, generator=generator).half(),
        "positions": torch.randint(0, 64, (tokens,), generator=generator),
        "slots": torch.randperm(blocks * block_size, generator=generator)[:tokens],
        "cache": torch.randint(-128, 128, (2, blocks, block_size, heads_kv, dim), generator=generator, dtype=torch.int8),
    }


def attention_input(o, rank, ranks):
    """q [T,Nq/ranks,D] and the cache [2,blocks,block_size,Nkv/ranks,D] of one rank."""
    q_heads, kv_heads = heads_q // ranks, heads_kv // ranks
    own = slice(rank * kv_heads, (rank + 1) * kv_heads)
    heads = torch.cat([torch.arange(n) + first + rank * n
                       for first, n in ((0, q_heads), (heads_q, kv_heads), (heads_q + heads_kv, kv_heads))])
    cache = o["cache"][:, :, :, own].contiguous()
    q, *_ = kvquant.torch.dequant_rope_quant_kvcache(
        o["x"][:, heads].reshape(tokens, -1), o["tables"][0], o["tables"][1], cache[0], cache[1], o["slots"],
        o["scale_k"][own], o["scale_v"][own], [q_heads * dim, kv_heads * dim, kv_heads * dim],
        weight_scale=o["weight_scale"][heads].reshape(-1), bias=o["bias"][heads].reshape(-1),
        activation_scale=o["activation_scale"], positions=o["positions"], cache_mode="page")
    return q, cache


def worker(rank, ranks, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    shards = attention_input(operands(), rank, ranks)
    equal = True
    for shard, whole, axis in zip(shards, attention_input(operands(), 0, 1), (1, 3)):
        parts = [torch.empty_like(shard) for _ in range(ranks)] if rank == 0 else None
        dist.gather(shard, parts)
        equal = equal and (rank != 0 or torch.equal(torch.cat(parts, axis), whole))
    if rank == 0:
        print(f"{ranks} ranks, {heads_q // ranks} query and {heads_kv // ranks} key/value heads each: shards and the single "
              f"process are {'equal' if equal else 'DIFFERENT'}")
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (count, f"{folder}/rendezvous"), nprocs=count)
