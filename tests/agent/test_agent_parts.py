"""Parts of the agent that a healthy conversation never shows."""

import pytest

from kvferry.agent.control import ControlChannel
from kvferry.agent.wake import Wake
from kvferry.errors import RequestError
from kvferry.plan.describe import EngineShape
from kvferry.session.events import LeaseWanted, PeerKey, Tick

SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")


def test_answers_that_came_during_a_long_poll_are_read_before_time_passes(make_rank, monkeypatch):
    """Else a long copy would make a peer look silent that has answered."""
    agent = make_rank("p0", SHAPE).agent
    agent.close()
    order = []
    monkeypatch.setattr(agent._carrier, "poll", lambda: order.append("poll") or [])
    monkeypatch.setattr(agent._control, "receive", lambda wait_s: order.append("receive") or [])
    monkeypatch.setattr(agent._wake, "rang", lambda: False)
    monkeypatch.setattr(agent._target, "handle", lambda event, now: order.append(type(event)) or [])
    agent._turn(0.0)
    assert order == ["receive", "poll", "receive", Tick]


@pytest.mark.parametrize("request_id", ["", "x" * 257], ids=["empty", "too long"])
def test_a_request_id_that_cannot_travel_is_refused_here(make_rank, request_id):
    """At the peer it would be a malformed frame, and end every other request with it."""
    rank = make_rank("p0", SHAPE)
    reference = rank.agent.lease(LeaseWanted("r1", "l1", ((0,),), 3))
    with pytest.raises(RequestError, match="cannot travel"):
        rank.agent.lease(LeaseWanted(request_id, "l2", ((0,),), 3))
    with pytest.raises(RequestError, match="cannot travel"):
        rank.agent.fetch(rank.wanted(rank, reference, ((1,),), 3, request_id))


def test_an_address_that_makes_no_sense_is_not_sent_to():
    channel = ControlChannel("127.0.0.1", 0)
    try:
        assert channel.send(PeerKey("tcp://127.0.0.1:80\n", "p0", "e1"), b"frame") is False
        assert channel.send(PeerKey(channel.address, "p0", "e1"), b"frame") is True
    finally:
        channel.close()


def test_a_bell_may_be_rung_after_it_was_closed():
    bell = Wake()
    assert bell.rang() is False
    bell.ring()
    assert bell.rang() is True
    bell.close()
    bell.ring()
    bell.close()
