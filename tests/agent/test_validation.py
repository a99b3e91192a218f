"""What an engine gets wrong is an error of its call. At the peer it would be a malformed frame, which ends all requests
of the two, and on the agent's thread it would end those of all peers."""

from dataclasses import replace

import msgspec
import pytest
from agent_support import NUM_TOKENS, SOURCE, SOURCE_TABLES, TARGET, TARGET_TABLES, leased, moved

from kvferry.errors import RequestError
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import LeaseEnded
from kvferry.session.events import HoldRequest, LeaseProgress, LeaseRequest
from kvferry.wire.messages import FirstToken, Reference

LEASE = LeaseRequest("r9", "l9", SOURCE_TABLES, NUM_TOKENS)
HALF = "\ud800"
LONG = "x" * 257
LEASES = {
    "no name": {"request_id": ""},
    "a long name": {"request_id": LONG},
    "half a character": {"lease_id": HALF},
    "no tokens there are": {"num_tokens": -1},
    "a block before the first": {"block_tables": ((3, -1),)},
    "no block of any cache": {"block_tables": ((1 << 70,),)},
    "half a block": {"block_tables": ((0.5,),)},
    "no token there is": {"first_token": FirstToken(-1)},
    "no likely token there is": {"first_token": FirstToken(1, -0.5, ((-1, -0.5),))},
    "too many likely tokens": {"first_token": FirstToken(1, -0.5, ((1, -0.5),) * 5000)},
}
FETCHES = {
    "no name": {"request_id": ""},
    "half a character": {"request_id": HALF},
    "an address that is none": {"addresses": (HALF,)},
    "no block of any cache": {"block_tables": ((1 << 70,),)},
    "far before the first block": {"block_tables": ((-(1 << 60),),)},
    "half a block": {"block_tables": ((8, 0.5, 5, 2),)},
    "backwards": {"ranges": (TokenRange(9, 3),)},
    "before the first token": {"ranges": (TokenRange(-4, 21),)},
    "more tokens than there can be": {"ranges": (TokenRange(0, 1 << 62),)},
}
NAMES = ("engine_id", "epoch", "request_id", "lease_id")


@pytest.fixture
def pair(make_rank):
    return make_rank("p0", SOURCE), make_rank("d0", TARGET)


def expect_unharmed(source, target):
    """Both still do what they are for."""
    moved(source, target)


def test_a_lease_that_cannot_travel_is_refused_where_it_is_asked_for(pair):
    source, _ = pair
    for wrong in LEASES.values():
        with pytest.raises(RequestError, match="cannot be sent"):
            source.agent.lease(replace(LEASE, **wrong))
    expect_unharmed(*pair)


def test_growth_that_cannot_travel_is_refused_where_it_is_told(pair):
    source, _ = pair
    source.agent.lease(replace(LEASE, is_growing=True))
    for wrong in (
        LeaseProgress("r9", ((-1,),), 4),
        LeaseProgress("r9", ((1 << 70,),), 4),
        LeaseProgress("r9", ((1,),), -4),
    ):
        with pytest.raises(RequestError, match="cannot be sent"):
            source.agent.grow(wrong)
    source.agent.withdraw("r9")
    source.next_notice(LeaseEnded)
    expect_unharmed(*pair)


def test_a_fetch_that_cannot_travel_is_refused_where_it_is_asked_for(pair):
    source, target = pair
    wanted = target.wanted(source, leased(source, "r9"), TARGET_TABLES, NUM_TOKENS, "q9")
    for wrong in FETCHES.values():
        with pytest.raises(RequestError):
            target.agent.fetch(replace(wanted, **wrong))
    for name in NAMES:
        for text in ("", LONG, HALF):
            reference = msgspec.structs.replace(wanted.reference, **{name: text})
            with pytest.raises(RequestError, match="a name cannot be sent"):
                target.agent.fetch(replace(wanted, reference=reference))
    expect_unharmed(*pair)


def test_a_hold_that_cannot_travel_is_refused_where_it_is_asked_for(pair):
    source, target = pair
    with pytest.raises(RequestError, match="a name cannot be sent"):
        target.agent.hold(HoldRequest(Reference("p0", HALF, "r9", "l9"), (source.agent.address,)))
    expect_unharmed(*pair)


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "tcp://localhost:1", "tcp://127.0.0.1", "tcp://1:99999", HALF])
def test_an_address_that_is_none_is_not_asked_for(pair, address):
    source, _ = pair
    with pytest.raises(RequestError, match="cannot be"):
        source.agent.locate(address)
    expect_unharmed(*pair)
