"""SGLang's pools on the CPU, small, and what the connector says of them."""

from __future__ import annotations

NUM_PAGES, NUM_LAYERS, NUM_HEADS, HEAD_DIM, LATENT_DIM = 6, 3, 4, 8, 24
FULL_LAYERS, WINDOW_LAYERS, WINDOW_TOKENS = (2, 5), (0, 1, 3, 4), 40


def attention_pool(pools, page_size, num_heads, dtype):
    import torch

    return pools.MHATokenToKVPool(
        size=NUM_PAGES * page_size,
        page_size=page_size,
        dtype=getattr(torch, dtype),
        head_num=num_heads,
        head_dim=HEAD_DIM,
        layer_num=NUM_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def latent_pool(pools, page_size):
    import torch

    return pools.MLATokenToKVPool(
        size=NUM_PAGES * page_size,
        page_size=page_size,
        dtype=torch.float32,
        kv_lora_rank=LATENT_DIM - 8,
        qk_rope_head_dim=8,
        layer_num=NUM_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def described(pool, rank=0, ranks=1, num_heads=NUM_HEADS, **more):
    from kvferry.connectors.sglang.description.describe import RankFacts, describe

    return describe(pool, RankFacts(rank, ranks, num_heads, **more))


def window_pool(page_size=16, heads=NUM_HEADS, window_heads=NUM_HEADS):
    import torch
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=NUM_PAGES * page_size,
        size_swa=2 * NUM_PAGES * page_size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=heads,
        head_dim=HEAD_DIM,
        swa_attention_layer_ids=list(WINDOW_LAYERS),
        full_attention_layer_ids=list(FULL_LAYERS),
        device="cpu",
        swa_head_num=window_heads,
    )
