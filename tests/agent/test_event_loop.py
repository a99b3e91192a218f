"""What the thread of an agent does for a command of a session."""

from types import SimpleNamespace

from kvferry.agent.control.channel import ReceivedFrame
from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.agent.loop.event_loop import EventLoop
from kvferry.session.commands import Disconnect
from kvferry.session.keys import PeerKey

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")


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


def test_a_peer_that_is_forgotten_is_not_probed_any_more():
    forgotten = []
    loop_of(forgotten)._execute_one(Disconnect(PEER))
    assert forgotten == [PEER, PEER]


def test_a_word_of_a_peer_ends_its_probes():
    """Those that were not answered before are not in a row with later ones."""
    forgotten, heard = [], []
    target = SimpleNamespace(handle=lambda event, now: heard.append(event) or ())
    loop_of(forgotten, target)._handle_frame(ReceivedFrame((PEER,), "", b"nonsense"))
    assert forgotten == [PEER]
    assert [event.peer for event in heard] == [PEER]
