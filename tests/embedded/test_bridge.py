"""The bridge between the event loop and a real agent: nobody's blocks are forgotten, whoever leaves when."""

import asyncio
import contextlib

import pytest

from kvferry import AgentConfig, Cache
from kvferry.embedded.engine.records import Grown
from kvferry.embedded.transfer.agent_report import AgentCollector
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import room_params
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.prompt import Prompt
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Fetched, FetchFailed, FetchReport
from kvferry.session.timing import Timing
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.messages import FirstToken

MODEL = attention(num_layers=1, num_heads=2, head_dim=4, dtype="float32", item_bytes=4)
SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=8, format="block-major")
DEADLINE_S = 30.0
FIRST = FirstToken(17, -0.5, ((17, -0.5),))


def prompt(num_tokens):
    """Prompts of which the longer begin with the shorter."""
    return Prompt.of(range(100, 100 + num_tokens))


class Side:
    """One engine's transfer over a small cache of its own; `released` gets the ids whose blocks are free."""

    def __init__(self, engine_id, lease_s, direction):
        size_bytes = SHAPE.num_blocks * SHAPE.block_tokens * MODEL.bytes_per_token
        self.shared = allocate_shared(size_bytes, engine_id)
        (layout,) = describe(MODEL, SHAPE, self.shared.memory.address)
        self.released = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        timing = Timing(lease_s=lease_s, handshake_s=5.0, heartbeat_s=2.0, resend_s=0.5)
        config = AgentConfig(engine_id, transport="shm", timing=timing, direction=direction)
        self.transfer = AgentTransfer(config, Cache((layout,), (self.shared.memory,)), self.release)

    def release(self, request_id):
        self.loop.call_soon_threadsafe(self.released.put_nowait, request_id)

    async def freed(self):
        return await asyncio.wait_for(self.released.get(), DEADLINE_S)


async def fetch(target, request_id, params, block_tables, wanted):
    """As a request does that finds room at once."""
    remote = await target.transfer.hold(request_id, params)
    return await target.transfer.fetch(request_id, remote, block_tables, wanted)


def held_by(side):
    """The leases that a side keeps alive, and does not fetch yet."""
    return side.transfer.agent._event_loop.target._liveness.queued


@contextlib.asynccontextmanager
async def two_sides(lease_s=30.0, direction=Direction.READ):
    source, target = Side("p0", lease_s, direction), Side("d0", lease_s, direction)
    await source.transfer.start()
    await target.transfer.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield source, target
    finally:
        await source.transfer.close()
        await target.transfer.close()
        source.shared.close()
        target.shared.close()


async def test_the_reference_of_another_prompt_is_refused():
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), Prompt.of([100, 101, 7, 103]))
        with pytest.raises(TransferError, match="the cache of another prompt") as caught:
            await fetch(target, "q1", params, ((0,),), prompt(3))
        assert caught.value.reason == "wrong_prompt"
        assert await target.freed() == "q1"


async def test_the_reference_of_a_prompt_that_is_promised_is_bound_to_it():
    async with two_sides(direction=Direction.WRITE) as (source, target):
        params = await source.transfer.promise("r1", Prompt.of([7, 101, 102, 103]))
        with pytest.raises(TransferError, match="the cache of another prompt"):
            await fetch(target, "q1", params, ((0,),), prompt(3))


async def test_an_offer_is_fetched_and_the_source_is_free():
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        report = (await fetch(target, "q1", params, ((0, 5),), prompt(6))).report
        assert (report.tokens, report.num_bytes, report.transport) == (6, 6 * MODEL.bytes_per_token, "shm")
        assert await source.freed() == "r1"
        assert target.released.empty()
        families = {family.name: family.samples for family in AgentCollector(target.transfer).collect()}
        rates = families["kvferry_agent_peer_bytes_per_second"]
        assert {(sample.labels["direction"], sample.labels["rows"]) for sample in rates} == {
            (direction, rows) for direction in ("read", "write") for rows in ("long", "4KiB")
        }
        assert all(sample.value > 0 for sample in rates)
        (warnings,) = families["kvferry_agent_peer_warnings"]
        assert (warnings.labels["transport"], warnings.labels["carrier"]) == ("shm", "shm")
        assert warnings.labels["peer"].endswith(source.transfer.agent.address)


async def test_a_refused_fetch_raises_and_frees_both_sides():
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        with pytest.raises(TransferError, match="more tokens than were computed"):
            await fetch(target, "q1", params, ((0, 5, 6),), prompt(9))
        assert await target.freed() == "q1"
        source.transfer.abort("r1")
        assert await source.freed() == "r1"
        family, *_ = AgentCollector(target.transfer).collect()
        # A busy machine may also have counted how slow a way is.
        failed = {sample.labels["reason"] for sample in family.samples if "transport" not in sample.labels["what"]}
        assert failed == {"out_of_range"}


async def test_parameters_that_make_no_sense_are_an_error_before_there_are_blocks():
    async with two_sides() as (_source, target):
        with pytest.raises(TransferError, match="kv_transfer_params cannot be read"):
            await target.transfer.hold("q1", {"do_remote_prefill": True})


async def test_what_the_agent_refuses_to_begin_frees_the_blocks(monkeypatch):
    """Whatever a peer has made of it."""
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))

        def refuse(wanted):
            raise RequestError("no", found="such a place")

        monkeypatch.setattr(target.transfer.agent, "fetch", refuse)
        with pytest.raises(TransferError, match="this cache cannot be asked for; found: no; found: such a place"):
            await fetch(target, "q1", params, ((0,),), prompt(3))
        assert await target.freed() == "q1"


async def offered(source):
    return await source.transfer.offer("r1", ((1, 3),), prompt(7))


async def promised(source):
    return await source.transfer.promise("r1", prompt(7))


@pytest.mark.parametrize(("ask", "source_ends"), [(offered, True), (promised, False)])
async def test_a_caller_that_goes_away_frees_its_blocks(ask, source_ends):
    """Of a fetch that comes to nothing, and of one that would wait."""
    async with two_sides() as (source, target):
        params = await ask(source)
        if source_ends:
            await source.transfer.close()
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        await asyncio.sleep(0)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert await target.freed() == "q1"


@pytest.mark.parametrize("settled_first", [True, False])
async def test_a_caller_that_goes_away_when_all_is_over_frees_its_blocks(settled_first, monkeypatch):
    """The fetch is over and frees nothing by itself: the notice and the cancellation cross each other."""
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        await source.transfer.close()
        # Of a fetch that is over the agent says nothing more.
        for name in ("fetch", "abort"):
            monkeypatch.setattr(target.transfer.agent, name, lambda request: None)
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        await asyncio.sleep(0)
        notice = Fetched("q1", FetchReport(6, 1, 1, "shm", "", "direct"))
        if settled_first:
            target.transfer._agent._take(notice)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        if not settled_first:
            target.transfer._agent._take(notice)
        assert await target.freed() == "q1"


async def test_close_ends_what_is_under_way():
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        await source.transfer.close()
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        await asyncio.sleep(0)
        await target.transfer.close()
        with pytest.raises(TransferError, match="has stopped"):
            await fetching
        assert await target.freed() == "q1"
        assert target.transfer.failure
        with pytest.raises(TransferError, match="has stopped"):
            await fetch(target, "q2", params, ((0, 5),), prompt(6))
        assert await target.freed() == "q2"
        with pytest.raises(TransferError, match="has stopped"):
            await target.transfer.offer("q3", ((1,),), prompt(3))


async def test_a_dead_agent_is_an_error_for_whoever_waits(monkeypatch):
    """A defect of ours in the agent's thread must not become a request that never ends."""
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        monkeypatch.setattr(target.transfer.agent._event_loop.target, "handle", lambda event, now: 1 / 0)
        with pytest.raises(TransferError, match="has stopped"):
            await fetch(target, "q1", params, ((0, 5),), prompt(6))
        assert await target.freed() == "q1"
        assert target.transfer.failure


@pytest.mark.parametrize(("direction", "freed"), [(Direction.READ, ["q1"]), (Direction.WRITE, [])])
async def test_a_dead_agent_keeps_only_blocks_that_a_source_may_write_to(direction, freed):
    """Whoever reads has stopped reading; a source does not hear that we have ended, and goes on."""
    async with two_sides(direction=direction) as (source, target):
        # Nothing of it is computed yet, so the claim stays where it is.
        params = await source.transfer.promise("r1", prompt(7))
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        fetches = target.transfer.agent._event_loop.target._fetches
        while not any(fetch.reads for fetch in list(fetches.values())):
            await asyncio.sleep(0.01)
        await target.transfer.close()
        with pytest.raises(TransferError, match="has stopped"):
            await fetching
        await asyncio.sleep(0)
        assert [target.released.get_nowait() for _ in range(target.released.qsize())] == freed


async def test_late_notices_are_harmless():
    async with two_sides() as (_source, target):
        target.transfer._agent._take(FetchFailed("q1", TransferError("aborted", "late")))


async def test_what_is_forgone_is_free_at_the_source_before_its_lease_ends(caplog):
    async with two_sides() as (source, target):
        for request_id in ("r1", "r2"):  # a peer that is not known yet, and one that is
            params = await source.transfer.offer(request_id, ((1, 3),), prompt(7))
            target.transfer.decline(f"never-{request_id}", params)
            assert await source.freed() == request_id
            params = await source.transfer.offer("r3" + request_id, ((1, 3),), prompt(7))
            await fetch(target, "q" + request_id, params, ((0, 5),), prompt(6))
            assert await source.freed() == "r3" + request_id
        target.transfer.decline("never", {"nonsense": 1})
        while target.transfer._declining:
            await asyncio.sleep(0)
        ended = source.transfer.leases_ended
        # With a peer that is known, nothing may be fetched faster than it is aborted.
        assert ended["aborted"] + ended["done"] == ended.total() == 4
        assert ended["aborted"] >= 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum("the cache of request r1 was not read: aborted: at p0 epoch " in line for line in lines) == 1


async def test_only_who_was_given_the_reference_can_withdraw_it():
    async with two_sides() as (source, _target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        guess = params | {"kvferry": params["kvferry"] | {"lease_id": "0" * 32}}
        assert not source.transfer.withdraw(guess)
        assert not source.transfer.withdraw(params | {"remote_request_id": "r2"})
        with pytest.raises(TransferError, match="cannot be read"):
            source.transfer.withdraw({"lease": 1})
        assert source.transfer.withdraw(params)
        assert await source.freed() == "r1"
        assert not source.transfer.withdraw(params)
        assert dict(source.transfer.leases_ended) == {"withdrawn": 1}


async def test_a_failure_is_one_line_with_the_request_and_both_epochs(caplog):
    async with two_sides() as (source, target):
        params = await source.transfer.offer("r1", ((1, 3),), prompt(7))
        forged = params | {"remote_engine_id": "p0", "kvferry": params["kvferry"] | {"epoch": "x\nERROR forged"}}
        with pytest.raises(TransferError):
            await fetch(target, "q1", forged, ((0, 5),), prompt(6))
        with pytest.raises(TransferError):
            await fetch(target, "q2", {"kvferry": "\nERROR forged"}, ((0, 5),), prompt(6))
        source.transfer.abort("r1")
        await source.freed()
    lines = [
        record.getMessage() for record in caplog.records if record.name == "kvferry.embedded.transfer.agent_transfer"
    ]
    (first,) = [line for line in lines if "no cache for request q1: wrong_epoch: from 'p0' epoch 'x\\nERROR" in line]
    assert sum("no cache for request q2: malformed" in line for line in lines) == 1
    assert " to d0 epoch " in first
    assert not any("\n" in line for line in lines)


async def test_a_promise_is_fetched_once_it_is_kept():
    async with two_sides() as (source, target):
        params = await source.transfer.promise("r1", prompt(7))
        assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([], 7)
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        source.transfer.grow("r1", Grown(4, ((1,),)))
        source.transfer.grow("r1", Grown(7, ((1, 3),)))
        assert (await fetching).report.num_bytes == 6 * MODEL.bytes_per_token
        assert await source.freed() == "r1"
        source.transfer.grow("r1", Grown(7, ((1, 3),)))
        assert dict(source.transfer.leases_ended) == {"done": 1}


async def test_a_promise_is_not_over_before_all_is_computed():
    """The target wants fewer tokens than there will be, and has them before the last is computed."""
    async with two_sides() as (source, target):
        params = await source.transfer.promise("r1", prompt(7))
        source.transfer.grow("r1", Grown(6, ((1, 3),)))
        await fetch(target, "q1", params, ((0, 5),), prompt(6))
        # Whatever the source has to say to that, it says before it grants another one.
        other = await source.transfer.offer("r2", ((2,),), prompt(4))
        await fetch(target, "q2", other, ((6,),), prompt(3))
        assert await source.freed() == "r2"
        source.transfer.grow("r1", Grown(7, ((1, 3),)))
        assert await source.freed() == "r1"
        assert dict(source.transfer.leases_ended) == {"done": 2}


@pytest.mark.slow
async def test_a_promise_is_kept_longer_than_a_lease_lives():
    """Nothing is computed for so long that an offer of later ends."""
    async with two_sides(lease_s=3.0) as (source, target):
        params = await source.transfer.promise("r1", prompt(7))
        await source.transfer.offer("never", ((2,),), prompt(4))
        assert await source.freed() == "never"
        source.transfer.grow("r1", Grown(7, ((1, 3),)))
        await fetch(target, "q1", params, ((0, 5),), prompt(6))
        assert await source.freed() == "r1"


async def in_a_room(source):
    await promise_in_room(source, prompt(7))
    return in_room(source)


@pytest.mark.parametrize("ask", [offered, in_a_room])
@pytest.mark.slow
async def test_a_cache_is_kept_longer_than_a_lease_lives_while_its_reader_waits_for_blocks(ask):
    async with two_sides(lease_s=3.0) as (source, target):
        remote = await target.transfer.hold("q1", await ask(source))
        await source.transfer.offer("never", ((2,),), prompt(4))
        assert await source.freed() == "never"
        await target.transfer.fetch("q1", remote, ((0, 5),), prompt(6))
        assert await source.freed() == "r1"
        assert not held_by(target)


@pytest.mark.parametrize("ask", [offered, in_a_room])
async def test_what_is_not_wanted_any_more_is_not_kept(ask):
    async with two_sides() as (source, target):
        params = await ask(source)
        await target.transfer.hold("q1", params)
        target.transfer.decline("q1", params)
        assert await source.freed() == "r1"
        assert not held_by(target)


async def test_a_promise_that_is_taken_back_ends_the_fetch_of_it():
    async with two_sides() as (source, target):
        params = await source.transfer.promise("r1", prompt(7))
        fetching = asyncio.create_task(fetch(target, "q1", params, ((0, 5),), prompt(6)))
        source.transfer.grow("r1", Grown(4, ((1,),)))
        source.transfer.abort("r1")
        assert await source.freed() == "r1"
        with pytest.raises(TransferError):
            await fetching
        assert await target.freed() == "q1"
        assert dict(source.transfer.leases_ended) == {"withdrawn": 1}


async def test_a_dead_agent_promises_nothing_and_gives_back_what_it_had():
    async with two_sides() as (source, _target):
        await source.transfer.promise("r1", prompt(7))
        await source.transfer.close()
        assert await source.freed() == "r1"
        source.transfer.grow("r1", Grown(7, ((1, 3),)))
        with pytest.raises(TransferError, match="has stopped"):
            await source.transfer.promise("r2", prompt(7))


ROOM = 5


def in_room(source):
    host, _, port = source.transfer.agent.address.removeprefix("tcp://").rpartition(":")
    return room_params(ROOM, host, int(port))


async def promise_in_room(source, wanted, request_id="r1"):
    await source.transfer.promise(request_id, wanted, ROOM)
    source.transfer.grow(request_id, Grown(wanted.num_tokens, ((1, 3),)), FIRST)


@pytest.mark.parametrize(("num_tokens", "first"), [(7, FIRST), (6, None)])
async def test_a_room_is_fetched_from_whoever_listens_there(num_tokens, first):
    """Who wants all tokens hears which one follows. The claim may come before the promise."""
    async with two_sides() as (source, target):
        wanted = prompt(num_tokens)
        fetching = asyncio.create_task(fetch(target, "q1", in_room(source), ((0, 5),), wanted))
        await promise_in_room(source, prompt(7))
        received = await fetching
        assert (received.peer, received.report.tokens) == ("p0", num_tokens)
        assert received.report.first_token == first
        assert await source.freed() == "r1"
        # The next request in it is another one, whatever becomes of the one before.
        await promise_in_room(source, prompt(4), "r2")
        source.transfer.grow("r1", Grown(7, ((1, 3),)), FIRST)
        source.transfer.abort("r1")
        assert (await fetch(target, "q2", in_room(source), ((0,),), prompt(4))).report.tokens == 4
        assert await source.freed() == "r2"


async def test_a_room_with_another_prompt_is_refused():
    async with two_sides() as (source, target):
        await promise_in_room(source, Prompt.of([7, 101, 102, 103]))
        with pytest.raises(TransferError, match="the cache of another prompt") as caught:
            await fetch(target, "q1", in_room(source), ((0,),), prompt(3))
        assert caught.value.reason == "wrong_prompt"
        assert await target.freed() == "q1"


async def test_a_room_is_for_one_request_at_a_time():
    async with two_sides() as (source, _target):
        await promise_in_room(source, prompt(7))
        with pytest.raises(RequestError, match="draw a new one"):
            await promise_in_room(source, prompt(4), "r2")


@pytest.mark.slow
async def test_a_room_where_nobody_listens_is_an_error():
    async with two_sides() as (source, target):
        params = in_room(source)
        await source.transfer.close()
        with pytest.raises(TransferError, match="nothing listens at"):
            await target.transfer.hold("q1", params)


async def test_a_cache_that_cannot_be_declined_is_no_error_of_anybody(caplog, monkeypatch):
    """The agent may refuse: the source then waits for its lease to end."""

    def refuse(wanted):
        raise RequestError("a request with this name is under way", found=wanted.request_id)

    async with two_sides() as (source, target):
        params = await offered(source)
        monkeypatch.setattr(target.transfer.agent, "fetch", refuse)
        with caplog.at_level("INFO", "kvferry.embedded.transfer"):
            target.transfer.decline("never", params)
            (declining,) = target.transfer._declining
            await declining
        assert "request never was not declined: a request with this name is under way" in caplog.text


async def test_a_room_that_is_forgone_or_withdrawn_is_free_at_the_source():
    async with two_sides() as (source, target):
        for end in (
            lambda params: target.transfer.decline("never", params),
            lambda params: source.transfer.withdraw(params),
        ):
            await promise_in_room(source, prompt(7))
            end(in_room(source))
            assert await source.freed() == "r1"
