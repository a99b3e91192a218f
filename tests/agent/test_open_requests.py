"""No request is leased or fetched twice at a time, and no two attempts have the same name."""

import pytest

from kvferry.agent.requests import MAX_NAME_LENGTH, OpenRequests
from kvferry.errors import RequestError, TransferError
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, FetchReport, LeaseEnded

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
