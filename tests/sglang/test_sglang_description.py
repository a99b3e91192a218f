"""A described pool: elements lie where SGLang's own index arithmetic finds them, at any page size and parallelism."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.errors import LayoutError
from kvferry.layout import Layout

NUM_PAGES, NUM_LAYERS, NUM_HEADS, HEAD_DIM, LATENT_DIM = 6, 3, 4, 8, 24
TABLE = (3, 1, 4)


@pytest.fixture(scope="module")
def sglang_pools():
    # The libraries' own deprecations are none of ours, and warnings are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import memory_pool

    return memory_pool


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


def described(pool, rank=0, ranks=1, num_heads=NUM_HEADS) -> Layout:
    from kvferry.connectors.sglang.description import RankFacts, describe

    layout, memories = describe(pool, RankFacts(rank, ranks, num_heads))
    assert [(m.address, m.size_bytes) for m in memories] == [(r.address, r.size_bytes) for r in layout.regions]
    return layout


def address_of(layout: Layout, state: str, token: int, head: int | None) -> int:
    """Where the first element of a token (and head) lies, by our description alone."""
    placement = next(each for each in layout.placements if each.state == state)
    group = layout.groups[placement.group]
    block, slot = TABLE[token // group.block_tokens], token % group.block_tokens
    address = layout.regions[placement.region].address + placement.offset
    address += block * placement.block_stride + slot * placement.token_stride
    if head is not None:
        address += (head - placement.spans[0].start) * placement.strides[0]
    return address


def slot_of(token: int, page_size: int) -> int:
    """SGLang's own: a request's slots are those of its pages."""
    return TABLE[token // page_size] * page_size + token % page_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4), (5, 8)])
def test_keys_and_values_lie_where_sglang_looks_for_them(sglang_pools, dtype, page_size, rank, ranks):
    local = max(1, NUM_HEADS // ranks)
    pool = attention_pool(sglang_pools, page_size, local, dtype)
    layout = described(pool, rank, ranks)
    first = rank * NUM_HEADS // ranks
    assert [state.name for state in layout.states[:2]] == ["model.layers.0.k", "model.layers.0.v"]
    for layer in range(NUM_LAYERS):
        for kind, rows in (("k", pool.get_key_buffer(layer)), ("v", pool.get_value_buffer(layer))):
            for token in range(len(TABLE) * page_size):
                for head in range(local):
                    expected = rows[slot_of(token, page_size), head].data_ptr()
                    assert address_of(layout, f"model.layers.{layer}.{kind}", token, first + head) == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_rows_are_the_same_on_every_rank(sglang_pools, page_size):
    pool = latent_pool(sglang_pools, page_size)
    layout = described(pool, rank=1, ranks=2)
    for layer in range(NUM_LAYERS):
        for token in range(len(TABLE) * page_size):
            expected = pool.kv_buffer[layer][slot_of(token, page_size)].data_ptr()
            assert address_of(layout, f"model.layers.{layer}.latent", token, None) == expected
    assert layout.states[0].axes[0].extent == LATENT_DIM


def test_pages_are_those_that_sglang_registers(sglang_pools):
    """Its own backends find page `p` of a buffer at `ptr + p * item_len`."""
    pool = attention_pool(sglang_pools, 16, NUM_HEADS, "float32")
    layout = described(pool)
    pointers, lengths, item_lengths = pool.get_contiguous_buf_infos()
    places = [f"model.layers.{layer}.{kind}" for kind in "kv" for layer in range(NUM_LAYERS)]
    for state, pointer, length, item_length in zip(places, pointers, lengths, item_lengths, strict=True):
        for block, page in enumerate(TABLE):
            assert address_of(layout, state, 16 * block, 0) == pointer + page * item_length
        assert layout.groups[0].num_blocks * item_length == length


def test_bytes_written_through_sglang_are_found_by_the_description(sglang_pools):
    import torch

    pool = attention_pool(sglang_pools, 4, NUM_HEADS, "float32")
    layout = described(pool)
    slots = torch.tensor([slot_of(token, 4) for token in range(12)])
    rows = torch.arange(12 * NUM_HEADS * HEAD_DIM, dtype=torch.float32).reshape(12, NUM_HEADS, HEAD_DIM)
    pool.get_key_buffer(1)[slots] = rows
    for token in range(12):
        address = address_of(layout, "model.layers.1.k", token, 2)
        found = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * HEAD_DIM).from_address(address))
        assert found.tolist() == rows[token, 2].tolist()


class TestRefused:
    def test_a_pool_of_another_kind(self):
        pool = SimpleNamespace(page_size=16)
        with pytest.raises(LayoutError, match="this kind of pool cannot be described"):
            described(pool)

    def test_heads_that_are_not_divided_evenly(self, sglang_pools):
        pool = attention_pool(sglang_pools, 16, 3, "float32")
        with pytest.raises(LayoutError, match="not divided evenly"):
            described(pool, rank=0, ranks=2)

    @pytest.mark.parametrize(
        ("state_types", "num_draft_entries", "words"),
        [([SimpleNamespace(value="mamba")], 0, "states beside keys and values"), ([], 2, "draft model")],
    )
    def test_what_lies_beside_the_pool(self, state_types, num_draft_entries, words):
        from kvferry.connectors.sglang.description import check_describable

        with pytest.raises(LayoutError, match=words):
            check_describable(SimpleNamespace(state_types=state_types, num_draft_entries=num_draft_entries))
