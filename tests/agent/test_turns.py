"""What the thread of an agent does for a command of a session."""

from types import SimpleNamespace

from kvferry.agent.control.liveness import Knocks
from kvferry.agent.loop.turns import Turns
from kvferry.session.commands import Disconnect
from kvferry.session.keys import PeerKey

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")


def test_nobody_knocks_any_more_at_a_peer_that_is_forgotten():
    forgotten = []
    ear = SimpleNamespace(forget=lambda peer: forgotten.append(peer), disconnect=lambda peer: None)
    knocks = Knocks()
    knocks.forget = forgotten.append
    turns = Turns(
        *[None] * 2, control=ear, carrier=ear, stager=None, digester=None, knocks=knocks, wake=None, notify=None
    )
    turns._carry_out(Disconnect(PEER))
    assert forgotten == [PEER, PEER]
