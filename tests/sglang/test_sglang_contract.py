"""SGLang's own pools before the contract of connectors, through the buffers that its layers write and read."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from described_pools import NUM_HEADS, WINDOW_TOKENS, attention_pool, described, latent_pool, window_pool

from kvferry import Cache
from kvferry.testing.connectors import CONTRACT, Check, EngineUnderTest


def under_test(pool: Any, page_size: int, **facts: Any) -> EngineUnderTest:
    import torch

    def view(state: str, table: Sequence[int], token: int) -> torch.Tensor:
        _, _, layer, part = state.split(".")
        rows = pool.get_value_buffer(int(layer)) if part == "v" else pool.get_key_buffer(int(layer))
        row = rows[table[token // page_size] * page_size + token % page_size]
        row = row[0] if part == "latent" else row
        return row.view(torch.uint8).view(*row.shape, row.itemsize)

    def write(state: str, table: Sequence[int], token: int, element: np.ndarray) -> None:
        view(state, table, token)[:] = torch.from_numpy(element.copy())

    def read(state: str, table: Sequence[int], token: int) -> np.ndarray:
        return view(state, table, token).numpy().copy()

    found = described(pool, **facts)
    return EngineUnderTest(Cache((found.layout,), tuple(found.memories)), write, read, lambda: None)


def attention(pools: ModuleType, page_size: int) -> EngineUnderTest:
    return under_test(attention_pool(pools, page_size, NUM_HEADS, "bfloat16"), page_size)


def latent(pools: ModuleType, page_size: int) -> EngineUnderTest:
    return under_test(latent_pool(pools, page_size), page_size)


def windows(_: ModuleType, page_size: int) -> EngineUnderTest:
    return under_test(window_pool(page_size), page_size, num_window_heads=NUM_HEADS, window_tokens=WINDOW_TOKENS)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("make", [attention, latent, windows], ids=lambda make: make.__name__)
def test_a_pool_keeps_the_contract(sglang_pools: ModuleType, make: Any, page_size: int, check: Check) -> None:
    check(lambda: make(sglang_pools, page_size))
