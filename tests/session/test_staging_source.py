"""Staging memory of a source: whose a slot is at every moment, whatever is late, repeated or broken."""

from dataclasses import replace

import pytest
from msgspec import structs
from playbook import play
from session_cases import OTHER_TARGET, said
from staging_cases import (
    ABORT_SAID,
    ARENA,
    CLAIM,
    CLAIMED,
    CLEAN,
    LEASE,
    NUM_TOKENS,
    OWN,
    OWN_ACQUIRE,
    STRETCH_BYTES,
    TARGET_OFFER,
    TIMING,
    UNCLEAN,
    VALID,
    asked,
    grown,
    own,
    reasons,
    source,
)

from kvferry.plan.programs.copies import Direction
from kvferry.plan.slots import slot_plan
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    Acquire,
    Cancel,
    Connect,
    Count,
    Disconnect,
    LeaseEnded,
    Post,
    Release,
    Reply,
    Stage,
)
from kvferry.session.events import Acquired, LeaseWithdrawn, PeerConnected, Staged, Tick, TicketEnded
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.wire import messages as m
from kvferry.wire.codec import decode, encode

GATHERING = [*CLAIMED, (1, said(asked(0)), [OWN_ACQUIRE]), (1, Acquired(own(0), OWN), [Stage])]
WRITING = [*GATHERING, (2, Staged(own(0), ""), [Post])]
PACKED = m.Packed("q1", 0, 0)


def test_a_source_plans_the_first_slot_before_it_is_asked_for(session, planned):
    play(session, [*CLAIMED, (0, Tick(), []), (0, Tick(), [])])
    assert planned == [0]
    play(session, [(1, said(asked(0)), [OWN_ACQUIRE])])
    assert planned == [0]


def test_a_source_does_not_plan_what_is_not_computed_or_not_wanted_any_more(planned):
    growing, withdrawn = source(), source()
    play(growing, [(0, replace(LEASE, is_growing=True), []), *CLAIMED[1:3]])
    play(growing, [(0, said(CLAIM), [Reply("x", m.Grant("q1", (), NUM_TOKENS))]), (0, Tick(), [])])
    play(withdrawn, [*CLAIMED, (0, LeaseWithdrawn("r1"), [LeaseEnded, Reply, Count]), (0, Tick(), [])])
    assert planned == []


def test_a_source_prepares_a_claim_once(session, planned):
    play(session, [(0, replace(LEASE, is_growing=True), []), (0, grown(4), []), *CLAIMED[1:3]])
    play(session, [(0, said(CLAIM), [Reply]), (0, Tick(), []), (1, grown(8), [Reply]), (1, Tick(), [])])
    assert planned == [0]


def test_what_a_source_cannot_plan_is_told_to_who_asks_for_it(session):
    elsewhere = structs.replace(CLAIM, block_tables=((99, 0, 5, 2),))
    play(session, [*CLAIMED[:-1], (0, said(elsewhere), [Reply("x", m.Grant("q1", ()))]), (0, Tick(), [])])
    refusal = play(session, [(1, said(asked(0)), [Reply, Count])])[0].message
    assert refusal.reason == m.Reason.OUT_OF_RANGE


def test_a_slot_is_gathered_and_written_once_however_often_it_is_asked_for(session):
    (post,) = play(session, WRITING)
    assert (post.key, post.direction, len(post.copies)) == (own(0), Direction.WRITE, 1)
    assert (int(post.copies.source[0]), int(post.copies.target[0])) == (OWN, ARENA)
    play(session, [(3, said(asked(0, address=7), "y"), [Reply("y", m.Renewed(()))])])
    play(session, [(4, TicketEnded(own(0), ""), [Release(own(0)), Reply("y", PACKED)])])
    play(session, [(5, said(asked(0, address=9)), [Reply("x", PACKED)]), (5, said(CLAIM), [Reply])])


def test_a_slot_that_waits_for_its_turn_is_queued():
    play(source(), [*CLAIMED, (1, said(asked(0)), [OWN_ACQUIRE]), (2, said(asked(0)), [Reply("x", m.Queued("q1"))])])


def test_who_waits_behind_a_write_that_hangs_is_not_told_to_have_patience(session):
    """Found by simulation: as long as it was, the fetch had no deadline, and so nobody lost interest in the write."""
    play(session, [*WRITING, (3, said(asked(1)), [Acquire]), (21, said(asked(1)), [Reply("x", m.Queued("q1"))])])
    play(session, [(23, said(asked(1)), [Reply("x", m.Renewed(()))])])


@pytest.mark.parametrize("is_peer_slot", [False, True])
def test_that_gathers_into_other_targets_slots_get_on_is_no_reason_for_patience(session, is_peer_slot):
    """They take none of our slots. That others of ours get on is one."""
    play(session, [*WRITING, (3, said(asked(1)), [Acquire])])
    other, lease = m.Party("d9", "epoch-9", 0), m.Reference("p0", "epoch-1", "r2", "l2")
    claim = structs.replace(CLAIM, party=other, claim_id="q9", reference=lease)
    play(session, [(3, replace(LEASE, request_id="r2", lease_id="l2"), [])])
    play(session, [(3, said(structs.replace(TARGET_OFFER, party=other), "y"), [Connect])])
    play(session, [(3, PeerConnected(other, "shm", "shm"), [Reply]), (3, said(claim, "y"), [Reply])])
    slot, status = SlotKey(ClaimKey("l2", other, "q9"), 0, 0), m.Renewed(()) if is_peer_slot else m.Queued("q1")
    play(session, [(10, said(m.Pack(other, "q9", "l2", 0, 0, ARENA), "y"), [Acquire])])
    session.handle(Acquired(slot, OWN, is_peer_slot=is_peer_slot), 11)
    session.handle(Staged(slot, ""), 12)
    play(session, [(25, said(asked(1)), [Reply("x", status)])])


@pytest.mark.parametrize(("stretch", "number"), [(4, 0), (1 << 40, 0), (0, 1)])
def test_a_slot_that_does_not_exist_is_refused(session, stretch, number):
    play(session, CLAIMED)
    assert reasons(session.handle(said(asked(stretch, number)), 1.0)) == ["out_of_range"]


def test_slots_of_nothing_are_refused(session):
    assert reasons(session.handle(said(asked(0)), 0.0)) == ["unknown_lease"]
    play(session, CLAIMED[:3])
    assert reasons(session.handle(said(asked(0)), 0.0)) == ["not_claimed"]
    assert reasons(session.handle(said(m.Claim(*fields_with(slot_bytes=0))), 0.0)) == ["malformed"]


def test_a_claim_of_more_slots_than_anybody_needs_gets_none(monkeypatch):
    monkeypatch.setattr(slot_plan, "MAX_SLOTS", STRETCH_BYTES - 1)
    session = source()
    play(session, [*CLAIMED[:3], (0, said(m.Claim(*fields_with(slot_bytes=1))), [Reply])])
    assert reasons(session.handle(said(asked(0)), 1.0)) == ["out_of_range"]


def fields_with(**changed):
    names = m.Claim.__struct_fields__
    return [changed.get(name, vars_of(CLAIM)[name]) for name in names]


def vars_of(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize(
    ("steps", "event", "released"),
    [
        (CLAIMED, Acquired(own(0), 0, "too large"), False),
        (GATHERING, Staged(own(0), "no such memory"), True),
        (WRITING, TicketEnded(own(0), "peer reset"), True),
    ],
    ids=["no slot", "gather", "write"],
)
def test_a_slot_that_cannot_be_written_fails_the_claim(session, steps, event, released):
    play(session, steps if released else [*steps, (1, said(asked(0)), [OWN_ACQUIRE])])
    play(session, [(1, said(asked(1)), [Acquire(own(1), STRETCH_BYTES, ARENA)])])
    commands = session.handle(event, 3.0)
    assert (Release(own(0)) in commands, Release(own(1)) in commands) == (released, True)
    assert reasons(commands) == ["transport"]
    assert reasons(session.handle(said(asked(2)), 4.0)) == ["transport"]
    assert reasons(session.handle(said(CLAIM), 4.0)) == ["transport"]
    written = not isinstance(event, TicketEnded)
    commands = session.handle(ABORT_SAID, 5.0)
    assert Reply("x", CLEAN if written else UNCLEAN) in commands


def test_an_abort_is_acknowledged_when_nothing_is_gathered_or_written_any_more(session):
    play(session, [*WRITING, (2, said(asked(1)), [Acquire]), (2, Acquired(own(1), OWN + 4096), [Stage])])
    play(session, [(3, ABORT_SAID, [Cancel(own(0))])])
    play(session, [(4, Staged(own(1), ""), [Release(own(1))])])
    free = LeaseEnded("r1", "aborted")
    play(session, [(5, TicketEnded(own(0), "cancelled"), [Release(own(0)), Reply("x", UNCLEAN), free])])
    assert reasons(session.handle(said(asked(2)), 6.0)) == ["expired"]
    play(session, [(7, TicketEnded(own(0), ""), []), (7, Acquired(own(2), OWN), []), (7, Staged(own(0), ""), [])])


def test_an_abort_leaves_the_line_for_a_slot():
    waiting = [*CLAIMED, (1, said(asked(0)), [OWN_ACQUIRE])]
    ended = [Release(own(0)), Reply("x", CLEAN), LeaseEnded("r1", m.Reason.ABORTED)]
    play(source(), [*waiting, (2, ABORT_SAID, ended)])


def test_a_pack_that_arrives_after_the_abort_is_not_carried_out(session):
    """The target's slot is somebody else's by then. Another rank's lease may live on."""
    two_readers = m.Claim(*fields_with(readers=(0, 1), party=OTHER_TARGET, claim_id="q1"))
    play(session, CLAIMED)
    session.handle(said(two_readers), 0.0)
    play(session, [(3, ABORT_SAID, [Reply, LeaseEnded])])
    assert reasons(session.handle(said(asked(0)), 4.0)) == ["expired"]


@pytest.mark.parametrize("steps", [GATHERING, WRITING], ids=["gathering", "writing"])
def test_the_blocks_of_a_lease_that_ends_wait_for_its_slots(session, steps):
    play(session, steps)
    commands = session.handle(LeaseWithdrawn("r1"), 3.0)
    assert reasons(commands) == ["expired"]
    assert (Cancel(own(0)) in commands) == (steps is WRITING)
    event = TicketEnded(own(0), "") if steps is WRITING else Staged(own(0), "")
    play(session, [(4, event, [Release(own(0)), LeaseEnded("r1", "withdrawn")])])


NEAR = 1 << 36
"""Where the source has the target's slot mapped."""
FILLING = [*CLAIMED, (1, said(asked(0)), [OWN_ACQUIRE]), (1, Acquired(own(0), NEAR, is_peer_slot=True), [Stage])]


def test_what_is_gathered_into_the_targets_slot_is_there(session):
    (stage,) = play(session, FILLING)
    assert {int(row) >= NEAR for tile in stage.tiles for row in tile.target_start} == {True}
    play(session, [(2, Staged(own(0), ""), [Release(own(0)), Reply("x", PACKED)])])
    play(session, [(3, said(asked(0)), [Reply("x", PACKED)]), (3, said(CLAIM), [Reply])])


def test_when_the_last_slot_is_gathered_in_place_all_of_it_is_valid(session):
    play(session, [*FILLING, (2, Staged(own(0), ""), [Release, Reply])])
    for stretch in (1, 2, 3):
        play(
            session,
            [(3, said(asked(stretch)), [Acquire]), (3, Acquired(own(stretch), NEAR, is_peer_slot=True), [Stage])],
        )
        if stretch < 3:
            play(session, [(4, Staged(own(stretch), ""), [Release, Reply])])
    last = Reply("x", m.Packed("q1", 3, 0))
    play(session, [(5, Staged(own(3), ""), [Release, last, VALID, LeaseEnded("r1", "done")])])


@pytest.mark.parametrize(
    ("steps", "end"), [(WRITING, TicketEnded), (FILLING, Staged)], ids=["written", "gathered in place"]
)
def test_a_lease_lasts_while_its_slots_get_on(steps, end):
    """Whose message of it is lost is no reason to lose the blocks."""
    session, late = source(), TIMING.lease_s
    play(session, [*steps, (late, end(own(0), ""), [Release, Reply])])
    play(session, [(late + 5, Tick(), [])])
    assert reasons(session.handle(Tick(), 2 * late + 1)) == ["expired"]


def test_a_gather_in_place_that_fails_leaves_nothing_under_way(session):
    """Unlike bytes on a wire, of which nobody knows: so nobody waits for them."""
    play(session, FILLING)
    assert reasons(session.handle(Staged(own(0), "no such memory"), 2.0)) == ["transport"]
    play(session, [(3, ABORT_SAID, [Reply("x", CLEAN), LeaseEnded("r1", "aborted")])])


def test_who_gives_up_hears_of_it_when_nothing_is_gathered_into_its_slots_any_more(session):
    play(session, [*FILLING, (2, ABORT_SAID, [])])
    play(session, [(3, Staged(own(0), ""), [Release(own(0)), Reply("x", CLEAN), LeaseEnded("r1", "aborted")])])


def test_a_target_may_not_judge_otherwise_whether_we_are_near_while_a_claim_is_between_two_slots(session):
    """What a target was told of the connection by which it claimed holds until the claim is over: only then does it
    know whether it can keep us from its slots."""
    near = structs.replace(TARGET_OFFER, staging=b"here", handshake=1)
    told = Reply("x", m.Reached("shm", "shm", handshake=1))
    play(session, [*CLAIMED, (1, said(near), [told]), (1, said(asked(0)), [OWN_ACQUIRE])])
    play(session, [(2, ABORT_SAID, [Release, Reply, LeaseEnded]), (3, said(near), [Disconnect, Connect])])


@pytest.mark.parametrize("strategy", [Strategy.PACK, Strategy.DIRECT])
def test_an_error_of_any_length_is_told_and_fails_its_own_claim_only(session, strategy):
    """A compiler says several kilobytes, of which a message has no room, and an error that cannot be read names no
    claim."""
    claim = structs.replace(CLAIM, strategy=strategy, slot_bytes=STRETCH_BYTES if strategy is Strategy.PACK else 0)
    play(session, [*CLAIMED[:3]])
    play(session, [(0, said(claim), [Reply] if strategy is Strategy.PACK else [Reply, Post])])
    failed = TicketEnded(own(0), "cannot compile " * 1000)
    if strategy is Strategy.PACK:
        play(session, [(1, said(asked(0)), [Acquire]), (1, Acquired(own(0), OWN), [Stage])])
        failed = Staged(own(0), failed.error)
    (refusal,) = (one.message for one in session.handle(failed, 2.0) if isinstance(one, Reply))
    assert (decode(encode(refusal)).claim_id, refusal.found[:14]) == ("q1", "cannot compile")


def test_a_claim_that_has_failed_is_not_refused_again_when_its_lease_ends(session):
    play(session, GATHERING)
    assert reasons(session.handle(Staged(own(0), "a bad row"), 3.0)) == ["transport"]
    play(session, [(4, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn")])])


def test_a_lease_that_ends_between_two_slots_leaves_nothing_open(session):
    play(session, [*WRITING, (3, TicketEnded(own(0), ""), [Release, Reply])])
    play(session, [(4, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn"), Reply, Count])])
    assert reasons(session.handle(said(asked(1)), 5.0)) == ["expired"]
