"""An engine that sleeps, as vLLM 0.33 tells a connector of it: caches are let go of, and come back empty."""

import importlib
import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from test_vllm_worker import LEASE, LOST, NOTHING, REFERENCE, REPORT, SETTINGS, FakeAgent, Rank, fetch

from kvferry import (
    Agent,
    AgentStopped,
    BlocksReleased,
    Direction,
    Fetched,
    FetchFailed,
    HoldRequest,
    Located,
    Memory,
    Timing,
)
from kvferry.connectors.vllm import extension
from kvferry.connectors.vllm.connector import FerryConnector
from kvferry.connectors.vllm.description.describe import Described, GroupFacts
from kvferry.connectors.vllm.metadata import Orders
from kvferry.connectors.vllm.worker import rank_agent, rank_cache
from kvferry.connectors.vllm.worker import worker as module
from kvferry.connectors.vllm.worker.deferred_commands import DeferredCommands, at_once
from kvferry.connectors.vllm.worker.early_prefills import EarlyPrefills, Source
from kvferry.connectors.vllm.worker.rank_agent import RankAgent
from kvferry.connectors.vllm.worker.worker import Worker
from kvferry.connectors.vllm_middleware.workers import RELEASED, TROUBLE
from kvferry.errors import ConfigurationError
from kvferry.layout import Axis, CacheGroup, Layout, Placement, Region, Span, State
from kvferry.session.commands import RemoteEngine
from kvferry.wire.messages import Reason, Reference

BLOCK_TOKENS, NUM_BLOCKS, TOKEN_BYTES = 16, 8, 32
NO_LAYERS = Described(Layout((), (), (), ()), (), (GroupFacts(0),), (0,))
AT_ONCE = Timing(missed_heartbeats=0, fence_s=0.0)
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
    monkeypatch.setattr(rank_agent, "may_grow", lambda config: False)
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


def test_a_fetch_that_a_source_was_writing_has_ended_when_the_memory_goes(worker, monkeypatch):
    """The agent is asked to end it, and says when nothing can be written any more."""
    worker.obey(Orders(fetches=[fetch()]))
    ended, abort = [], Agent.abort
    monkeypatch.setattr(Agent, "abort", lambda agent, name: ended.append(name) or abort(agent, name))
    monkeypatch.setattr(Agent, "written_ids", property(lambda agent: frozenset({"a"})))
    worker.unregister()
    assert ended == ["a"]
    worker.restore()
    assert told(worker) == (set(), {"a"}, {"a"})


class StandIn(FakeAgent):
    """An agent of which a test says what it answers when it is told to end a fetch, by the fetch's name. It is closed
    as an agent is: the last thing that it says is that it has stopped."""

    def __init__(self, notices, answers):
        super().__init__()
        self.notices, self.answers = notices, answers

    def hold(self, wanted):
        self.wanted.append(wanted)

    def abort(self, request_id):
        super().abort(request_id)
        for notice in self.answers.get(request_id, ()):
            self.notices.put(notice)

    def close(self):
        self.notices.put(AgentStopped())


def falling_asleep(answers, is_on_device=False, timing=SETTINGS.agent.timing, milestone=at_once):
    """A rank with a stand-in for its agent."""
    rank = Rank()
    rank.worker = Worker(None, replace(SETTINGS, agent=replace(SETTINGS.agent, timing=timing)), None)
    rank.agent = StandIn(rank.worker._notices, answers)
    early = EarlyPrefills(Source(rank.agent, NO_LAYERS), rank.worker._open)
    deferred = DeferredCommands(milestone)
    rank.worker._started.append(RankAgent(rank.agent, NO_LAYERS, early, deferred, is_on_device=is_on_device))
    return rank


LET_GO = (FetchFailed("a", LOST), BlocksReleased("a"))


@pytest.mark.parametrize("is_on_device", [True, False])
def test_blocks_are_waited_for_until_nothing_can_be_written_to_them(is_on_device):
    rank = falling_asleep({"a": LET_GO}, is_on_device)
    rank.worker.obey(Orders(fetches=[fetch(), fetch("b")]))
    rank.says(Fetched("b", REPORT))
    rank.worker.unregister()
    assert rank.agent.aborted == ["a"]
    assert rank.told() == (set(), {"a"}, {"a"})


@pytest.mark.parametrize(("is_on_device", "found"), [(True, (set(), {"a"}, {"a"})), (False, NOTHING)])
def test_of_a_source_that_says_nothing_only_the_hosts_memory_is_kept(is_on_device, found, caplog, monkeypatch):
    """It may write there as long as its process lives. The memory of a device is given away, and with it what it
    writes to."""
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    rank = falling_asleep({}, is_on_device, AT_ONCE)
    rank.worker.obey(Orders(fetches=[fetch()]))
    rank.agent.written_ids = frozenset({"a"})
    rank.worker.unregister()
    assert rank.told() == found
    assert rank.told() == NOTHING
    # A record comes once more where an earlier test has had kvferry speak as vLLM does.
    kept = {record.args[0] for record in caplog.records if record.levelname == "ERROR"}
    assert kept == (set() if is_on_device else {"a"})


def test_what_was_fetched_is_lost_with_the_memory_unless_vllm_has_heard_of_it():
    rank = falling_asleep({})
    rank.worker.obey(Orders(fetches=[fetch(), fetch("b")]))
    assert rank.says(Fetched("b", REPORT)) == (set(), {"b"}, set())
    rank.worker._notices.put(Fetched("a", REPORT))
    rank.worker.unregister()
    assert rank.told() == (set(), {"a"}, {"a"})


def test_what_the_agent_has_not_heard_of_is_not_waited_for():
    """The device has not got there, or it is not known yet who is to be asked. And nobody waits for a release."""
    rank = falling_asleep({}, milestone=lambda: lambda: False)
    asked = replace(fetch("b"), reference=Reference("", "", "room-7", "lease"))
    rank.agent.locate = lambda *_: None
    rank.worker.obey(Orders(fetches=[fetch(), asked]))
    rank.worker.unregister()
    assert rank.agent.aborted == []
    assert rank.told() == (set(), {"a", "b"}, {"a", "b"})
    other = falling_asleep({})
    other.worker.obey(Orders(fetches=[fetch(is_waited_for=False)]))
    other.worker.unregister()
    assert (other.agent.aborted, other.told()) == ([], NOTHING)


def test_nothing_begins_while_the_last_fetches_end():
    found = Located("tcp://127.0.0.1:1", RemoteEngine("prefill", "epoch", ("tcp://127.0.0.1:1",)), 7)
    rank = falling_asleep({"a": (found, *LET_GO)})
    rank.agent.locate = lambda *_: None
    rank.worker.obey(Orders(fetches=[fetch(), replace(fetch("b"), reference=Reference("", "", "room-7", "lease"))]))
    rank.worker.unregister()
    assert [wanted.request_id for wanted in rank.agent.wanted] == ["a"]
    assert rank.told() == (set(), {"a", "b"}, {"a", "b"})


def test_an_engine_that_sleeps_has_no_address_and_still_steps(worker):
    worker.unregister()
    worker.obey(Orders(holds=[HoldRequest(REFERENCE, ("tcp://127.0.0.1:1",))], aborted=["a"]))
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
