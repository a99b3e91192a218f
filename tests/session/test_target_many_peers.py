"""A target that has met very many sources looks at those that it waits for, and not at all others with them."""

import pytest
from playbook import play

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.commands import BlocksReleased, Connect, Count, FetchFailed, Send
from kvferry.session.events import AbortRequest, AnswerArrived, FetchRequest, PeerConnected, Tick
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.peers.peer import Peer
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0)
LAYOUTS = describe(attention(1, 2, 4, "float32", 4), EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)
US = m.Party("d0", "epoch-9", 0)


def meet(target: TargetSession, number: int) -> None:
    """Up to the claim of a fetch, which is not answered."""
    party = m.Party(f"p{number}", "epoch-1", 0)
    peer = PeerKey(f"tcp://127.0.0.1:{number + 1}", party.engine_id, party.epoch)
    reference = m.Reference(party.engine_id, party.epoch, "r", "l")
    wanted = FetchRequest(f"q{number}", reference, (peer.address,), ((0,),), (TokenRange(0, 3),))
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", party, 1, fingerprint(LAYOUTS[0]))
    offer = m.Offer(party, LAYOUTS[0], (), m.Probe(0, 0, 0))
    steps = [(0.1, AnswerArrived(peer, welcome), [Send]), (0.2, AnswerArrived(peer, offer), [Connect])]
    play(target, [(0.0, wanted, [Send]), *steps, (0.3, PeerConnected(peer, "shm", "shm"), [Send])])
    if number:
        aborted = AnswerArrived(peer, m.Aborted(wanted.request_id, peer.epoch))
        over = [Count, FetchFailed, Send, BlocksReleased]
        play(target, [(0.4, AbortRequest(wanted.request_id), over), (0.5, aborted, [])])


def num_looks(monkeypatch: pytest.MonkeyPatch, num_peers: int) -> int:
    """At peers, in some iterations of the agent, while one of so many is to answer a claim."""
    target = TargetSession(TargetIdentity(US, "0.1.0", LAYOUTS, DigestPolicy.OFF), TIMING)
    # The last one leaves its fetch open.
    for number in reversed(range(num_peers)):
        meet(target, number)
    target.handle(Tick(), 0.6)
    looks, is_ready = [], Peer.ready.fget
    with monkeypatch.context() as patched:
        patched.setattr(Peer, "ready", property(lambda peer: looks.append(peer) or is_ready(peer)))
        for step in range(10):
            now = 0.6 + step / 100
            target.handle(Tick(), now)
            target.next_deadline(now)
            target.may_be_written()
    return len(looks)


def test_ten_times_as_many_peers_are_not_more_work(monkeypatch):
    assert num_looks(monkeypatch, 100) == num_looks(monkeypatch, 10) <= 50
