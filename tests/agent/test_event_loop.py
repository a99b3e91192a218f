"""What the thread of an agent does for a command of a session."""

from types import SimpleNamespace

from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.agent.loop.event_loop import EventLoop
from kvferry.session.commands import Disconnect
from kvferry.session.keys import PeerKey

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")


def test_a_peer_that_is_forgotten_is_not_probed_any_more():
    forgotten = []
    ear = SimpleNamespace(forget=lambda peer: forgotten.append(peer), disconnect=lambda peer: None)
    liveness = LivenessProbes()
    liveness.forget = forgotten.append
    turns = EventLoop(
        *[None] * 2,
        control=ear,
        transports=ear,
        staging=None,
        digester=None,
        liveness=liveness,
        wakeup=None,
        notify=None,
    )
    turns._execute_one(Disconnect(PEER))
    assert forgotten == [PEER, PEER]
