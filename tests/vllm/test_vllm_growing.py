"""Early prefills in the worker's half: when an agent hears of what, and what vLLM hears of their end."""

import importlib
import warnings
from dataclasses import replace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

from test_vllm_worker import NOTHING, Rank, fetch
from test_vllm_worker import rank as rank  # the fixture

from kvferry.connectors.vllm.connector import FerryConnector
from kvferry.connectors.vllm.description.describe import Described, GroupFacts
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, LeaseOrder, Orders, PromiseOrder
from kvferry.connectors.vllm.worker import worker
from kvferry.connectors.vllm.worker.deferred_commands import DeferredCommands, at_once, end_of_request
from kvferry.connectors.vllm.worker.early_prefills import EarlyPrefills, Source
from kvferry.connectors.vllm.worker.layer_progress import LayerProgress
from kvferry.connectors.vllm.worker.rank_agent import RankAgent
from kvferry.connectors.vllm_middleware.workers import RELEASED
from kvferry.plan.description.layout import Layout
from kvferry.session.commands import AgentStopped, LeaseEnded
from kvferry.session.events import LeaseRequest
from kvferry.wire.messages import Reference

NAME, PROMPT = "early-1", 40
PROMISE = PromiseOrder(NAME, "lease", PROMPT)
KEPT = EndOrder("cmpl-here", NAME, ((1, 2, 3),), PROMPT, True)
TAKEN = replace(KEPT, is_kept=False)


def grows(num_tokens, name=NAME, *blocks):
    return GrowthOrder(name, (blocks or (1, 2, 3),), num_tokens)


class Device:
    """What is begun on it is done when a test says so."""

    def __init__(self):
        self.num_begun = self.num_done = 0

    def milestone(self):
        self.num_begun += 1
        number = self.num_begun
        return lambda: number <= self.num_done


def with_groups(rank, *groups, milestone=None, layer_ends=None):
    """The rank with another description of its caches, and with a device."""
    described = Described(Layout((), (), (), ()), (), groups, (0,))
    source = Source(rank.agent, described, milestone) if milestone else Source(rank.agent, described)
    early_prefills = EarlyPrefills(source, rank.worker._open, layer_ends or {})
    rank.worker._started = [RankAgent(rank.agent, described, early_prefills, DeferredCommands(milestone or at_once))]
    return rank


def nothing_is_left(rank):
    (started,) = rank.worker._started
    return not (started.early_prefills._num_before or rank.worker._open._promised or rank.worker._open._leased)


def told(rank):
    return [(grown.request_id, grown.block_tables, grown.num_ready) for grown in rank.agent.grown]


def test_a_promise_leases_blocks_that_are_not_known(rank):
    rank.worker.obey(Orders(promises=[PROMISE]))
    assert rank.agent.wanted == [LeaseRequest(NAME, "lease", ((),), PROMPT, is_growing=True)]


def test_what_a_step_computes_is_told_when_the_next_begins(rank):
    """Between the two a speculator writes its layers."""
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.told()
    assert told(rank) == []
    rank.worker.obey(Orders(growths=[grows(32)]))
    assert told(rank) == [(NAME, ((1, 2, 3),), 16)]
    rank.worker.obey(Orders())
    rank.worker.obey(Orders())
    assert [num_ready for _, _, num_ready in told(rank)] == [16, 32]


def test_what_may_be_computed_again_is_told_at_the_end(monkeypatch):
    """Another connector may load into blocks while a step uses them, and say after it what has not come."""
    monkeypatch.setattr(worker, "neighbours", lambda _config: ["OffloadingConnector", "LMCacheConnectorV1"])
    rank = Rank()
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.obey(Orders(growths=[grows(40)]))
    rank.worker.obey(Orders())
    assert told(rank) == []
    rank.worker.obey(Orders(ended=[KEPT]))
    assert told(rank) == [(NAME, ((1, 2, 3),), PROMPT)]


def test_what_a_device_has_not_done_is_told_when_it_has(rank):
    """In order, and without waiting: the next look may be in the same step or in any later one."""
    device = Device()
    with_groups(rank, GroupFacts(0), milestone=device.milestone)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    assert device.num_begun == 0
    rank.worker.obey(Orders(growths=[grows(32)]))
    rank.worker.obey(Orders())
    rank.worker.obey(Orders(ended=[KEPT]))
    rank.told()
    assert (device.num_begun, told(rank)) == (3, [])
    device.num_done = 1
    rank.told()
    assert [num_ready for _, _, num_ready in told(rank)] == [16]
    device.num_done = 3
    rank.worker.obey(Orders())
    assert [num_ready for _, _, num_ready in told(rank)] == [16, 32, 40]


def test_the_end_is_told_and_vllm_hears_of_it_when_the_lease_ends(rank):
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.obey(Orders(ended=[KEPT]))
    assert [num_ready for _, _, num_ready in told(rank)] == [16, PROMPT]
    assert rank.told() == NOTHING
    assert rank.says(LeaseEnded(NAME, "done")) == ({"cmpl-here"}, set(), set())
    assert rank.says(LeaseEnded(NAME, "done"), AgentStopped()) == NOTHING
    assert rank.agent.withdrawn == []


@pytest.mark.parametrize("reason", ["aborted", "expired", "done", "withdrawn"])
def test_a_lease_that_ends_before_its_request_frees_nothing_before_that(rank, reason):
    """vLLM still writes to these blocks; it does not know the id of a lease, and an unknown word ends it."""
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    assert rank.says(LeaseEnded(NAME, reason)) == NOTHING
    rank.worker.obey(Orders(ended=[KEPT]))
    assert rank.told() == ({"cmpl-here"}, set(), set())
    assert nothing_is_left(rank)
    assert rank.says(LeaseEnded(NAME, reason), AgentStopped()) == NOTHING


def test_what_is_taken_back_at_the_end_waits_for_the_agent(rank):
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.obey(Orders(ended=[TAKEN]))
    assert rank.agent.withdrawn == [NAME]
    assert rank.told() == NOTHING
    assert rank.says(LeaseEnded(NAME, "withdrawn")) == ({"cmpl-here"}, set(), set())
    assert nothing_is_left(rank)
    assert [num_ready for _, _, num_ready in told(rank)] == [16]


def test_what_vllm_takes_away_is_withdrawn_at_the_first_word_of_a_step_once_and_never_told(rank):
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.withdraw([NAME, "unknown"])
    assert rank.agent.withdrawn == [NAME]
    rank.worker.obey(Orders(withdrawn=[NAME, "unknown"]))
    rank.worker.obey(Orders())
    assert (rank.agent.withdrawn, told(rank)) == ([NAME], [])
    assert rank.says(LeaseEnded(NAME, "withdrawn"), AgentStopped()) == NOTHING


def test_what_is_promised_and_taken_back_in_one_step_is_both(rank):
    orders = Orders(promises=[PROMISE], withdrawn=[NAME])
    rank.worker.withdraw(orders.withdrawn)
    rank.worker.obey(orders)
    assert (len(rank.agent.wanted), rank.agent.withdrawn) == (1, [NAME])


def test_a_request_that_was_withdrawn_and_then_preempted_leaves_nothing(rank):
    rank.worker.obey(Orders(promises=[PROMISE]))
    rank.says(LeaseEnded(NAME, "aborted"))
    rank.worker.obey(Orders(withdrawn=[NAME]))
    assert rank.agent.withdrawn == []
    assert nothing_is_left(rank)


@pytest.mark.parametrize("is_known", [True, False], ids=["told", "dead"])
def test_an_agent_that_has_stopped_keeps_no_blocks(rank, is_known):
    """It may have stopped before the promise, or between the two."""
    rank.worker.obey(Orders(promises=[PROMISE]))
    if is_known:
        assert rank.says(AgentStopped()) == NOTHING
    rank.agent.alive = False
    rank.worker.obey(Orders(promises=[replace(PROMISE, name="early-2")]))
    rank.worker.obey(Orders(ended=[KEPT, replace(KEPT, request_id="cmpl-there", name="early-2")]))
    found = [rank.told(), rank.told() if is_known else rank.says(AgentStopped())]
    assert set().union(*(sending for sending, _, _ in found)) == {"cmpl-here", "cmpl-there"}
    assert rank.told() == NOTHING


def test_a_promise_may_be_released_before_and_after_it_is_known(rank):
    reference = Reference("prefill_dp0", "epoch", NAME, "lease")
    assert rank.worker.release(reference) == "unknown_lease"
    rank.worker.obey(Orders(promises=[PROMISE]))
    assert rank.agent.withdrawn == [NAME]
    assert rank.worker.release(Reference("prefill_dp0", "epoch", NAME, "guess")) == "unknown_lease"
    assert rank.worker.release(reference) == "released"
    rank.says(LeaseEnded(NAME, "withdrawn"))
    assert rank.worker.release(reference) == "unknown_lease"


WHOLE = GroupFacts(0, whole_tokens=16)


def test_pieces_are_told_when_they_are_whole(rank):
    """Of 40 tokens in pieces of 16, the third is whole at the end."""
    with_groups(rank, WHOLE)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(31)]))
    assert rank.agent.wanted[0].num_tokens == 3
    rank.worker.obey(Orders(growths=[grows(39)]))
    rank.worker.obey(Orders(ended=[KEPT]))
    assert [num_ready for _, _, num_ready in told(rank)] == [1, 2, 3]


def test_where_groups_count_differently_only_the_end_is_told(rank):
    with_groups(rank, GroupFacts(0), WHOLE)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(31)]))
    rank.worker.obey(Orders(ended=[KEPT]))
    assert told(rank) == [(NAME, ((1, 2, 3), (1, 2, 3)), PROMPT)]


# Keys and values of two layers.
LAYERS = {"first": 2, "second": 4}


def told_ahead(rank):
    return [(grown.num_ready, grown.ahead.num_tokens, grown.ahead.num_states) for grown in rank.agent.grown]


def test_what_a_layer_has_computed_is_told_in_the_middle_of_the_step(rank):
    with_groups(rank, GroupFacts(0), layer_ends=LAYERS)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.layer_ended("first")
    assert told_ahead(rank) == [(0, 16, 2)]
    rank.worker.layer_ended("second")
    rank.worker.obey(Orders(growths=[grows(32)]))
    rank.worker.layer_ended("first")
    assert told_ahead(rank) == [(0, 16, 2), (0, 16, 4), (16, 0, 0), (16, 32, 2)]
    assert {grown.block_tables for grown in rank.agent.grown} == {((1, 2, 3),)}
    rank.worker.obey(Orders(withdrawn=[NAME]))
    rank.worker.layer_ended("first")
    rank.worker.layer_ended("second")
    assert len(rank.agent.grown) == 4, "nothing after it was taken back"
    assert not rank.worker._started[0].early_prefills._num_before


def test_layers_are_told_of_when_the_device_has_done_them_and_after_the_step_before(rank):
    device = Device()
    with_groups(rank, GroupFacts(0), milestone=device.milestone, layer_ends=LAYERS)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.obey(Orders(growths=[grows(32)]))
    rank.worker.layer_ended("first")
    rank.told()
    assert (device.num_begun, told_ahead(rank)) == (2, [])
    device.num_done = 1
    rank.told()
    assert told_ahead(rank) == [(16, 0, 0)]
    device.num_done = 2
    rank.told()
    assert told_ahead(rank) == [(16, 0, 0), (16, 32, 2)]


def test_pieces_are_counted_in_the_middle_of_a_step_too(rank):
    with_groups(rank, WHOLE, layer_ends=LAYERS)
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(31)]))
    rank.worker.layer_ended("first")
    assert told_ahead(rank) == [(0, 1, 2)]


@pytest.mark.parametrize("promises", [[PROMISE], []], ids=["not asked for", "nobody is promised anything"])
def test_layers_are_told_of_only_to_who_wants_to_know(rank, promises):
    with_groups(rank, GroupFacts(0), layer_ends={} if promises else LAYERS)
    rank.worker.obey(Orders(promises=promises, growths=[grows(16)] if promises else []))
    rank.worker.layer_ended("first")
    assert rank.agent.grown == []


def test_an_eighth_of_the_states_is_worth_a_word_and_so_are_the_last_ones():
    progress = LayerProgress({f"layer {number}": 2 * number for number in range(1, 31)})
    for _ in range(2):
        progress.begin()
        found = [progress.ended(f"layer {number}") for number in range(1, 31)]
        assert [num for num in found if num] == [8, 16, 24, 32, 40, 48, 56, 60]
    progress.begin()
    assert [progress.ended(f"layer {number}") for number in (2, 3, 4, 1)] == [0, 0, 0, 8], "only what comes first"
    assert progress.ended("one without a cache of its own") == 0
    assert LayerProgress({}).ended("layer 1") == 0


def test_nothing_is_said_of_a_prompt_that_nobody_is_promised(rank):
    rank.worker.obey(Orders(promises=[PROMISE], growths=[grows(16)]))
    rank.worker.obey(Orders(ended=[KEPT]))
    rank.worker.obey(Orders(growths=[grows(32), grows(16, "never promised")]))
    rank.worker.obey(Orders())
    assert [num_ready for _, _, num_ready in told(rank)] == [16, PROMPT]


def test_two_prompts_are_told_apart(rank):
    other = PromiseOrder("early-2", "other", 20)
    rank.worker.obey(Orders(promises=[PROMISE, other], growths=[grows(16), grows(20, "early-2", 7, 8)]))
    rank.worker.obey(Orders(withdrawn=[NAME]))
    assert told(rank) == [("early-2", ((7, 8),), 20)]
    assert rank.agent.withdrawn == [NAME]


def test_only_a_speculator_lets_the_end_of_a_request_wait_for_the_device():
    device = Device()
    assert end_of_request(device.milestone, speculates=False)()()
    assert not end_of_request(device.milestone, speculates=True)()()


def test_an_ended_prefill_is_leased_when_its_device_has_done_it(rank):
    """A speculator writes its layers after the token for which vLLM ends the request."""
    device = Device()
    with_groups(rank, GroupFacts(0), milestone=device.milestone)
    rank.worker.obey(Orders(leases=[LeaseOrder("l", "lease", ((1,),), 16)]))
    rank.worker.obey(Orders(leases=[LeaseOrder("m", "lease", ((2,),), 16)]))
    rank.told()
    assert rank.agent.wanted == []
    device.num_done = 1
    rank.told()
    assert [wanted.request_id for wanted in rank.agent.wanted] == ["l"]
    device.num_done = 2
    rank.worker.obey(Orders())
    assert [wanted.request_id for wanted in rank.agent.wanted] == ["l", "m"]


def test_blocks_that_a_speculator_may_still_write_to_are_fetched_into_later(rank):
    """vLLM gives them away when it has the token; whoever gives up meanwhile is heard after the fetch."""
    device = Device()
    with_groups(rank, GroupFacts(0), milestone=device.milestone)
    rank.worker.obey(Orders(fetches=[fetch("a")]))
    rank.worker.obey(Orders(aborted=["a"]))
    rank.told()
    assert (rank.agent.wanted, rank.agent.aborted) == ([], [])
    device.num_done = 1
    rank.told()
    assert ([wanted.request_id for wanted in rank.agent.wanted], rank.agent.aborted) == (["a"], [])
    device.num_done = 2
    rank.told()
    assert rank.agent.aborted == ["a"]


def test_a_lease_that_is_released_before_it_is_told_ends_when_it_is(rank):
    device = Device()
    with_groups(rank, GroupFacts(0), milestone=device.milestone)
    rank.worker.obey(Orders(leases=[LeaseOrder("l", "lease", ((1,),), 16)]))
    party = rank.agent.party
    assert rank.worker.release(Reference(party.engine_id, party.epoch, "l", "lease")) == RELEASED
    rank.agent.withdrawn.clear()
    device.num_done = 1
    rank.told()
    assert [wanted.request_id for wanted in rank.agent.wanted] == rank.agent.withdrawn == ["l"]


def test_a_rank_of_its_own_makes_its_own_key():
    assert Rank().worker._key != Rank().worker._key


def test_what_the_agent_has_moved_is_told_once(rank):
    rank.agent.moved_bytes = {"read": 0, "write": 4096}
    assert rank.worker.take_stats().data["moved"] == [["write", 4096]]
    assert rank.worker.take_stats().is_empty()
    rank.agent.moved_bytes = {"read": 10, "write": 5000}
    stats = rank.worker.take_stats()
    assert stats.data["moved"] == [["read", 10], ["write", 904]]
    assert stats.reduce()["MB moved by this agent"] == round(914 / 2**20, 3)


def test_vllms_first_word_of_a_step_is_the_one_about_preemptions(rank):
    """vLLM clears and copies blocks between that and the next word."""
    connector = FerryConnector.__new__(FerryConnector)
    connector._workers = [rank.worker]
    rank.worker.obey(Orders(promises=[PROMISE]))
    connector.handle_preemptions(Orders(withdrawn=[NAME]))
    assert rank.agent.withdrawn == [NAME]
