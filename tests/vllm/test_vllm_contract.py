"""vLLM's own caches before the contract of connectors, written and read through the views that its layers are given."""

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

import torch
from described_ranks import DIM, NAMES, facts, full, make_rank, mla
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import Cache
from kvferry.testing.connectors import CONTRACT, EngineUnderTest


def under_test(rank, part):
    """`part` gives what a token has of a state in a layer's view of its block: (block, head, token, dimension)."""

    def view(state, table, token):
        cache = rank.caches[NAMES[int(state.split(".")[2])]]
        block_tokens = cache.shape[2]
        found = part(cache[table[token // block_tokens]], token % block_tokens, state)
        return found.view(torch.uint8).view(*found.shape, found.itemsize)

    def write(state, table, token, element):
        view(state, table, token)[:] = torch.from_numpy(element.copy())

    def read(state, table, token):
        return view(state, table, token).numpy().copy()

    cache = Cache((rank.layout,), tuple(rank.described.memories))
    return EngineUnderTest(cache, write, read, lambda: None)


def attention(layout):
    rank = make_rank([(full(), NAMES)], facts(), layout)
    return under_test(rank, lambda block, slot, state: block[:, slot].split(DIM, dim=-1)[state.endswith(".v")])


def latent():
    return under_test(make_rank([(mla(), NAMES)], facts(num_heads=1)), lambda block, slot, state: block[0, slot])


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_keys_and_values_keep_the_contract(layout, check):
    check(lambda: attention(layout))


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_latent_rows_keep_the_contract(check):
    check(latent)
