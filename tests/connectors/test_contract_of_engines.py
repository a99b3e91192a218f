"""Engines of the tests, one of them in another process, and the tutorial's before the contract of connectors."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import process_engine
import pytest
from process_engine import ProcessEngine

from kvferry import Cache, LeaseEnded, Reference, allocate_shared
from kvferry.layout import EngineShape, attention, describe
from kvferry.testing.connectors import CONTRACT, EngineUnderTest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"
MODEL = attention(num_layers=2, num_heads=2, head_dim=3, dtype="float16", item_bytes=2)


def under_test(cache, view, close, open_source=None):
    """`view` gives the bytes of one token of a state."""

    def write(state, table, token, element):
        view(state, table, token)[:] = element

    def read(state, table, token):
        return view(state, table, token).copy()

    return EngineUnderTest(cache, write, read, close, open_source=open_source)


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


class OtherProcess:
    """The agent of a source in a process of its own, which `close` kills."""

    def __init__(self, config, memory):
        self._process = ProcessEngine(config.engine_id, config.transport, config.timing.lease_s, memory.shared_fd)
        self.address = self._process.address()
        self.close = self._process.kill

    def lease(self, request):
        self._request_id = request.request_id
        return msgspec.convert(self._process.lease_filled(request)["reference"], Reference)

    def notice(self):
        return LeaseEnded(self._request_id, self._process.notice(self._request_id, "free")["how"])


def other_process():
    """An engine of this process; as a source its agent is in another one, over the same memory."""
    num_blocks, block_tokens = process_engine.NUM_BLOCKS, process_engine.BLOCK_TOKENS
    shared = allocate_shared(num_blocks * process_engine.BLOCK_BYTES, "shared with another process")
    array = np.frombuffer(shared.buffer, np.uint8).reshape(num_blocks, 4, 2, block_tokens, 2, 32, 4)
    layouts = describe(process_engine.MODEL, process_engine.SHAPE, shared.memory.address)

    def view(state, table, token):
        _, _, layer, part = state.split(".")
        return array[table[token // block_tokens], int(layer), "kv".index(part), token % block_tokens]

    cache = Cache(layouts, (shared.memory,))
    return under_test(cache, view, shared.close, lambda config: OtherProcess(config, shared.memory))


MADE = [toy, *(pytest.param(each, marks=pytest.mark.slow) for each in (head_major, other_process))]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_an_engine_keeps_the_contract(make, check):
    check(make)


@pytest.mark.parametrize("check", CONTRACT[:2], ids=lambda check: check.__name__)
def test_a_wrong_description_is_found(check):
    with pytest.raises(AssertionError):
        check(lambda: head_major(described_as="LKBNHD"))


def test_an_engine_is_closed_by_a_check_that_fails():
    closed = []
    wrong = head_major(described_as="LKBNHD")
    with pytest.raises(AssertionError):
        CONTRACT[0](lambda: replace(wrong, close=lambda: closed.append(wrong)))
    wrong.close()
    assert closed == [wrong]


def test_every_check_says_what_a_failure_means():
    assert [check.__name__ for check in CONTRACT if "failure means" not in (check.__doc__ or "")] == []
