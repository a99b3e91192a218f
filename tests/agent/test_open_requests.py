"""No request is leased or fetched twice at a time, and no two attempts have the same name."""

import asyncio

import pytest

from kvferry.agent import async_agent
from kvferry.agent.async_agent import AsyncAgent
from kvferry.agent.requests import MAX_NAME_LENGTH, OpenRequests
from kvferry.errors import RequestError, TransferError
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, FetchReport, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.wire.messages import Reference

REPORT = FetchReport(39, 4096, 1, "tcp", "tcp 1 GB/s", "direct", {"wire": 0.1})
FAILED = FetchFailed("r", TransferError("aborted", "late"))


@pytest.fixture
def heard() -> list:
    return []


@pytest.fixture
def requests(heard) -> OpenRequests:
    return OpenRequests(heard.append)


def test_a_lease_is_open_until_its_blocks_are_free(requests, heard):
    requests.lease("r")
    for _ in range(2):
        with pytest.raises(RequestError, match="has a lease already; found: r; expected: LeaseEnded"):
            requests.lease("r")
    requests.fetch("r")
    requests.lease("s")
    requests.notify(LeaseEnded("r", "done"))
    requests.lease("r")
    assert heard == [LeaseEnded("r", "done")]


@pytest.mark.parametrize("end", [[Fetched("r", REPORT)], [FAILED, BlocksReleased("r")]])
def test_a_fetch_is_open_until_its_blocks_are_free(requests, heard, end):
    requests.fetch("r")
    requests.lease("r")
    for notice in end[:-1]:
        requests.notify(notice)
    with pytest.raises(RequestError, match="has a fetch already"):
        requests.fetch("r")
    requests.notify(end[-1])
    requests.fetch("r")
    assert heard == end


def test_no_attempt_is_called_like_another(requests):
    names = []
    for _ in range(3):
        for request_id in ("r", "r" * MAX_NAME_LENGTH):
            names.append(requests.fetch(request_id))
            requests.notify(BlocksReleased(request_id))
    assert len(set(names)) == 6
    assert max(map(len, names)) == MAX_NAME_LENGTH


def test_the_engine_may_ask_again_as_soon_as_it_hears():
    requests = OpenRequests(lambda notice: requests.lease("r"))
    requests.lease("r")
    requests.notify(LeaseEnded("r", "done"))
    with pytest.raises(RequestError):
        requests.lease("r")


def test_the_last_word_passes(requests, heard):
    requests.notify(AgentStopped())
    assert heard == [AgentStopped()]


class OnItsThread:
    """What an agent does with names, on a thread that is ahead of the loop."""

    written_ids = frozenset()

    def __init__(self, config, cache, notify):
        self.requests = OpenRequests(notify)
        self.asked = []

    def start(self, addresses, data_parallel_size):
        """Nothing."""

    def fetch(self, wanted):
        self.requests.fetch(wanted.request_id)
        self.asked.append(wanted.block_tables)

    def lease(self, wanted):
        self.requests.lease(wanted.request_id)

    def abort(self, request_id):
        """Too late."""


def fetch_into(block: int) -> FetchRequest:
    reference = Reference("p", "e", "r", "l")
    return FetchRequest("r", reference, ("tcp://127.0.0.1:1",), ((block,),), (TokenRange(0, 3),))


async def test_what_an_attempt_is_told_late_is_not_taken_for_the_next_ones(monkeypatch):
    monkeypatch.setattr(async_agent, "open_agent", OnItsThread)
    freed = []
    agent = AsyncAgent(None, None, freed.append)
    await agent.start()
    first = asyncio.create_task(agent.fetch(fetch_into(1)))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    # Too late: the agent has said that it is done, and the loop has not heard of it.
    agent.agent.requests.notify(Fetched("r", REPORT))
    with pytest.raises(RequestError, match="has a fetch already"):
        await agent.fetch(fetch_into(2))
    await asyncio.sleep(0)
    assert freed == [BlocksReleased("r")]
    second = asyncio.create_task(agent.fetch(fetch_into(2)))
    await asyncio.sleep(0)
    agent.agent.requests.notify(Fetched("r", REPORT))
    assert await second == REPORT
    assert agent.agent.asked == [((1,),), ((2,),)]


async def test_a_lease_is_another_ones_until_the_loop_has_heard_of_its_end(monkeypatch):
    monkeypatch.setattr(async_agent, "open_agent", OnItsThread)
    freed = []
    agent = AsyncAgent(None, None, freed.append)
    await agent.start()
    wanted = LeaseRequest("r", "l", ((1,),), 4)
    agent.lease(wanted)
    agent.agent.requests.notify(LeaseEnded("r", "done"))
    with pytest.raises(RequestError, match="has a lease already"):
        agent.lease(wanted)
    await asyncio.sleep(0)
    agent.lease(wanted)
    assert freed == [LeaseEnded("r", "done")]
