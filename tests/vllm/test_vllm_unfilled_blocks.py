"""Which blocks of a fetched prompt leave vLLM's prefix cache, on vLLM's own cache configurations: no server."""

import importlib
import warnings

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvferry.connectors.vllm.description.groups import has_windows
from kvferry.connectors.vllm.scheduler.unfilled_blocks import UnfilledBlocks
from kvferry.plan.description.tokens import TokenRange

HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=32)
CHUNKS = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=40)
MERGED = FullAttentionSpec(**HEADS, sliding_window=32)
TABLE = [11, 12, 13, 14, 15, 16, 17]


def evicted(spec, tokens, table=TABLE, context_parallel=1):
    groups = [KVCacheGroupSpec(["full"], FULL), KVCacheGroupSpec(["limited"], spec)]
    blocks = UnfilledBlocks(KVCacheConfig(64, [], groups), context_parallel)
    found = []
    blocks.bind(found.append)
    blocks.fetch("r", ([1, 2, 3, 4, 5, 6, 7], table), TokenRange(*tokens))
    assert not found, "they are not in the prefix cache before the fetch has ended"
    for _ in range(2):
        blocks.end("r")
    assert len(found) <= 1
    return set().union(*found)


@pytest.mark.parametrize(
    ("spec", "tokens", "expected"),
    [
        (FULL, (0, 100), set()),
        # The last 31 tokens: from 69 on, amid the fifth block.
        (WINDOW, (0, 100), {15}),
        (MERGED, (0, 100), {11, 12, 13, 14, 15}),
        # From 48 on, where a block begins.
        (WINDOW, (0, 79), set()),
        (MERGED, (0, 79), {11, 12, 13}),
        # All of them are seen.
        (WINDOW, (0, 31), set()),
        (WINDOW, (0, 33), {11}),
        # Before what is fetched others have computed the blocks.
        (WINDOW, (64, 100), {15}),
        (MERGED, (64, 100), {15}),
        (MERGED, (80, 100), set()),
        # The last chunk begins at 80, or at 40.
        (CHUNKS, (0, 100), set()),
        (CHUNKS, (0, 79), {13}),
    ],
)
def test_blocks_that_are_not_written_to_the_full_are_evicted(spec, tokens, expected):
    unseen = {WINDOW: max(0, tokens[1] - 31), CHUNKS: tokens[1] // 40 * 40}.get(spec, 0) // 16
    assert evicted(spec, tokens, [0] * unseen + TABLE[unseen:]) == expected


def test_tables_of_ranks_that_share_tokens_have_larger_blocks():
    assert evicted(MERGED, (0, 100), context_parallel=2) == {11, 12, 13}


def test_a_request_without_such_blocks_evicts_none():
    blocks = UnfilledBlocks(KVCacheConfig(64, [], [KVCacheGroupSpec(["limited"], WINDOW)]))
    blocks.fetch("r", (TABLE,), TokenRange(0, 100))
    # A vLLM without this hook has refused the model.
    blocks.end("r")
    blocks.end("another")


@pytest.mark.parametrize(("spec", "expected"), [(FULL, False), (WINDOW, True), (CHUNKS, True), (MERGED, True)], ids=str)
def test_which_models_have_them(spec, expected):
    groups = [KVCacheGroupSpec(["full"], FULL), KVCacheGroupSpec(["other"], spec)]
    assert has_windows(KVCacheConfig(64, [], groups)) is expected
