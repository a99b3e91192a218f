"""A sender and a receiver as SGLang's scheduler calls them, on a rank that a test answers for.

What agents do is tested with agents, and the whole with servers; this is about what SGLang is told, and when.
"""

from __future__ import annotations

import gc
import warnings
from array import array
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
from plain_tables import PlainTables

from kvferry import FetchReport, FirstToken, Reason, RemoteEngine, TokenRange
from kvferry.errors import RequestError, TransferError

ROOM, PLACE, PROMPT = 77, "127.0.0.1:8998", list(range(100, 140))
ENGINE, RESTARTED = (RemoteEngine("p0", epoch, ("tcp://127.0.0.1:8998",)) for epoch in ("epoch-1", "epoch-2"))
FIRST = FirstToken(17)


@pytest.fixture(scope="module")
def sglang():
    """Our classes, which need SGLang's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.disaggregation.base.conn import KVPoll

        from kvferry.connectors.sglang import construction, manager, rank, receiver, sender
        from kvferry.connectors.sglang.prefill_engines import Lookup
    return SimpleNamespace(
        poll=KVPoll,
        manager=manager,
        construction=construction,
        rank=rank,
        receiver=receiver,
        sender=sender,
        lookup=Lookup,
    )


class ScriptedRank:
    """Notes what is asked of an agent; the test says what becomes of it."""

    def __init__(self, sglang) -> None:
        self._sglang = sglang
        self.said: list[tuple] = []
        self.leases: list = []
        self.fetches: list = []
        self.lookups = [sglang.lookup()]
        self.engines = self
        self.numbers: list[int] = []

    def find(self, place, number):
        self.numbers.append(number)
        return self.lookups[-1]

    def tell(self, lookup, told):
        if lookup.engine is None:
            lookup.waiting.append(told)
        else:
            told(lookup.engine)

    def answers(self, engine):
        """The agent hears who listens at the last place that was asked for."""
        self.lookups[-1].engine = engine
        for told in self.lookups[-1].waiting:
            told(engine)

    def forget(self, place):
        self.lookups.append(self._sglang.lookup())

    def promise(self, room, prompt):
        if self.leases:
            raise RequestError("another request of this prefill engine has the same bootstrap_room")
        self.leases.append(self._sglang.rank.Leased())
        return self.leases[-1]

    def grow(self, room, tables, num_tokens, first=None):
        self.said.append((tables, num_tokens, first))

    def withdraw(self, room):
        self.said.append(("withdraw",))

    def hold(self, room, engine):
        self.said.append(("hold", engine))

    def fetch(self, room, engine, tables, tokens, prompt):
        self.said.append(("fetch", engine, tables, tokens))
        self.fetches.append(self._sglang.rank.Fetching(f"q{len(self.fetches)}"))
        return self.fetches[-1]

    def abort(self, fetching):
        self.said.append(("abort", fetching.request_id))

    def decline(self, room, engine):
        self.said.append(("decline", engine))


@pytest.fixture
def rank(sglang):
    return ScriptedRank(sglang)


@pytest.fixture
def manager(sglang, rank):
    import torch

    rows = SimpleNamespace(
        output_ids=torch.zeros(2, 16, dtype=torch.int32),
        cached_tokens=torch.zeros(2, 16, dtype=torch.int32),
        output_token_logprobs_idx=torch.zeros(2, 16, dtype=torch.int32),
        output_token_logprobs_val=torch.zeros(2, 16),
        output_top_logprobs_idx=torch.zeros(2, 16, dtype=torch.int32),
        output_top_logprobs_val=torch.zeros(2, 16),
        bootstrap_room=torch.zeros(2, 8, dtype=torch.int64),
    )
    rows.output_ids[1, 0] = FIRST.token_id
    made = object.__new__(sglang.manager.FerryManager)
    made.rank, made.metadata, made._receivers = rank, rows, {}
    made.milestone, made.kv_args = lambda stream=None: lambda: True, SimpleNamespace(page_size=16)
    made._scheduler = SimpleNamespace(enable_overlap=False)
    made.tables, made._waiting = PlainTables(), WeakKeyDictionary()
    made._is_idle = lambda: False
    made.ranks = sglang.rank.Ranks()
    return made


def request(**changes):
    plain = {"multimodal_inputs": None, "input_embeds": None, "return_sampling_mask": False, "extra_key": None}
    more = {"cache_salt": None, "origin_input_ids": PROMPT, "return_logprob": False, "disagg_prefill_dp_rank": None}
    return SimpleNamespace(**plain | more | changes)


@pytest.fixture
def new_sender(sglang, manager):
    def make(asked=None, is_told=False, room=ROOM):
        make_one = lambda queue, asked: sglang.sender.FerrySender(manager, PLACE, room, is_told)  # noqa: E731
        return sglang.construction.note_request(make_one, None, asked or request())

    return make


@pytest.fixture
def new_receiver(sglang, manager):
    def make(asked=None, room=ROOM):
        make_one = lambda queue, asked: sglang.receiver.FerryReceiver(manager, PLACE, room)  # noqa: E731
        return sglang.construction.note_request(make_one, None, asked or request())

    return make


class TestSender:
    def test_a_prompt_is_offered_as_it_is_computed(self, sglang, new_sender, rank):
        sender = new_sender()
        assert sender.poll() == sglang.poll.WaitingForInput
        sender.init(3, 1)
        sender.send([4, 9], None, 32)
        assert sender.poll() == sglang.poll.WaitingForInput
        sender.send([2], [], 8)
        assert rank.said == [(((4, 9),), 32, None), (((4, 9, 2),), 40, FIRST)]
        assert sender.poll() == sglang.poll.Transferring
        rank.leases[0].ended = "done"
        assert sender.poll() == sglang.poll.Success

    def test_pages_are_offered_when_the_device_has_written_them(self, new_sender, manager, rank):
        done = []
        # What the device is given later has nothing to do with them.
        milestones = iter([lambda: bool(done)])
        manager.milestone = lambda stream: next(milestones)
        sender = new_sender()
        sender.init(3, 1)
        sender.send([4, 9, 2], [], 40)
        sender.poll()
        assert rank.said == []
        done.append(True)
        sender.poll()
        assert rank.said == [(((4, 9, 2),), 40, FIRST)]

    def test_a_cached_prefix_waits_for_the_event_that_sglang_sets(self, new_sender, rank):
        done = []
        sender = new_sender()
        sender.init(3, 1)
        sender._early_send_wait_event = SimpleNamespace(query=lambda: bool(done))
        sender.send([4], None, 16)
        sender.send([9, 2], [], 24)
        assert rank.said == []
        done.append(True)
        sender.poll()
        assert [said[1] for said in rank.said] == [16, 40]

    def test_that_event_is_of_one_chunk(self, new_sender, manager, rank):
        done = []
        manager.milestone = lambda stream: lambda: bool(done)
        sender = new_sender()
        sender.init(3, 1)
        sender._early_send_wait_event = SimpleNamespace(query=lambda: True)
        sender.send([4], None, 16)
        sender.send([9, 2], [], 24)
        assert [said[1] for said in rank.said] == [16]
        done.append(True)
        sender.poll()
        assert [said[1] for said in rank.said] == [16, 40]

    @pytest.mark.parametrize("reason", ["expired", "aborted", "withdrawn", "stopped"])
    def test_a_lease_that_ends_otherwise_is_a_failure_that_says_how(self, sglang, new_sender, rank, reason):
        sender = new_sender()
        rank.leases[0].ended = reason
        assert sender.poll() == sglang.poll.Failed
        with pytest.raises(TransferError, match=f"was not read: {reason}"):
            sender.failure_exception()

    def test_where_another_rank_fails_the_lease_is_taken_back_before_pages_are_free(self, new_sender, rank):
        sender = new_sender()
        with pytest.raises(TransferError, match="aborted"):
            sender.failure_exception()
        assert rank.said == [("withdraw",)]

    def test_a_first_token_that_cannot_be_sent_ends_the_request(self, sglang, new_sender, manager, rank):
        asked = request(return_logprob=True, logprob=SimpleNamespace(top_logprobs_num=0))
        manager.metadata.output_token_logprobs_val[1, 0] = float("nan")
        sender = new_sender(asked)
        sender.init(3, 1)
        sender.send([4, 9, 2], [], 40)
        assert (sender.poll(), rank.said) == (sglang.poll.Failed, [("withdraw",)])

    def test_pages_that_the_agent_refuses_end_the_request(self, sglang, new_sender, rank):
        def refuse(*_):
            raise RequestError("these cannot travel")

        rank.grow = refuse
        sender = new_sender()
        sender.init(3, 1)
        sender.send([4, 9, 2], [], 40)
        assert (sender.poll(), rank.said) == (sglang.poll.Failed, [("withdraw",)])

    @pytest.mark.parametrize("end", ["abort", "clear"])
    def test_a_client_that_leaves_takes_its_lease_along(self, new_sender, rank, end):
        getattr(new_sender(), end)()
        assert rank.said == [("withdraw",)]

    @pytest.mark.parametrize("ended", ["", "done", "expired"])
    @pytest.mark.parametrize("poll", ["poll", "poll_pp_consensus"])
    def test_a_request_whose_client_has_left_has_failed_when_sglang_asks_next(
        self, sglang, new_sender, rank, poll, ended
    ):
        """The agent answers later. A pipeline would compute it meanwhile, and finds that it has ended the request."""
        sender = new_sender()
        rank.leases[0].ended = ended
        sender.abort()
        assert getattr(sender, poll)() == sglang.poll.Failed
        with pytest.raises(TransferError, match="was aborted") as raised:
            sender.failure_exception()
        assert raised.value.reason == Reason.ABORTED
        # Its pages are free: nothing more is offered, and nothing is taken back twice.
        sender.send([4, 9, 2], [], 40)
        sender.clear()
        assert rank.said == ([] if ended else [("withdraw",)])

    @pytest.mark.parametrize("end", ["abort", "clear"])
    def test_a_lease_that_has_ended_is_neither_taken_back_nor_grows(self, new_sender, rank, end):
        sender = new_sender()
        sender.init(3, 1)
        rank.leases[0].ended = "expired"
        sender.send([4, 9, 2], [], 40)
        getattr(sender, end)()
        assert rank.said == []

    def test_each_chunk_is_offered_with_the_pages_of_its_time(self, new_sender, manager, rank):
        done = []
        manager.milestone = lambda stream: lambda: bool(done)
        sender = new_sender()
        sender.init(3, 1)
        sender.send([4], None, 16)
        sender.send([9, 2], [], 24)
        done.append(True)
        sender.poll()
        assert rank.said == [(((4,),), 16, None), (((4, 9, 2),), 40, FIRST)]

    @pytest.mark.parametrize(
        ("number", "is_told", "fails"), [(ROOM % 3, False, False), (1, False, True), (1, True, False)]
    )
    def test_a_request_that_its_room_would_not_lead_to_fails_unless_both_sides_are_told(
        self, sglang, new_sender, manager, number, is_told, fails
    ):
        manager.ranks = sglang.rank.Ranks(number=number, data_parallel_size=3)
        sender = new_sender(is_told=is_told)
        assert (sender.poll() == sglang.poll.Failed) is fails
        if fails:
            with pytest.raises(RequestError, match="leads to another engine of this server"):
                sender.failure_exception()

    def test_a_room_that_is_in_use_fails_the_second_request(self, sglang, new_sender, rank):
        first, second = new_sender(), new_sender()
        assert (first.poll(), second.poll()) == (sglang.poll.WaitingForInput, sglang.poll.Failed)
        with pytest.raises(RequestError, match="same bootstrap_room"):
            second.failure_exception()
        second.init(3, 1)
        second.send([4, 9, 2], [], 40)
        second.clear()
        # The first one's lease is none of its business.
        assert rank.said == []

    @pytest.mark.parametrize(
        "changes", [{"multimodal_inputs": object()}, {"input_embeds": [[0.5]]}, {"return_sampling_mask": True}]
    )
    def test_what_cannot_travel_fails_with_a_reason(self, sglang, new_sender, new_receiver, changes):
        for made in (new_sender(request(**changes)), new_receiver(request(**changes))):
            assert made.poll() == sglang.poll.Failed
            with pytest.raises(TransferError) as raised:
                made.failure_exception()
            assert raised.value.reason == Reason.UNNAMED_PROMPT

    @pytest.mark.parametrize("tokens", [[], array("q")])
    def test_a_prompt_without_tokens_fails_before_sglang_begins_with_it(self, sglang, new_sender, new_receiver, tokens):
        for made in (new_sender(request(origin_input_ids=tokens)), new_receiver(request(origin_input_ids=tokens))):
            assert made.poll() == sglang.poll.Failed
            with pytest.raises(RequestError, match="without tokens") as raised:
                made.failure_exception()
            assert (raised.value.found, raised.value.expected) == ("no tokens", "a prompt of one token or more")

    def test_nothing_is_sent_or_read_before_sglang_begins(self, sglang, new_sender, rank):
        """SGLang's first queue ends the server when it hears of anything else."""
        sender = new_sender()
        rank.leases[0].ended = "done"
        assert sender.poll() == sglang.poll.WaitingForInput
        sender.init(3, 1)
        assert sender.poll() == sglang.poll.Success


class TestWaiting:
    """While SGLang computes nothing, the first request that waits does so for news, in place of being asked again."""

    @pytest.fixture
    def news(self, manager, rank):
        """What becomes of a lease or a fetch while somebody waits; noted is how often that was."""
        found = SimpleNamespace(waits=0, tell=lambda: None)

        def wait_for_news(within_s):
            found.waits += 1
            assert within_s < 0.01
            found.tell()
            return True

        rank.wait_for_news = wait_for_news
        manager._is_idle = lambda: True
        return found

    def sent(self, new_sender):
        sender = new_sender()
        sender.init(3, 1)
        sender.send([4, 9, 2], [], 40)
        return sender

    def test_a_cache_that_is_read_meanwhile_is_known_at_once(self, sglang, new_sender, rank, news):
        sender = self.sent(new_sender)
        news.tell = lambda: setattr(rank.leases[0], "ended", "done")
        assert (sender.poll(), news.waits) == (sglang.poll.Success, 1)
        assert (sender.poll(), news.waits) == (sglang.poll.Success, 1)

    def test_a_cache_that_lands_meanwhile_is_known_at_once(self, sglang, new_receiver, rank, news):
        rank.lookups[-1].engine = ENGINE
        receiver = new_receiver()
        receiver.init(0)
        receiver.send_metadata([5, 6, 7], 1, [], decode_prefix_len=0)
        report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=FIRST)
        news.tell = lambda: vars_of(rank.fetches[0], report=report, is_over=True)
        assert (receiver.poll(), news.waits) == (sglang.poll.Success, 1)

    def test_nobody_waits_while_something_is_computed(self, sglang, new_sender, manager, news):
        manager._is_idle = lambda: False
        assert (self.sent(new_sender).poll(), news.waits) == (sglang.poll.Transferring, 0)

    def test_nobody_waits_before_its_prompt_is_computed(self, sglang, new_sender, news):
        assert (new_sender().poll(), news.waits) == (sglang.poll.WaitingForInput, 0)

    def test_nobody_waits_before_its_device_has_written_the_last_page(self, sglang, new_sender, manager, news):
        manager.milestone = lambda stream: lambda: False
        assert (self.sent(new_sender).poll(), news.waits) == (sglang.poll.Transferring, 0)

    def test_one_waits_for_all(self, manager, news):
        first, second = Waiting(), Waiting()
        assert (manager.wait_while_idle(first), manager.wait_while_idle(second), news.waits) == (True, False, 1)
        manager.end_wait(first)
        assert (manager.wait_while_idle(second), news.waits) == (True, 2)

    def test_one_whose_pages_sglang_holds_since_another_rank_has_failed_keeps_no_other_from_waiting(
        self, sglang, new_receiver, manager, rank, news
    ):
        receiver = started(new_receiver, rank)
        assert (receiver.poll(), news.waits) == (sglang.poll.Transferring, 1)
        receiver.ensure_abort_notified(force_arm=True)
        assert receiver.abort_notified
        assert (manager.wait_while_idle(Waiting()), news.waits) == (True, 2)

    def test_one_that_has_failed_on_another_rank_keeps_no_other_from_waiting(self, new_sender, manager, news):
        sender = self.sent(new_sender)
        sender.poll()
        with pytest.raises(TransferError, match="aborted"):
            sender.failure_exception()
        assert (manager.wait_while_idle(Waiting()), news.waits) == (True, 2)

    def test_one_whose_request_is_dropped_does_not_wait_any_more(self, new_sender, manager, news):
        """A request has its sender, which must not have the request: Python would look for such cycles much later."""
        holding = [request()]
        holding[0].disagg_kv_sender = self.sent(lambda: new_sender(holding[0]))
        holding[0].disagg_kv_sender.poll()
        gc.disable()
        try:
            holding.clear()
            assert manager.wait_while_idle(Waiting())
        finally:
            gc.enable()

    def test_one_that_is_dropped_without_a_word_does_not_wait_any_more(self, manager, news):
        first, second = Waiting(), Waiting()
        manager.wait_while_idle(first)
        del first
        assert manager.wait_while_idle(second)


class Waiting:
    """Stands for a request."""


def vars_of(target, **values):
    for name, value in values.items():
        setattr(target, name, value)


class TestReceiver:
    def test_a_prompt_is_fetched_into_its_pages(self, sglang, new_receiver, manager, rank):
        receiver = new_receiver()
        receiver.init(0)
        assert receiver.poll() == sglang.poll.Bootstrapping
        rank.answers(ENGINE)
        # SGLang may not ask how far it is for a while, when pages are scarce.
        assert rank.said == [("hold", ENGINE)]
        assert [receiver.poll(), receiver.poll()] == [sglang.poll.WaitingForInput] * 2
        assert rank.said == [("hold", ENGINE)]
        receiver.send_metadata([5, 6, 7], 1, None, 0)
        assert rank.said[1:] == [("fetch", ENGINE, ((5, 6, 7),), TokenRange(0, 40))]
        assert receiver.poll() == sglang.poll.Transferring
        rank.fetches[0].report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=FIRST)
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Success
        assert (int(manager.metadata.output_ids[1, 0]), int(manager.metadata.bootstrap_room[1, 0])) == (17, ROOM)

    def test_a_row_is_filled_once_for_it_may_be_another_requests_by_then(self, sglang, new_receiver, manager, rank):
        receiver = started(new_receiver, rank)
        report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=FirstToken(23))
        rank.fetches[0].report, rank.fetches[0].is_over = report, True
        assert receiver.poll() == sglang.poll.Success
        manager.metadata.output_ids[1, 0] = 9
        assert (receiver.poll(), int(manager.metadata.output_ids[1, 0])) == (sglang.poll.Success, 9)

    def test_a_prefix_that_is_here_does_not_move(self, new_receiver, rank):
        receiver = new_receiver()
        rank.lookups[0].engine = ENGINE
        receiver.init(0)
        receiver.send_metadata([6, 7], 1, None, decode_prefix_len=16)
        assert rank.said[-1] == ("fetch", ENGINE, ((-1, 6, 7),), TokenRange(16, 40))

    def test_failed_is_said_only_when_nothing_can_write_to_the_pages(self, sglang, new_receiver, rank):
        receiver = started(new_receiver, rank)
        rank.fetches[0].error = TransferError(Reason.DIGEST, "the received bytes differ")
        assert receiver.poll() == sglang.poll.Transferring
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(TransferError, match="bytes differ"):
            receiver.failure_exception()

    def test_where_another_rank_fails_sglang_holds_the_pages_until_this_one_is_over(self, new_receiver, rank):
        receiver = started(new_receiver, rank)
        receiver.ensure_abort_notified(force_arm=True)
        assert (receiver.abort_notified, receiver.is_over, rank.said[-1]) == (True, False, ("abort", "q0"))
        rank.fetches[0].is_over = True
        assert receiver.is_over

    def test_a_rank_that_is_over_holds_nothing(self, new_receiver, rank):
        receiver = started(new_receiver, rank)
        rank.fetches[0].is_over = True
        receiver.ensure_abort_notified(force_arm=True)
        assert not receiver.abort_notified

    def test_where_ranks_agree_on_when_pages_are_free_each_of_them_holds_them(self, new_receiver, manager, rank):
        manager._ranks_to_agree = "ranks"
        receiver = started(new_receiver, rank)
        rank.fetches[0].is_over = True
        receiver.ensure_abort_notified(force_arm=True)
        assert receiver.abort_notified
        assert ("abort", "q0") not in rank.said

    def test_a_room_is_safe_when_its_own_request_is_over(self, sglang, new_receiver, manager, rank):
        """Also where a client uses the room again."""
        first = started(new_receiver, rank)
        second = new_receiver()
        assert (second.poll(), manager.is_abort_release_safe(ROOM, 0)) == (sglang.poll.Failed, False)
        second.clear()
        rank.fetches[0].is_over = True
        assert manager.is_abort_release_safe(ROOM, 0)
        manager.clear_deferred_abort_state(ROOM)
        first.clear()
        assert new_receiver().poll() == sglang.poll.Bootstrapping

    @pytest.mark.parametrize("end", ["abort", "clear"])
    def test_a_lease_that_was_held_is_declined_when_nobody_needs_it(self, new_receiver, rank, end):
        receiver = new_receiver()
        rank.lookups[0].engine = ENGINE
        receiver.init(0)
        getattr(receiver, end)()
        getattr(receiver, end)()
        assert rank.said == [("hold", ENGINE), ("decline", ENGINE)]

    @pytest.mark.parametrize("end", ["abort", "clear"])
    def test_a_lease_that_nobody_needs_any_more_is_not_held_when_it_is_known_where_it_is(self, new_receiver, rank, end):
        receiver = new_receiver()
        receiver.init(0)
        getattr(receiver, end)()
        rank.answers(ENGINE)
        assert rank.said == []

    def test_a_lease_that_was_held_and_then_fetched_is_not_declined(self, new_receiver, rank):
        receiver = new_receiver()
        rank.lookups[0].engine = ENGINE
        receiver.init(0)
        receiver.poll()
        receiver.send_metadata([5, 6, 7], 1, None, 0)
        rank.fetches[0].is_over = True
        receiver.clear()
        assert [said[0] for said in rank.said] == ["hold", "fetch"]

    def test_nothing_is_fetched_for_a_client_that_has_left(self, sglang, new_receiver, rank):
        """SGLang may have reserved the pages meanwhile, and frees them when it hears that the request has failed."""
        receiver = new_receiver()
        receiver.init(0)
        receiver.abort()
        rank.answers(ENGINE)
        receiver.send_metadata([5, 6, 7], 1, None, 0)
        assert (receiver.poll(), rank.said) == (sglang.poll.Failed, [])

    @pytest.mark.parametrize("wanted", [16, 17])
    def test_more_log_probabilities_than_a_row_has_places_for_are_refused(
        self, sglang, new_receiver, new_sender, wanted
    ):
        """SGLang's prefill would end when it fills the row."""
        asked = request(return_logprob=True, logprob=SimpleNamespace(top_logprobs_num=wanted))
        for made in (new_sender(asked), new_receiver(asked)):
            assert (made.poll() == sglang.poll.Failed) is (wanted > 16)
            if wanted > 16:
                with pytest.raises(RequestError, match="found: top_logprobs_num 17; expected: at most 16"):
                    made.failure_exception()

    def test_embeddings_at_places_of_a_prompt_have_no_name(self, sglang, new_sender):
        made = new_sender(request(positional_embed_overrides=object()))
        with pytest.raises(TransferError, match="embeddings"):
            made.failure_exception()

    @pytest.mark.parametrize("asked", ["hold", "fetch"])
    def test_what_the_agent_refuses_is_a_failure_of_its_request(self, sglang, new_receiver, rank, asked):
        def refuse(*_):
            raise RequestError("this cannot travel")

        setattr(rank, asked, refuse)
        receiver = new_receiver()
        rank.lookups[0].engine = ENGINE
        receiver.init(0)
        receiver.poll()
        receiver.send_metadata([5, 6, 7], 1, None, 0)
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(RequestError, match="cannot travel"):
            receiver.failure_exception()

    @pytest.mark.parametrize("first", [FirstToken(1 << 31), FirstToken(17, 1e300)])
    def test_a_first_token_that_does_not_fit_is_a_failure(self, sglang, new_receiver, rank, first):
        receiver = started(new_receiver, rank)
        report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=first)
        rank.fetches[0].report, rank.fetches[0].is_over = report, True
        assert receiver.poll() == sglang.poll.Failed

    def test_more_logprobs_than_there_is_room_for_are_left_out(self, sglang, new_receiver, manager, rank):
        receiver = started(new_receiver, rank)
        first = FirstToken(17, -0.5, tuple((number, -1.0) for number in range(40)))
        report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=first)
        rank.fetches[0].report, rank.fetches[0].is_over = report, True
        assert receiver.poll() == sglang.poll.Success
        assert manager.metadata.output_top_logprobs_idx[1].tolist() == list(range(16))

    def test_a_request_that_sglang_has_taken_back_fails(self, sglang, new_receiver, manager, rank):
        receiver = started(new_receiver, rank)
        manager.submit_prefill_recompute(receiver, {})
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Failed

    def test_what_is_over_is_not_aborted_and_keeps_its_reason(self, sglang, new_receiver, rank):
        receiver = started(new_receiver, rank)
        rank.fetches[0].error = TransferError(Reason.DIGEST, "the received bytes differ")
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Failed
        said = len(rank.said)
        receiver.abort()
        assert len(rank.said) == said
        with pytest.raises(TransferError, match="bytes differ"):
            receiver.failure_exception()

    def test_a_client_that_leaves_after_its_cache_has_come_frees_its_pages(self, sglang, new_receiver, rank):
        """SGLang may still hold the request: it waits for the other ranks, or for pages that it brings back."""
        receiver = started(new_receiver, rank)
        rank.fetches[0].report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=FIRST)
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Success
        receiver.abort()
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(TransferError, match="was aborted"):
            receiver.failure_exception()

    @pytest.mark.parametrize("room", [None, 0, -1, 1 << 63])
    def test_a_room_that_cannot_be_is_a_failure(self, sglang, new_sender, new_receiver, rank, room):
        for made in (new_receiver(room=room), new_sender(room=room)):
            assert made.poll() == sglang.poll.Failed
            with pytest.raises(RequestError, match="bootstrap_room cannot name a request"):
                made.failure_exception()
        assert (rank.leases, rank.said) == ([], [])

    def test_what_nobody_has_foreseen_fails_its_request_and_not_the_server(
        self, sglang, new_sender, new_receiver, rank, caplog
    ):
        strange = request()
        del strange.extra_key
        for made in (new_receiver(strange), new_sender(strange)):
            assert made.poll() == sglang.poll.Failed
            with pytest.raises(RequestError, match="cannot serve this request; found: AttributeError"):
                made.failure_exception()
        assert (rank.leases, rank.said) == ([], [])
        assert [bool(record.exc_info) for record in caplog.records] == [True, True]

    def test_a_request_that_sglang_forgets_is_nobodys(self, new_receiver, manager, rank):
        receiver = started(new_receiver, rank)
        assert not manager.is_abort_release_safe(ROOM, 1)
        receiver.clear()
        assert manager.is_abort_release_safe(ROOM, 1)

    def test_a_client_that_leaves_ends_its_fetch(self, sglang, new_receiver, rank):
        receiver = started(new_receiver, rank)
        receiver.abort()
        assert (rank.said[-1], receiver.poll()) == (("abort", "q0"), sglang.poll.Transferring)
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Failed

    @pytest.mark.parametrize("reason", [Reason.WRONG_EPOCH, Reason.WRONG_ENGINE, Reason.PEER_LOST, Reason.UNREACHABLE])
    def test_an_engine_that_was_started_again_is_met_again_once(self, sglang, new_receiver, rank, reason):
        receiver = started(new_receiver, rank)
        rank.fetches[0].error = TransferError(reason, "restarted")
        # The first try may still be written to the pages.
        assert (receiver.poll(), len(rank.lookups)) == (sglang.poll.Transferring, 1)
        rank.fetches[0].is_over = True
        assert receiver.poll() == sglang.poll.Transferring
        # Who was there before is not who is asked now.
        assert len(rank.lookups) == 2
        rank.lookups[-1].engine = RESTARTED
        receiver.poll()
        assert rank.said[-1] == ("fetch", RESTARTED, ((5, 6, 7),), TokenRange(0, 40))
        rank.fetches[1].error, rank.fetches[1].is_over = TransferError(reason, "again"), True
        assert receiver.poll() == sglang.poll.Failed

    @pytest.mark.parametrize(("told", "number"), [(None, ROOM), (0, 0), (2, 2)])
    def test_a_room_leads_to_an_engine_of_a_server_unless_the_request_says_to_which(
        self, new_receiver, rank, told, number
    ):
        new_receiver(request(disagg_prefill_dp_rank=told)).init(0)
        assert rank.numbers == [number]

    def test_whoever_has_been_met_since_is_not_asked_again(self, sglang, new_receiver, rank):
        receiver = started(new_receiver, rank)
        rank.lookups.append(sglang.lookup(RESTARTED))
        rank.fetches[0].error, rank.fetches[0].is_over = TransferError(Reason.PEER_LOST, "restarted"), True
        receiver.poll()
        receiver.poll()
        assert (len(rank.lookups), rank.said[-1][:2]) == (2, ("fetch", RESTARTED))

    def test_nobody_at_the_address_is_a_failure(self, sglang, new_receiver, rank):
        receiver = new_receiver()
        receiver.init(0)
        rank.lookups[0].error = TransferError(Reason.DEADLINE, "nobody has said who it is")
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(TransferError, match="nobody has said"):
            receiver.failure_exception()

    def test_a_source_that_has_not_said_the_first_token_is_no_use(self, sglang, new_receiver, rank):
        receiver = started(new_receiver, rank)
        rank.fetches[0].report, rank.fetches[0].is_over = FetchReport(40, 1, 1, "shm", "", "direct"), True
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(TransferError, match="which token follows the prompt"):
            receiver.failure_exception()

    @pytest.mark.parametrize(
        ("num_top", "first", "state"),
        [
            (0, FIRST, "Failed"),
            (0, FirstToken(17, -0.5), "Success"),
            (2, FirstToken(17, -0.5), "Failed"),
            (2, FirstToken(17, -0.5, ((17, -0.5),)), "Failed"),
            (2, FirstToken(17, -0.5, ((17, -0.5), (3, -2.0))), "Success"),
            (2, FirstToken(17, -0.5, ((17, -0.5), (3, -2.0), (4, -3.0))), "Success"),
        ],
    )
    def test_logprobs_that_are_asked_for_have_to_come(self, sglang, new_receiver, rank, num_top, first, state):
        asked = request(return_logprob=True, logprob=SimpleNamespace(top_logprobs_num=num_top))
        receiver = started(lambda: new_receiver(asked), rank)
        report = FetchReport(40, 1, 1, "shm", "", "direct", first_token=first)
        rank.fetches[0].report, rank.fetches[0].is_over = report, True
        assert receiver.poll() == getattr(sglang.poll, state)


def started(new_receiver, rank):
    """A receiver whose fetch is under way."""
    receiver = new_receiver()
    rank.lookups[0].engine = ENGINE
    receiver.init(0)
    receiver.send_metadata([5, 6, 7], 1, None, 0)
    return receiver
