"""Sources that write over a transport by which the target can refuse them: what they wrote to is free once they are
disconnected, and they write again only when they know what was aborted."""

from dataclasses import replace

import pytest
import staging_cases as staged
import test_target_sharing as shared
from msgspec import structs
from playbook import play
from session_cases import (
    ABORT,
    HELLO,
    OFFER,
    OURS,
    PEER,
    PROBE,
    SOURCE,
    TARGET_LAYOUTS,
    TRANSPORTS,
    WELCOME,
    answer,
    failure,
)
from session_cases import TARGET as US
from test_target_push import CLEAN, GRANT, HANDSHAKE, TIMING, UNCLEAN, WANTED

from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    BlocksReleased,
    Cancel,
    Count,
    Disconnect,
    Fetched,
    FetchFailed,
    Post,
    Release,
    Revoke,
    Send,
)
from kvferry.session.events import AbortRequest, AnswerArrived, FetchRequest, HoldRequest, PeerGone, Tick, TicketEnded
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetSession
from kvferry.wire import messages as m

REVOCABLE = frozenset({"tcp"})
OVER_TCP = m.Reached("tcp", "tcp 3 GB/s")
GONE = PeerGone(PEER)
KEPT = [Count, FetchFailed, ABORT, Disconnect(PEER)]
REVOKED, FREE = Revoke(SOURCE), BlocksReleased("q1")
LOST = [*KEPT, REVOKED, FREE]
AGAIN = replace(WANTED, request_id="q2")


MEMORY = {"transports": TRANSPORTS, "probe": PROBE, "revocable": REVOCABLE}


def pushing() -> TargetSession:
    return TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, direction=Direction.WRITE, **MEMORY), TIMING)


def granted(reached=OVER_TCP):
    return [*HANDSHAKE[:3], (0.3, answer(reached), [Send]), (0.4, GRANT, [])]


def test_the_blocks_of_a_lost_source_are_free_once_it_is_disconnected():
    target = pushing()
    play(target, [*granted(), (0.6, GONE, LOST)])
    assert target.num_open() == 0
    assert not target.may_be_written()


def fall_silent(target):
    """What follows when nothing is heard of the source for seven seconds."""
    return [command for now in range(1, 8) for command in target.handle(Tick(), float(now))]


def test_a_source_that_falls_silent_is_lost_and_keeps_nothing():
    target = pushing()
    play(target, granted())
    commands = fall_silent(target)
    assert commands.index(FREE) == commands.index(REVOKED) + 1
    assert failure(commands).reason == "peer_lost"


@pytest.mark.parametrize(
    "reached", [m.Reached("nixl", ""), m.Reached("tcp", "", reaches_staging=True)], ids=["another-transport", "near"]
)
def test_a_source_that_cannot_be_refused_may_still_write(reached):
    target = pushing()
    play(target, [*granted(reached), (0.6, GONE, KEPT)])
    assert target.may_be_written()


def test_what_was_aborted_before_is_free_as_well():
    """One that lives is not refused: it acknowledges, as others do."""
    target = pushing()
    play(target, [*granted(), (0.5, AbortRequest("q1"), [Count, FetchFailed, ABORT])])
    other = replace(AGAIN, reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    play(target, [(0.6, other, [Send])])
    assert target.handle(GONE, 0.7)[-3:] == [REVOKED, FREE, BlocksReleased("q2")]


def met_again(target: TargetSession) -> m.TargetOffer:
    """Up to the offer of the target's memory."""
    play(target, [(7.1, AGAIN, [HELLO]), (7.2, answer(WELCOME), [Send(PEER, m.OfferRequest(US))])])
    return structs.replace(OURS.message, handshake=1)


def sent_by(commands):
    """Heartbeats aside."""
    sent = [each.message for each in commands if isinstance(each, Send)]
    return [message for message in sent if not isinstance(message, m.Renew)]


@pytest.mark.parametrize("acknowledged", [CLEAN, UNCLEAN], ids=["clean", "unclean"])
def test_it_writes_again_when_it_knows_what_was_aborted(acknowledged):
    """What it had written badly does not arrive either: nothing more is waited for."""
    target = pushing()
    play(target, granted())
    fall_silent(target)
    offer = met_again(target)
    play(target, [(7.3, answer(OFFER), []), (7.4, acknowledged, [Send(PEER, offer, access=SOURCE)])])


def test_until_then_it_gets_no_access():
    target = pushing()
    play(target, granted())
    fall_silent(target)
    met_again(target)
    play(target, [(7.3, answer(OFFER), [])])
    assert [sent_by(target.handle(Tick(), float(now))) for now in range(8, 11)] == [[ABORT.message]] * 3


def test_it_is_not_asked_for_ever_when_its_process_has_ended():
    target = pushing()
    play(target, [*granted(), (0.6, GONE, LOST), (0.7, GONE, [])])
    for now in range(1, 10):
        target.handle(Tick(), float(now))
    assert target.next_deadline(10.0) == float("inf")


def test_what_it_said_of_an_earlier_handshake_means_nothing():
    """It was connected by access that is void."""
    target = pushing()
    play(target, [*granted(), (0.6, GONE, LOST), (0.7, CLEAN, [Disconnect(PEER)])])
    offer = met_again(target)
    play(target, [(7.3, answer(OFFER), [Send(PEER, offer, access=SOURCE)]), (7.4, answer(OVER_TCP), [])])
    (claim,) = target.handle(answer(structs.replace(OVER_TCP, handshake=1)), 7.5)
    assert claim.message.handshake == 1


ELSEWHERE = PeerKey("tcp://[::1]:1", "p0", "epoch-1")
"""Another address of the same source."""


def from_elsewhere(message):
    return AnswerArrived(ELSEWHERE, message)


def test_a_source_that_is_known_by_two_addresses_is_lost_as_one():
    """It has one access: what it was to write by the other address is refused as well."""
    target = pushing()
    play(target, granted())
    offer = Send(ELSEWHERE, structs.replace(OURS.message, handshake=1), access=SOURCE)
    play(
        target,
        [
            (0.5, fetched_from_elsewhere(), [Send]),
            (0.6, from_elsewhere(WELCOME), [Send]),
            (0.7, from_elsewhere(OFFER), [offer]),
        ],
    )
    play(target, [(0.8, from_elsewhere(structs.replace(OVER_TCP, handshake=1)), [Send])])
    commands = target.handle(GONE, 0.9)
    assert [each.error.reason for each in commands if isinstance(each, FetchFailed)] == ["peer_lost"] * 2
    assert {each.peer for each in commands if isinstance(each, Disconnect)} == {PEER, ELSEWHERE}
    last_lost = max(number for number, each in enumerate(commands) if isinstance(each, FetchFailed))
    assert last_lost < commands.index(REVOKED) < min(commands.index(FREE), commands.index(BlocksReleased("q2")))
    assert not target.may_be_written()


def fetched_from_elsewhere():
    reference = m.Reference("p0", "epoch-1", "r2", "l2")
    return FetchRequest("q2", reference, (ELSEWHERE.address,), WANTED.block_tables, WANTED.ranges)


def test_a_source_that_comes_back_at_another_address_acknowledges_there():
    target = pushing()
    play(target, granted())
    fall_silent(target)
    play(target, [(7.1, fetched_from_elsewhere(), [Send]), (7.2, from_elsewhere(WELCOME), [Send])])
    play(target, [(7.3, from_elsewhere(OFFER), [])])
    abort = Send(ELSEWHERE, ABORT.message)
    assert abort in target.handle(Tick(), 8.0)
    offer = Send(ELSEWHERE, structs.replace(OURS.message, handshake=1), access=SOURCE)
    assert offer in target.handle(from_elsewhere(CLEAN.message), 8.1)


def test_what_cannot_be_revoked_is_acknowledged_meanwhile():
    """One claim may be written over another transport than the next."""
    target = pushing()
    play(target, granted(m.Reached("nixl", "")))
    fall_silent(target)
    play(target, [(7.1, AGAIN, [HELLO]), (7.2, answer(WELCOME), [Send]), (7.3, answer(OFFER), [Send])])
    play(target, [(7.4, answer(structs.replace(OVER_TCP, handshake=1)), [Send])])
    commands = [command for now in range(8, 16) for command in target.handle(Tick(), float(now))]
    assert BlocksReleased("q2") in commands
    assert FREE not in commands
    third = replace(WANTED, request_id="q3")
    play(target, [(16.0, third, [HELLO]), (16.1, answer(WELCOME), [Send]), (16.2, answer(OFFER), [])])
    assert FREE in target.handle(CLEAN, 16.3)


def test_access_that_is_revoked_is_revoked_once():
    """Whoever is lost again before it has acknowledged had none."""
    target = pushing()
    play(target, granted())
    assert REVOKED in fall_silent(target)
    play(target, [(7.1, AGAIN, [HELLO])])
    again = target.handle(GONE, 7.2)
    assert Disconnect(PEER) in again
    assert REVOKED not in again


def test_a_source_that_has_written_all_keeps_its_access():
    """Whatever becomes of the request: nothing of it is under way."""
    target = pushing()
    play(target, [*granted(), (0.5, answer(m.Written("q1", 1536, 12)), [])])
    play(target, [(0.6, AbortRequest("q1"), [Count, FetchFailed, ABORT, FREE])])
    unmet = m.Refusal(m.Reason.UNREACHABLE, "the target has not been reached", "", "", "")
    play(target, [(0.7, answer(unmet), [Disconnect(PEER)])])


def test_a_wait_for_access_is_not_a_handshake_that_takes_long():
    """It begins when it can."""
    target = pushing()
    play(target, granted())
    fall_silent(target)
    offer = met_again(target)
    play(target, [(7.3, answer(OFFER), [])])
    assert Disconnect(PEER) not in target.handle(Tick(), 7.0 + TIMING.handshake_s)
    play(target, [(12.1, CLEAN, [Send(PEER, offer, access=SOURCE)])])
    assert Disconnect(PEER) not in target.handle(Tick(), 17.0)
    assert Disconnect(PEER) in target.handle(Tick(), 12.2 + TIMING.handshake_s)


def test_requests_that_wait_for_a_source_lost_at_another_address_meet_it_again():
    target = pushing()
    play(target, granted())
    reference = m.Reference("p0", "epoch-1", "r2", "l2")
    play(target, [(0.5, HoldRequest(reference, (ELSEWHERE.address,)), [Send])])
    play(target, [(0.6, from_elsewhere(WELCOME), [Send]), (0.7, from_elsewhere(OFFER), [Send])])
    target.handle(GONE, 0.8)
    hellos = [each for now in range(1, 9) for each in target.handle(Tick(), float(now)) if isinstance(each, Send)]
    assert ELSEWHERE in {each.peer for each in hellos if isinstance(each.message, m.Hello)}


def test_a_source_that_writes_nothing_keeps_its_access():
    """It is met again without a test of what it has tested."""
    target = pushing()
    play(target, [*granted(), (0.5, answer(m.Written("q1", 1536, 12)), []), (0.6, answer(m.Valid("q1")), [Fetched])])
    idle = [each for now in range(1, 1300) for each in target.handle(Tick(), float(now))]
    assert Disconnect(PEER) in idle
    assert REVOKED not in idle


def test_what_cannot_be_revoked_withholds_nothing():
    """Its blocks wait for themselves."""
    target = pushing()
    play(target, granted(m.Reached("nixl", "")))
    fall_silent(target)
    offer = met_again(target)
    play(target, [(7.3, answer(OFFER), [Send(PEER, offer, access=SOURCE)])])


def test_slots_of_a_lost_source_are_free_as_well():
    policy = StagingPolicy((Strategy.PACK,), staged.STRETCH_BYTES)
    target = TargetSession(TargetIdentity(US, "0.1.0", staged.TARGET_LAYOUTS, staging=policy, **MEMORY), staged.TIMING)
    play(target, [*staged.OFFERING, (0.4, answer(OVER_TCP), [Send(PEER, staged.CLAIM)])])
    play(
        target,
        [
            (0.5, answer(m.Grant("q1", ())), [*staged.WINDOW, staged.acquire(3)]),
            (0.6, staged.acquired(0), [staged.pack(0)]),
        ],
    )
    commands = target.handle(GONE, 0.7)
    assert commands[-4:] == [FREE, Disconnect(PEER), REVOKED, Release(staged.key(0))]
    assert target.num_open() == 0


def test_a_shared_read_still_waits_for_our_own_ticket():
    target, _ = shared.target(revocable=REVOCABLE)
    play(target, [(0.4, answer(OVER_TCP), [shared.CLAIM]), (0.5, shared.GRANT, [Post])])
    play(target, [(0.6, GONE, [Count, FetchFailed, Cancel, ABORT, Disconnect(PEER), REVOKED])])
    assert target.num_open() == 1
    play(target, [(0.7, TicketEnded(shared.KEY, "cancelled"), [FREE])])
