"""The worker's half with an agent that says what a test wants: what vLLM is told, by rank and after aggregation."""

import importlib
import logging
import queue
import warnings
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.agent.config import AgentConfig
from kvferry.connectors.vllm.description.describe import Described, GroupFacts
from kvferry.connectors.vllm.features import FAILS_BY_BLOCKS
from kvferry.connectors.vllm.metadata import FetchOrder, LeaseOrder, Orders, PromiseOrder, agent_name
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.worker.deferred_commands import DeferredCommands, at_once
from kvferry.connectors.vllm.worker.early_prefills import EarlyPrefills, Source
from kvferry.connectors.vllm.worker.rank_agent import RankAgent
from kvferry.connectors.vllm.worker.worker import Worker
from kvferry.errors import RequestError, TransferError
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.prompt import Prompt, PromptInput
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, FetchReport, LeaseEnded
from kvferry.wire.messages import Party, Reason, Reference

SETTINGS = Settings(AgentConfig("ours"), is_loss_fatal=True)
REFERENCE = Reference("prefill", "epoch", "cmpl-there", "lease")
REPORT = FetchReport(39, 4096, 1, "tcp", "tcp 1 GB/s", "direct", {"wire": 0.1})
LOST = TransferError(Reason.PEER_LOST, "gone")
PARTY = Party("prefill_dp0", "epoch", 0)
LONG = "x" * 5000
LEASE = LeaseOrder("l", "lease", ((1,),), 40)


@dataclass
class FakeAgent:
    """Notes what it is asked for; the test speaks for it."""

    alive: bool = True
    wanted: list = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    grown: list = field(default_factory=list)
    moved_bytes: dict = field(default_factory=dict)
    written_ids: frozenset[str] = frozenset()
    party: Party = PARTY

    def lease(self, wanted):
        self.wanted.append(wanted)

    fetch = lease

    def abort(self, request_id):
        self.aborted.append(request_id)

    def withdraw(self, request_id):
        self.withdrawn.append(request_id)

    def grow(self, grown):
        self.grown.append(grown)


class Rank:
    """A worker's half and its agent."""

    def __init__(self):
        self.agent = FakeAgent()
        self.worker = Worker(None, SETTINGS, None)
        described = Described(Layout((), (), (), ()), (), (GroupFacts(0),), (0,))
        early_prefills = EarlyPrefills(Source(self.agent, described), self.worker._open)
        self.worker._started.append(RankAgent(self.agent, described, early_prefills, DeferredCommands(at_once)))

    def says(self, *notices):
        for notice in notices:
            self.worker._notices.put(notice)
        return self.told()

    def told(self):
        results = self.worker.results()
        return results.finished_sending, results.finished_recving, results.failed_recving


def fetch(request_id="a", is_waited_for=True, error=""):
    tokens = TokenRange(0, 39 if is_waited_for else 0)
    return FetchOrder(request_id, REFERENCE, ("tcp://127.0.0.1:1",), ((1,),), (tokens,), is_waited_for, error)


@pytest.fixture
def rank(monkeypatch):
    # vLLM's loggers, which ours copies, do not propagate; what a test before this one has set up is undone here.
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    return Rank()


NOTHING = (set(), set(), set())


@pytest.mark.parametrize("request_id", ["a", LONG], ids=["short", "long"])
def test_a_fetched_cache_is_reported_once(rank, request_id):
    rank.worker.obey(Orders(fetches=[fetch(request_id)]))
    assert rank.told() == NOTHING
    name = rank.agent.wanted[0].request_id
    assert rank.says(Fetched(name, REPORT)) == (set(), {request_id}, set())
    assert rank.says(Fetched(name, REPORT), BlocksReleased(name), AgentStopped()) == NOTHING


def test_a_failed_fetch_is_reported_when_its_blocks_are_free(rank):
    rank.worker.obey(Orders(fetches=[fetch()]))
    assert rank.says(FetchFailed("a", LOST)) == NOTHING
    assert rank.says(BlocksReleased("a")) == (set(), {"a"}, {"a"})
    assert rank.says(BlocksReleased("a"), FetchFailed("a", LOST), AgentStopped()) == NOTHING


def test_a_failure_does_not_stick_to_an_id_that_is_used_again(rank):
    rank.worker.obey(Orders(fetches=[fetch()]))
    rank.says(FetchFailed("a", LOST), BlocksReleased("a"))
    rank.worker.obey(Orders(fetches=[fetch()]))
    assert rank.says(Fetched("a", REPORT)) == (set(), {"a"}, set())


@pytest.mark.parametrize(
    "ending",
    [(Fetched("a", REPORT),), (FetchFailed("a", LOST), BlocksReleased("a")), (AgentStopped(),)],
    ids=["well", "ill", "end"],
)
def test_a_release_is_never_reported_logged_or_counted(rank, ending, caplog):
    rank.worker.obey(Orders(fetches=[fetch(is_waited_for=False)]))
    assert rank.says(*ending) == NOTHING
    assert rank.worker.take_stats().is_empty()
    assert caplog.records == []


def test_an_order_that_cannot_begin_fails_at_once_and_once(rank, caplog):
    rank.worker.obey(Orders(fetches=[fetch(error="nonsense")]))
    assert rank.told() == (set(), {"a"}, {"a"})
    assert rank.told() == NOTHING
    assert rank.agent.wanted == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_the_agent_refuses_to_begin_ends_its_request_and_not_the_engine(rank, monkeypatch):
    """What a peer has said of itself may be anything."""

    def refuse(wanted):
        raise RequestError("no such place")

    monkeypatch.setattr(rank.agent, "fetch", refuse)
    rank.worker.obey(Orders(fetches=[fetch()]))
    assert rank.told() == (set(), {"a"}, {"a"})
    assert rank.told() == NOTHING


def test_only_what_is_still_being_fetched_is_aborted(rank):
    rank.worker.obey(Orders(fetches=[fetch(), fetch("b"), fetch(LONG)], aborted=["a", LONG, "never seen"]))
    rank.says(Fetched("b", REPORT))
    rank.worker.obey(Orders(aborted=["b"]))
    assert rank.agent.aborted == ["a", agent_name(LONG)]
    assert rank.says(FetchFailed("a", LOST), BlocksReleased("a")) == (set(), {"a"}, {"a"})


def test_agents_are_told_which_prompt_it_is(rank):
    prompt = Prompt.of([1, 2, 3], [PromptInput("adapter", "digest")])
    lease, wanted = replace(LEASE, prompt=prompt), replace(fetch(), prompt=prompt.name("lease"))
    promise = PromiseOrder("early", "early-lease", 3, prompt)
    rank.worker.obey(Orders(leases=[lease], fetches=[wanted], promises=[promise]))
    assert [each.prompt for each in rank.agent.wanted] == [prompt, prompt, prompt.name("lease")]


@pytest.mark.parametrize("request_id", ["a", LONG], ids=["short", "long"])
def test_leased_blocks_are_given_back_once(rank, request_id):
    rank.worker.obey(Orders(leases=[LeaseOrder(request_id, "lease", ((1,),), 40)]))
    name = rank.agent.wanted[0].request_id
    assert rank.says(LeaseEnded(name, "done")) == ({request_id}, set(), set())
    assert rank.says(LeaseEnded(name, "done"), LeaseEnded("b", "done"), AgentStopped()) == NOTHING


def test_everything_open_ends_with_the_agent(rank):
    rank.worker.obey(Orders(leases=[LEASE], fetches=[fetch()]))
    assert rank.says(AgentStopped()) == ({"l"}, {"a"}, {"a"})
    assert rank.says(BlocksReleased("a"), LeaseEnded("l", "done")) == NOTHING


def test_blocks_that_a_source_may_still_write_to_are_not_given_back(rank, caplog):
    rank.worker.obey(Orders(fetches=[fetch(), fetch("b"), fetch(LONG)]))
    rank.agent.written_ids = frozenset({"b", agent_name(LONG)})
    assert rank.says(FetchFailed("b", LOST), AgentStopped()) == (set(), {"a"}, {"a"})
    kept = [record.args[0] for record in caplog.records if record.levelname == "ERROR"]
    assert kept == ["b", LONG]
    assert rank.told() == NOTHING


@pytest.mark.parametrize("alive", [True, False], ids=["ending", "ended"])
def test_orders_to_an_agent_that_has_stopped_end_at_once(rank, alive):
    rank.says(AgentStopped())
    rank.agent.alive = alive
    rank.worker.obey(Orders(leases=[LEASE], fetches=[fetch()]))
    assert rank.agent.wanted == []
    assert rank.told() == ({"l"}, {"a"}, {"a"})
    assert rank.told() == NOTHING


def test_orders_before_the_last_word_of_an_agent_that_has_died_end_once(rank):
    rank.worker.obey(Orders(leases=[LEASE], fetches=[fetch()]))
    rank.agent.alive = False
    rank.worker.obey(Orders(leases=[LeaseOrder("m", "lease", ((1,),), 40)], fetches=[fetch("b")]))
    assert rank.says(AgentStopped()) == ({"l", "m"}, {"a", "b"}, {"a", "b"})
    assert rank.told() == NOTHING


@pytest.mark.skipif(FAILS_BY_BLOCKS, reason="since vLLM 0.30 it hears of requests")
def test_one_rank_that_fails_fails_the_request_when_both_are_done(rank):
    both, aggregator = (rank, Rank()), KVOutputAggregator(2)
    for each in both:
        each.worker.obey(Orders(fetches=[fetch()]))
    first = aggregate(aggregator, both[0].says(FetchFailed("a", LOST), BlocksReleased("a")), NOTHING)
    assert not first.finished_recving
    second = aggregate(aggregator, NOTHING, both[1].says(Fetched("a", REPORT)))
    assert (set(second.finished_recving), set(second.failed_recving)) == ({"a"}, {"a"})


@pytest.mark.skipif(not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"), reason="since vLLM 0.33")
def test_what_a_rank_said_in_a_step_that_failed_counts_once_in_the_next_one(rank):
    both, aggregator = (rank, Rank()), KVOutputAggregator(2)
    for each in both:
        each.worker.obey(Orders(leases=[LEASE]))
    said = both[0].says(LeaseEnded("l", "done"))
    aggregator.ft_defer_kv_connector_outputs([KVConnectorOutput(finished_sending=said[0])])
    assert not aggregate(aggregator, NOTHING, NOTHING).finished_sending
    assert aggregate(aggregator, NOTHING, both[1].says(LeaseEnded("l", "done"))).finished_sending == {"l"}


def aggregate(aggregator, *told):
    outputs = [
        replace(
            ModelRunnerOutput(req_ids=[], req_id_to_index={}),
            kv_connector_output=KVConnectorOutput(finished_sending=s, finished_recving=r, failed_recving=f),
        )
        for s, r, f in told
    ]
    return aggregator.aggregate(outputs).kv_connector_output


def test_the_chosen_transport_is_told_once_per_peer(rank, caplog):
    caplog.set_level(logging.INFO, "kvferry")
    for name in ("a", "b"):
        rank.worker.obey(Orders(fetches=[fetch(name)]))
        rank.says(Fetched(name, REPORT))
    assert [record.getMessage() for record in caplog.records] == [
        "kvferry fetches from prefill over tcp (handshake 0.0 s): tcp 1 GB/s"
    ]


def test_a_rank_that_moved_nothing_does_not_spoil_the_figures(rank):
    rank.worker.obey(Orders(fetches=[fetch()]))
    rank.says(Fetched("a", replace(REPORT, num_bytes=0, num_rows=0)))
    assert rank.worker.take_stats().is_empty()


class LateNotices(queue.SimpleQueue):
    """Has a word only for a step that waits for one."""

    def __init__(self, notice):
        self._notice = notice

    def get(self, block=True, timeout=None):
        assert timeout == 3600.0
        return self._notice


@pytest.mark.parametrize(
    ("orders", "notice", "told"),
    [
        (Orders(fetches=[fetch()], is_idle=True), Fetched("a", REPORT), (set(), {"a"}, set())),
        (Orders(leases=[LEASE], is_idle=True), LeaseEnded("l", "done"), ({"l"}, set(), set())),
    ],
    ids=["fetch", "lease"],
)
def test_a_step_that_computes_nothing_waits_a_moment_for_what_is_under_way(rank, monkeypatch, orders, notice, told):
    """The word comes while the step waits for it: the same step tells it."""
    monkeypatch.setattr("kvferry.connectors.vllm.worker.worker.IDLE_WAIT_S", 3600.0)
    monkeypatch.setattr(rank.worker, "_notices", LateNotices(notice))
    rank.worker.obey(orders)
    assert rank.told() == told


@pytest.mark.parametrize("orders", [Orders(fetches=[fetch()]), Orders(is_idle=True)], ids=["computes", "nothing open"])
def test_no_other_step_waits(rank, orders, monkeypatch):
    monkeypatch.setattr("kvferry.connectors.vllm.worker.worker.IDLE_WAIT_S", 3600.0)
    rank.worker.obey(orders)
    assert rank.told() == (set(), set(), set())


def reference(**changed):
    return Reference(
        **{"engine_id": "prefill_dp0", "epoch": "epoch", "request_id": "l", "lease_id": "lease", **changed}
    )


def test_a_lease_is_ended_by_whoever_knows_its_id_and_vllm_hears_of_it_once(rank):
    rank.worker.obey(Orders(leases=[LEASE]))
    assert rank.worker.release(reference()) == "released"
    assert rank.agent.withdrawn == ["l"]
    assert rank.says(LeaseEnded("l", "withdrawn")) == ({"l"}, set(), set())
    assert rank.worker.release(reference()) == "unknown_lease"
    assert rank.says(LeaseEnded("l", "withdrawn")) == NOTHING


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lease_id": "guessed"}, "unknown_lease"),
        ({"request_id": "m"}, "unknown_lease"),
        ({"engine_id": "decode"}, "wrong_engine"),
        ({"engine_id": "prefill_dp1"}, "unknown_lease"),
        ({"epoch": "before"}, "wrong_epoch"),
    ],
    ids=lambda value: str(value),
)
def test_nobody_else_ends_a_lease(rank, changed, reason):
    rank.worker.obey(Orders(leases=[LEASE]))
    assert rank.worker.release(reference(**changed)) == reason
    rank.worker.obey(Orders(leases=[LeaseOrder("m", "other", ((1,),), 40)]))
    assert rank.agent.withdrawn == []
    assert rank.told() == NOTHING


def test_a_release_that_comes_before_its_lease_ends_it_when_it_comes(rank):
    assert rank.worker.release(reference()) == "unknown_lease"
    rank.worker.obey(Orders(leases=[LEASE]))
    assert rank.agent.withdrawn == ["l"]
    assert rank.says(LeaseEnded("l", "withdrawn")) == ({"l"}, set(), set())


NAMED = LeaseOrder("cmpl-r-0-12345678", "lease", ((1,),), 40)


def test_a_lease_whose_answer_nobody_got_is_ended_by_its_callers_name(rank):
    rank.worker.obey(Orders(leases=[NAMED, LEASE]))
    assert rank.worker.withdraw_leases(["cmpl-r-0"])
    assert rank.agent.withdrawn == [NAMED.request_id]
    assert rank.says(LeaseEnded(NAMED.request_id, "withdrawn")) == ({NAMED.request_id}, set(), set())
    assert not rank.worker.withdraw_leases(["cmpl-r-0"])


def test_each_of_several_answers_to_a_prompt_is_ended_by_its_callers_name(rank):
    children = [replace(NAMED, request_id=f"{number}_{NAMED.request_id}") for number in range(12)]
    rank.worker.obey(Orders(leases=children[:10]))
    assert rank.worker.withdraw_leases(["cmpl-r-0"])
    rank.worker.obey(Orders(leases=children[10:]))
    assert rank.agent.withdrawn == [child.request_id for child in children]


def test_nothing_that_was_computed_before_a_reset_is_read_after_it(rank):
    rank.worker.obey(Orders(leases=[LEASE], promises=[PromiseOrder("early", "lease", 40)]))
    rank.worker.obey(Orders(leases=[NAMED], is_reset=True))
    assert rank.agent.withdrawn == [LEASE.request_id, NAMED.request_id]
    rank.worker.obey(Orders(leases=[replace(NAMED, request_id="later")]))
    assert len(rank.agent.withdrawn) == 2


@pytest.mark.parametrize("name", ["cmpl-r", "cmpl-r-0-", "cmpl-r-0-1234567", "0_cmpl-r-0", "r", ""])
def test_other_names_withdraw_no_lease(rank, name):
    rank.worker.obey(Orders(leases=[NAMED, LEASE]))
    assert not rank.worker.withdraw_leases([name])
    rank.worker.obey(Orders(leases=[replace(NAMED, request_id="cmpl-r-0-87654321")]))
    assert rank.agent.withdrawn == []


def test_a_lease_that_comes_with_the_step_after_its_end_is_ended_at_once(rank):
    """The request was over, and its client gone, before a step could bring the lease."""
    assert not rank.worker.withdraw_leases(["cmpl-r-0"])
    rank.worker.obey(Orders(leases=[NAMED, LEASE]))
    assert [wanted.request_id for wanted in rank.agent.wanted] == [NAMED.request_id, "l"]
    assert rank.agent.withdrawn == [NAMED.request_id]
    assert rank.says(LeaseEnded(NAMED.request_id, "withdrawn")) == ({NAMED.request_id}, set(), set())


def test_a_later_request_of_a_withdrawn_name_keeps_its_lease(rank):
    """A caller may try again under the same name: what comes with a later step is computed for that."""
    assert not rank.worker.withdraw_leases(["cmpl-r-0"])
    rank.worker.obey(Orders())
    rank.worker.obey(Orders(leases=[NAMED]))
    assert rank.agent.withdrawn == []


def test_names_that_were_withdrawn_are_not_kept_without_limit(rank):
    for number in range(100):
        rank.worker.withdraw_leases([f"cmpl-{number}-{other}" for other in range(100)])
    assert len(rank.worker._withdrawn_names) <= 1024


def test_a_lease_that_waits_for_the_device_ends_when_the_agent_hears_of_it(rank, monkeypatch):
    """Its end may come in between: the agent must not hear of that first."""
    is_done = []
    deferred = DeferredCommands(lambda: lambda: bool(is_done))
    monkeypatch.setattr(rank.worker, "_started", [replace(rank.worker._ours(), deferred=deferred)])
    rank.worker.obey(Orders(leases=[NAMED]))
    assert rank.worker.withdraw_leases(["cmpl-r-0"])
    rank.agent.withdrawn.clear()
    is_done.append(True)
    rank.told()
    assert (len(rank.agent.wanted), rank.agent.withdrawn) == (1, [NAMED.request_id])


def test_every_end_of_a_fetch_is_told_by_vllms_name_and_a_reason(rank):
    orders = [fetch("well"), fetch(LONG), fetch("ill", error="nonsense"), fetch("nothing", is_waited_for=False)]
    rank.worker.obey(Orders(fetches=orders))
    rank.says(Fetched("well", REPORT), FetchFailed(agent_name(LONG), LOST), FetchFailed("nothing", LOST))
    assert sorted(rank.worker.take_stats().data["fetches"]) == [
        ["ill", "malformed", "nonsense", True, {}],
        ["well", "", "", False, {"wire": 0.1}],
        [LONG, "peer_lost", str(LOST), True, {}],
    ]
