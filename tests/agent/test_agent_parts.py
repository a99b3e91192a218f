"""Parts of the agent that a healthy conversation never shows."""

import pytest

from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.loop.wakeup import Wakeup
from kvferry.plan.description.describe import EngineShape
from kvferry.session.events import Tick, TicketEnded
from kvferry.session.keys import PeerKey, ReadKey

SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")


@pytest.fixture
def steps(make_rank, monkeypatch):
    """An agent that does nothing but say in which order it would."""
    rank = make_rank("p0", SHAPE)
    rank.agent.close()
    order = []
    monkeypatch.setattr(rank.agent._event_loop.transports, "poll", lambda: order.append("poll") or [])
    monkeypatch.setattr(rank.agent._event_loop.control, "receive", lambda wait_s: order.append("receive") or [])
    monkeypatch.setattr(rank.agent._event_loop.wakeup, "consume", lambda: False)
    monkeypatch.setattr(rank.agent._event_loop.target, "handle", lambda event, now: order.append(type(event)) or [])
    return rank.agent, order


@pytest.mark.parametrize(
    ("long_s", "expected"), [(-1.0, ["receive", "poll", "receive", Tick]), (60.0, ["receive", "poll", Tick])]
)
def test_answers_that_came_during_a_long_poll_are_read_before_time_passes(steps, monkeypatch, long_s, expected):
    """Else a long copy would make a peer look silent that has answered."""
    monkeypatch.setattr("kvferry.agent.loop.event_loop.LONG_ITERATION_S", long_s)
    agent, order = steps
    agent._event_loop.run_once(0.0)
    assert order == expected


@pytest.mark.parametrize(("is_rung", "expected"), [(False, ["receive", "poll"]), (True, ["receive", "poll", Tick])])
def test_between_two_deadlines_only_transports_get_on_as_long_as_nothing_comes_in(
    steps, monkeypatch, is_rung, expected
):
    agent, order = steps
    agent._event_loop.quiet_until = float("inf")
    monkeypatch.setattr(agent._event_loop.wakeup, "consume", lambda: is_rung)
    agent._event_loop.run_once(0.0)
    assert order == expected
    assert (agent._event_loop.quiet_until > 0) is not is_rung


def test_what_a_transport_has_ended_meanwhile_is_followed_by_a_whole_turn(steps, monkeypatch):
    agent, order = steps
    agent._event_loop.quiet_until = float("inf")
    ended = [TicketEnded(ReadKey("q1", PeerKey("tcp://127.0.0.1:1", "p0", "e1")), "")]
    monkeypatch.setattr(agent._event_loop.transports, "poll", lambda: ended)
    assert agent._event_loop.run_once(1.0) == 0.0
    assert order == ["receive", TicketEnded]


def test_an_address_that_makes_no_sense_is_not_sent_to():
    channel = ControlChannel("127.0.0.1", 0)
    try:
        assert channel.send(PeerKey("tcp://127.0.0.1:80\n", "p0", "e1"), b"frame") is False
        assert channel.send(PeerKey(channel.address, "p0", "e1"), b"frame") is True
    finally:
        channel.close()


def test_a_bell_may_be_rung_after_it_was_closed():
    wakeup = Wakeup()
    assert wakeup.consume() is False
    wakeup.notify()
    assert wakeup.consume() is True
    wakeup.close()
    wakeup.notify()
    wakeup.close()
