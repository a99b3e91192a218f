"""An engine that sleeps, as vLLM 0.33 tells a connector of it: caches are let go of, and come back empty."""

import importlib
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from test_vllm_worker import LEASE, NOTHING, SETTINGS, fetch

from kvferry import Agent, Direction, Memory
from kvferry.connectors.vllm import extension
from kvferry.connectors.vllm.connector import FerryConnector
from kvferry.connectors.vllm.description.describe import Described, GroupFacts
from kvferry.connectors.vllm.metadata import Orders
from kvferry.connectors.vllm.worker import rank_cache
from kvferry.connectors.vllm.worker import worker as module
from kvferry.connectors.vllm.worker.worker import Worker
from kvferry.connectors.vllm_middleware.workers import RELEASED, TROUBLE
from kvferry.errors import ConfigurationError
from kvferry.layout import Axis, CacheGroup, Layout, Placement, Region, Span, State
from kvferry.wire.messages import Reason, Reference

BLOCK_TOKENS, NUM_BLOCKS, TOKEN_BYTES = 16, 8, 32
CACHE = torch.zeros(NUM_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES, dtype=torch.uint8)


def layout():
    address, size, block = CACHE.data_ptr(), CACHE.numel(), BLOCK_TOKENS * TOKEN_BYTES
    state = State("model.layers.0.k", "uint8", 1, (Axis("head", 1), Axis("dim", TOKEN_BYTES)), per_token=True)
    spans = (Span(0, 1), Span(0, TOKEN_BYTES))
    placement = Placement(state.name, 0, 0, 0, spans, (TOKEN_BYTES, 1), block, TOKEN_BYTES)
    group = CacheGroup(BLOCK_TOKENS, NUM_BLOCKS, 0)
    return Layout((state,), (Region(address, size, "dram", 0),), (group,), (placement,))


@pytest.fixture
def worker(monkeypatch):
    """The only rank of an engine, with a real agent over a cache of one layer."""
    memories = (Memory(CACHE.data_ptr(), CACHE.numel(), -1),)
    monkeypatch.setattr(rank_cache, "engine_facts", lambda config: None)
    monkeypatch.setattr(rank_cache, "describe", lambda *_: Described(layout(), memories, (GroupFacts(0),), (0,)))
    monkeypatch.setattr(rank_cache, "meet", lambda ours, num_ranks: ([ours], 0))
    monkeypatch.setattr(module, "addresses", lambda ours, num_ranks: [ours])
    monkeypatch.setattr(module, "may_grow", lambda config: False)
    parallel = SimpleNamespace(world_size=1)
    made = Worker(SimpleNamespace(parallel_config=parallel, speculative_config=None), SETTINGS, None)
    made.register({"model.layers.0": CACHE})
    yield made
    made.close()


def told(worker):
    results = worker.results()
    return results.finished_sending, results.finished_recving, results.failed_recving


def test_the_configuration_is_read_when_caches_are_registered(worker, monkeypatch):
    """Not before: vLLM settles the interleaving of context parallelism only then, since 0.33."""
    seen = []
    monkeypatch.setattr(rank_cache, "engine_facts", lambda config: seen.append(config.parallel_config.interleave))
    worker._config.parallel_config.interleave = 64
    worker.unregister()
    worker.restore()
    assert seen == [64]


def test_everything_open_ends_before_the_memory_goes(worker):
    worker.obey(Orders(leases=[LEASE], fetches=[fetch()]))
    worker.unregister()
    assert told(worker) == ({"l"}, {"a"}, {"a"})
    worker.unregister()
    assert told(worker) == NOTHING


def test_an_engine_that_sleeps_has_no_address_and_still_steps(worker):
    worker.unregister()
    worker.obey(Orders())
    assert told(worker) == NOTHING
    with pytest.raises(ConfigurationError, match="sleeps"):
        worker.address()


def test_an_engine_that_sleeps_tells_its_server_so_and_raises_nothing(worker, monkeypatch):
    """vLLM's server gets a bare Exception where a worker raises, whatever it says."""
    connector = object.__new__(FerryConnector)
    connector._workers = [worker]
    monkeypatch.setattr(extension, "_ours", lambda: connector)
    asked, epoch = extension.Extension(), worker.address().epoch
    assert asked.kvferry_facts()["epoch"] == epoch
    worker.unregister()
    assert "wake it up" in asked.kvferry_facts()[TROUBLE]
    assert asked.kvferry_release("ours", epoch, "l", "lease") == Reason.UNKNOWN_LEASE
    assert asked.kvferry_withdraw(["l"]) is False
    worker.restore()
    assert asked.kvferry_facts()["epoch"] not in ("", epoch)


def test_an_engine_that_wakes_up_is_another_one_to_its_peers(worker):
    before = worker.address()
    worker.restore()
    assert worker.address() == before
    worker.unregister()
    worker.restore()
    after = worker.address()
    assert after.epoch != before.epoch
    assert worker.release(Reference("ours", before.epoch, "l", "lease")) == Reason.WRONG_EPOCH


def test_what_was_leased_before_is_not_leased_after_and_new_leases_are(worker):
    worker.obey(Orders(leases=[LEASE]))
    worker.unregister()
    told(worker)
    worker.restore()
    epoch = worker.address().epoch
    assert worker.release(Reference("ours", epoch, "l", "lease")) == Reason.UNKNOWN_LEASE
    # Under the same id, the lease that comes would be the one just released, and end at once.
    worker.obey(Orders(leases=[replace(LEASE, lease_id="new lease")]))
    assert told(worker) == NOTHING
    assert worker.release(Reference("ours", epoch, "l", "new lease")) == RELEASED


def test_who_listened_in_a_room_is_asked_for_again(worker):
    """A lookup that the sleep has ended is not waited for."""
    room = "tcp://127.0.0.1:1"
    asked = SimpleNamespace(address=room)
    worker._lookups._waiting[room, 0] = [asked]
    worker.unregister()
    worker.restore()
    assert worker._lookups._waiting == {}


def test_what_agents_have_moved_is_told_whole_although_each_counts_from_nothing(worker, monkeypatch):
    moved = {Direction.READ: 1000, Direction.WRITE: 0}
    monkeypatch.setattr(Agent, "moved_bytes", property(lambda agent: dict(moved)))

    def told_of():
        return worker.take_stats().data["moved"]

    assert told_of() == [["read", 1000]]
    moved[Direction.READ] = 1500
    worker.unregister()
    moved[Direction.READ] = 0
    assert told_of() == [["read", 500]]
    worker.restore()
    assert told_of() == []
    moved |= {Direction.READ: 900, Direction.WRITE: 7}
    assert told_of() == [["read", 900], ["write", 7]]


def test_caches_that_were_never_registered_are_not_restored():
    asleep = Worker(SimpleNamespace(), SETTINGS, None)
    asleep.restore()
    with pytest.raises(ConfigurationError, match="not registered"):
        asleep.address()
