"""Defects that the simulation has found, each as the shortest playbook that shows it."""

from dataclasses import replace

import pytest
from playbook import play

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State, fingerprint
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.commands import BlocksReleased, Connect, Count, Disconnect, FetchFailed, Post, Send
from kvferry.session.events import (
    AbortRequest,
    AnswerArrived,
    FetchRequest,
    HoldRequest,
    PeerConnected,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0)
US = m.Party("d0", "epoch-9", 0)
SOURCE = m.Party("p0", "epoch-1", 0)
PEER = PeerKey("tcp://127.0.0.1:1", "p0", "epoch-1")
REFERENCE = m.Reference("p0", "epoch-1", "r1", "l1")
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 3),))
MODEL = attention(1, 2, 4, "float32", 4)


def session(model=MODEL, digest=DigestPolicy.OFF) -> TargetSession:
    layouts = describe(model, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)
    return TargetSession(TargetIdentity(US, "0.1.0", layouts, digest), TIMING)


def handshake(wanted, party=SOURCE, model=MODEL):
    """From the fetch to the claim, beginning at 0.0."""
    layout = describe(model, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
    peer = PeerKey(PEER.address, party.engine_id, party.epoch)
    offer = m.Offer(party, layout, (), m.Probe(0, 0, 0))
    return [
        (0.0, wanted, [Send]),
        (0.1, AnswerArrived(peer, m.Welcome(m.WIRE_VERSION, "0.1.0", party, 1, fingerprint(layout))), [Send]),
        (0.2, AnswerArrived(peer, offer), [Connect]),
        (0.3, PeerConnected(peer, "shm", "shm"), [Send]),
    ]


def test_a_handshake_that_nobody_waits_for_any_more_does_not_end_the_next_fetch():
    """The source had just not answered the first greeting, whose fetch was aborted: its deadline went on running."""
    target = session()
    play(
        target,
        [
            (0.0, WANTED, [Send]),
            (0.1, AbortRequest("q1"), [Count, FetchFailed, Send, BlocksReleased]),
            (0.2, AnswerArrived(PEER, m.Aborted("q1", PEER.epoch)), []),
        ],
    )
    due = target.next_deadline(0.2)
    assert due < TIMING.handshake_s
    play(target, [(5.0, Tick(), [Disconnect]), (9.0, replace(WANTED, request_id="q2"), [Send]), (9.1, Tick(), [])])
    assert target.num_open() == 1


def test_an_offer_that_answers_an_earlier_handshake_does_not_end_the_next_one():
    """Nothing had been announced yet to compare it with, so it counted as another layout than announced."""
    target = session()
    steps = handshake(WANTED)
    (late,) = [
        event for _, event, _ in steps if isinstance(event, AnswerArrived) and isinstance(event.message, m.Offer)
    ]
    play(target, [*steps[:2], (5.0, Tick(), [Count, FetchFailed, BlocksReleased, Disconnect])])
    play(target, [(5.1, replace(WANTED, request_id="q2"), [Send]), (5.2, late, [])])
    assert target.num_open() == 1


@pytest.mark.parametrize("renamed", ["p0", "p0-started-again"])
def test_whoever_answers_at_an_address_replaces_who_was_there(renamed):
    """Engines that take a new id at every start left a peer behind each time, with its memory mapped."""
    target = session()
    play(target, [*handshake(WANTED), (0.4, AbortRequest("q1"), [Count, FetchFailed, Send, BlocksReleased])])
    newer = m.Party(renamed, "epoch-2", 0)
    wanted = replace(WANTED, request_id="q2", reference=m.Reference(renamed, "epoch-2", "r1", "l1"))
    (_, (_, welcome, _), *_) = handshake(wanted, newer)
    play(target, [(1.0, wanted, [Send]), (1.1, welcome, [Send, Disconnect(PEER)])])


def test_a_peer_that_nothing_is_fetched_from_is_forgotten_one_day():
    """Engines that are gone for good, as after every change of a fleet's size, stayed peers, their memory mapped."""
    target = session()
    play(target, [*handshake(WANTED), (0.4, AbortRequest("q1"), [Count, FetchFailed, Send, BlocksReleased])])
    play(target, [(0.5, AnswerArrived(PEER, m.Aborted("q1", PEER.epoch)), []), (600.4, Tick(), [])])
    due = target.next_deadline(600.4)
    assert due == 0.5 + TIMING.idle_peer_s
    play(target, [(due, Tick(), [Disconnect(PEER)]), (700.0, replace(WANTED, request_id="q2"), [Send])])


def test_two_sources_may_have_leases_of_the_same_id():
    """Only one of them was held."""
    target = session()
    other = m.Party("p1", "epoch-1", 0)
    reference = m.Reference("p1", "epoch-1", "r1", "l1")
    met = [*handshake(WANTED)[1:3], (0.3, PeerConnected(PEER, "shm", "shm"), [])]
    play(target, [(0.0, HoldRequest(REFERENCE, (PEER.address,)), [Send]), *met])
    address = "tcp://127.0.0.1:2"
    peer = PeerKey(address, "p1", "epoch-1")
    layout = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", other, 1, fingerprint(layout))
    play(
        target,
        [
            (0.4, HoldRequest(reference, (address,)), [Send]),
            (0.4, AnswerArrived(peer, welcome), [Send]),
            (0.4, AnswerArrived(peer, m.Offer(other, layout, (), m.Probe(0, 0, 0))), [Connect]),
            (0.4, PeerConnected(peer, "shm", "shm"), []),
        ],
    )
    renewed = {command.peer for command in target.handle(Tick(), 1.5) if isinstance(command.message, m.Renew)}
    assert renewed == {PEER, peer}


@pytest.mark.parametrize("digest", DigestPolicy)
def test_a_cache_of_fixed_size_that_is_not_wanted_is_released_without_a_failure(digest):
    """Nothing is wanted, so there are no blocks for the state either."""
    state = State("ssm", "any", 4, (Axis("channel", 2),), per_token=False)
    model = CacheModel(1, (LayerCache(0, "mamba", (Kept(state, "channel"),)),))
    wanted = replace(WANTED, block_tables=((),), ranges=(TokenRange(0, 0),))
    steps = handshake(wanted, model=model)
    target = session(model, digest)
    (post,) = play(target, [*steps, (0.4, AnswerArrived(PEER, m.Grant("q1", ((3,),))), [Post])])
    assert len(post.copies) == 0
    commands = target.handle(TicketEnded(post.key, ""), 0.5)
    assert [type(command.message) for command in commands] == [m.Landed]
