"""What the thread of an agent does for a command of a session."""

from types import SimpleNamespace

import pytest
from msgspec import structs

from kvferry.agent.control.channel import ReceivedFrame
from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.agent.loop.event_loop import IDLE_POLL_S, QUIET_S, EventLoop
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Disconnect, Revoke, Send
from kvferry.session.keys import PeerKey
from kvferry.wire.codec import decode
from kvferry.wire.messages import Abort, Claim, Party, Probe, Reference, TargetOffer, TransportOffer

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")
TARGET_LAYOUTS = describe(attention(1, 1, 1, "int8", 1), EngineShape(1, 1, 1, 1, "token-major"), 1 << 20)


def loop_of(forgotten: list[PeerKey], target=None) -> EventLoop:
    """With nothing but what forgets peers; `target` is its session."""
    ear = SimpleNamespace(forget=lambda peer: forgotten.append(peer), disconnect=lambda peer: None)
    liveness = LivenessProbes()
    liveness.forget = forgotten.append
    return EventLoop(
        None,
        target,
        control=ear,
        transports=ear,
        staging=None,
        digester=None,
        liveness=liveness,
        wakeup=None,
        notify=None,
    )


@pytest.mark.parametrize(("must_be_polled", "longest_s"), [(True, IDLE_POLL_S), (False, QUIET_S)])
def test_transports_are_polled_often_only_where_nobody_says_that_a_ticket_has_ended(must_be_polled, longest_s):
    """Each poll takes the interpreter from the engine."""
    idle = SimpleNamespace(handle=lambda event, now: (), next_deadline=lambda *_: float("inf"))
    idle.may_be_read = lambda now: False
    idle.may_be_written = lambda: False
    loop = loop_of([], idle)
    loop.source, loop.wakeup = idle, SimpleNamespace(consume=lambda: False)
    loop.digester = SimpleNamespace(busy=False, run=lambda num_bytes: [])
    loop.staging = SimpleNamespace(busy=False, is_changed=False, poll=list)
    loop.control.receive, loop.control.refused_by, loop.control.take_counts = lambda wait_s: [], list, dict
    loop.transports.poll, loop.transports.progress_interval_s = list, float("inf")
    loop.transports.busy, loop.transports.must_poll_now = True, False
    loop.transports.must_be_polled = must_be_polled
    for _ in range(2):
        assert loop.run_once(0.0) == pytest.approx(longest_s, rel=0.5)


def test_a_peer_that_is_forgotten_is_not_probed_any_more():
    forgotten = []
    loop_of(forgotten)._execute_one(Disconnect(PEER))
    assert forgotten == [PEER, PEER]


def test_a_claim_that_no_source_would_read_is_refused_here():
    """A million blocks of one token: its source would end the connection, with everything else on it."""
    sent, heard = [], []
    target = SimpleNamespace(handle=lambda event, now: heard.append(event) or ())
    loop = loop_of([], target)
    loop.control.send = lambda peer, frame: sent.append(len(frame)) or True
    claim = Claim(Party("d0", "e1", 0), "q1", Reference("p0", "e1", "r1", "l1"), 9, (0,), direction=Direction.WRITE)
    for num_blocks in (500_000, 1_000_000):
        tables = (tuple(range(100_000, 100_000 + num_blocks)),)
        loop._execute_one(Send(PEER, structs.replace(claim, block_tables=tables)))
    assert len(sent) == 1
    (event,) = heard
    assert (event.message.reason, event.message.claim_id) == ("out_of_range", "q1")
    assert "at most 4194304 bytes" in event.message.expected


def test_a_source_is_offered_memory_by_access_of_its_own():
    """What it may write must end when it is lost, and not before."""
    sent, loop, source = [], loop_of([]), Party("p0", "e1", 0)
    own, everybodys = (TransportOffer("tcp", b"for one", ""),), (TransportOffer("tcp", b"for all", ""),)
    loop.transports.with_access = lambda offers, who: own if (offers, who) == (everybodys, source) else ()
    loop.control.send = lambda peer, frame: sent.append(decode(frame)) or True
    offer = TargetOffer(Party("d0", "e1", 0), TARGET_LAYOUTS, everybodys, Probe(0, 0, 0))
    loop._execute_one(Send(PEER, offer, access=source))
    assert sent == [structs.replace(offer, transports=own)]


def test_access_is_taken_where_the_session_says_so():
    taken, loop, source = [], loop_of([]), Party("p0", "e1", 0)
    loop.transports.revoke = taken.append
    loop._execute_one(Revoke(source))
    assert taken == [source]


def test_a_message_that_is_sent_anew_goes_over_a_new_connection():
    done = []
    loop = loop_of(done)
    loop.control.send = lambda peer, frame: done.append("sent") or True
    abort = Abort(Party("d0", "e1", 0), "q1", "l1")
    loop._execute_one(Send(PEER, abort))
    loop._execute_one(Send(PEER, abort, is_anew=True))
    assert done == ["sent", PEER, "sent"]


def test_a_word_of_a_peer_ends_its_probes():
    """Those that were not answered before are not in a row with later ones."""
    forgotten, heard = [], []
    target = SimpleNamespace(handle=lambda event, now: heard.append(event) or ())
    loop_of(forgotten, target)._handle_frame(ReceivedFrame((PEER,), "", b"nonsense"))
    assert forgotten == [PEER]
    assert [event.peer for event in heard] == [PEER]
