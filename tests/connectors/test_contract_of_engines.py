"""Engines that are ours, and the one of the tutorial, before the contract of connectors."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvferry import Cache, allocate_shared
from kvferry.layout import EngineShape, attention, describe
from kvferry.testing.connectors import CONTRACT, EngineUnderTest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"
MODEL = attention(num_layers=2, num_heads=2, head_dim=3, dtype="float16", item_bytes=2)


def under_test(cache, view, close):
    """`view` gives the bytes of one token of a state."""

    def write(state, table, token, element):
        view(state, table, token)[:] = element

    return EngineUnderTest(cache, write, lambda state, table, token: view(state, table, token).copy(), close)


def toy():
    """The engine of the tutorial."""
    spec = importlib.util.spec_from_file_location("own_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = module.ToyEngine("toy")
    engine.agent.close()
    as_bytes = engine.blocks.view(np.uint8).reshape(*engine.blocks.shape, 4)

    def view(state, table, token):
        _, _, layer, part = state.split(".")
        block, slot = table[token // module.BLOCK_TOKENS], token % module.BLOCK_TOKENS
        return as_bytes[block, int(layer), "kv".index(part), slot]

    return under_test(engine.cache, view, engine.shared.close)


def head_major(described_as="LKBHND"):
    """An engine whose blocks have all tokens of a head beside each other."""
    block_tokens, num_blocks = 4, 16
    shared = allocate_shared(num_blocks * block_tokens * MODEL.bytes_per_token, "by hand")
    array = np.frombuffer(shared.buffer, np.uint8).reshape(2, 2, num_blocks, 2, block_tokens, 3, 2)
    (layout,) = describe(MODEL, EngineShape(1, 1, block_tokens, num_blocks, format=described_as), shared.memory.address)

    def view(state, table, token):
        _, _, layer, part = state.split(".")
        return array[int(layer), "kv".index(part), table[token // block_tokens], :, token % block_tokens]

    return under_test(Cache((layout,), (shared.memory,)), view, shared.close)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [toy, head_major], ids=lambda make: make.__name__)
def test_an_engine_keeps_the_contract(make, check):
    check(make)


@pytest.mark.parametrize("check", CONTRACT[:2], ids=lambda check: check.__name__)
def test_a_wrong_description_is_found(check):
    with pytest.raises(AssertionError):
        check(lambda: head_major(described_as="LKBNHD"))
