"""Staging memory in sessions: whose a slot is at every moment, on both sides, whatever is late, repeated or broken."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs
from playbook import play
from session_cases import PEER, PROBE, REFERENCE, SOURCE, TRANSPORTS, answer, failure, said
from session_cases import TARGET as US

from kvferry.errors import ConfigurationError, TransferError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.program import RegionStarts, bind, region_starts
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots import slot_plan
from kvferry.plan.slots.slot_plan import SlotPlan
from kvferry.plan.strategy.calibration import TYPICAL_HOST
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    Acquire,
    BlocksReleased,
    Cancel,
    Connect,
    Count,
    Digest,
    Fetched,
    FetchFailed,
    LeaseEnded,
    Post,
    Release,
    Reply,
    Send,
    Stage,
)
from kvferry.session.events import (
    AbortRequest,
    Acquired,
    Digested,
    FetchRequest,
    LeaseProgress,
    LeaseRequest,
    LeaseWithdrawn,
    PeerConnected,
    Staged,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, ReadKey, SlotKey
from kvferry.session.slot import SLOT_TABLE, SlotState
from kvferry.session.source import writes
from kvferry.session.source.completed_reads import LOOK_AFTER_S
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import AUTO, NO_STAGING, StagingPolicy, TransferMode, allowed_by
from kvferry.session.target.reads import slot_pipeline
from kvferry.session.target.session import TargetSession
from kvferry.session.timeouts import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1e6, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, fence_s=4.0)
MODEL = attention(1, 2, 4, "float32", 4)
SOURCE_LAYOUT = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
TARGET_LAYOUTS = describe(MODEL, EngineShape(1, 1, 4, 8, "block-head-major"), 1 << 30)
NUM_TOKENS = 16
STRETCH_BYTES = 4 * MODEL.bytes_per_token
SOURCE_TABLES, TABLES, RANGES = ((6, 1, 4, 3),), ((0, 5, 2, 7),), (TokenRange(0, NUM_TOKENS),)
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), TABLES, RANGES)
TARGET_OFFER = m.TargetOffer(US, TARGET_LAYOUTS, TRANSPORTS, PROBE)
CLAIM = m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,), Direction.WRITE, TABLES, RANGES, Strategy.PACK, STRETCH_BYTES)
ARENA = 1 << 40
LANDED, ABORT = Send(PEER, m.Landed(US, "q1", "l1")), Send(PEER, m.Abort(US, "q1", "l1"))


def key(stretch, number=0):
    return SlotKey(ReadKey("q1", PEER), stretch, number)


def at(stretch):
    return ARENA + stretch * STRETCH_BYTES


def acquired(stretch):
    return Acquired(key(stretch), at(stretch))


def acquire(stretch):
    return Acquire(key(stretch), STRETCH_BYTES)


def pack(stretch):
    return Send(PEER, m.Pack(US, "q1", "l1", stretch, 0, at(stretch)))


def packed(stretch, num_missing=0):
    return answer(m.Packed("q1", stretch, 0, num_missing))


def target(*allowed, direction=Direction.READ):
    staging = StagingPolicy(allowed, STRETCH_BYTES)
    ours = TargetIdentity(
        US, "0.1.0", TARGET_LAYOUTS, direction=direction, transports=TRANSPORTS, probe=PROBE, staging=staging
    )
    return TargetSession(ours, TIMING)


def met(wanted=WANTED):
    """The handshake of a target that reads, up to the offer."""
    offer = m.Offer(SOURCE, SOURCE_LAYOUT, (), m.Probe(0, 0, 0))
    return [
        (0.0, wanted, [Send]),
        (0.1, answer(m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(SOURCE_LAYOUT))), [Send]),
        (0.2, answer(offer), [Connect]),
    ]


@pytest.fixture(autouse=True)
def _three_slots_at_a_time(monkeypatch):
    """Of the four that the request has."""
    monkeypatch.setattr(slot_pipeline, "WINDOW", 3)


CONNECTED = PeerConnected(PEER, "shm", "shm")
WINDOW = [acquire(0), acquire(1), acquire(2)]
READ_CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,)))
SCATTERING = [*met(), (0.3, CONNECTED, [READ_CLAIM]), (0.4, answer(m.Grant("q1", SOURCE_TABLES)), WINDOW)]
OFFERING = [*met(), (0.3, CONNECTED, [Send(PEER, TARGET_OFFER)])]
REACHED = answer(m.Reached("shm", "shm"))
PACKING = [*OFFERING, (0.4, REACHED, [Send(PEER, CLAIM)]), (0.5, answer(m.Grant("q1", ())), WINDOW)]


# --- a target that fills its slots itself


def test_runs_of_the_source_are_scattered_through_three_slots_at_a_time():
    session = target(Strategy.SCATTER)
    (post,) = play(session, [*SCATTERING, (1, acquired(1), [Post])])
    assert (post.key, post.direction, post.copies.num_bytes) == (key(1), Direction.READ, STRETCH_BYTES)
    assert int(post.copies.target[0]) == at(1)
    (stage,) = play(session, [(2, TicketEnded(key(1), ""), [Stage])])
    assert int(rows_of(stage.tiles).source.min()) == at(1)
    play(session, [(3, Staged(key(1), ""), [Release(key(1)), acquire(3)])])
    for stretch in (0, 2, 3):
        last = [LANDED] if stretch == 3 else []
        play(session, [(4, acquired(stretch), [Post]), (4, TicketEnded(key(stretch), ""), [Stage])])
        play(session, [(4, Staged(key(stretch), ""), [Release(key(stretch)), *last])])
    (fetched,) = play(session, [(5, answer(m.Valid("q1")), [Fetched])])
    assert (fetched.report.num_bytes, fetched.report.strategy) == (4 * STRETCH_BYTES, "scatter")


def test_a_source_has_nothing_to_say_of_slots_that_we_fill_ourselves():
    """Its word would have freed a slot into which a read of ours still went."""
    play(target(Strategy.SCATTER), [*SCATTERING, (1, acquired(0), [Post]), (2, packed(0), [])])


def test_a_cancelled_read_keeps_its_slot_until_it_has_ended():
    session = target(Strategy.SCATTER)
    play(session, [*SCATTERING, (1, acquired(0), [Post]), (1, acquired(1), [Post])])
    play(session, [(2, TicketEnded(key(1), ""), [Stage])])
    commands = session.handle(AbortRequest("q1"), 3.0)
    assert commands[2:] == [Cancel(key(0)), Release(key(2)), ABORT]
    play(session, [(4, Staged(key(1), ""), [Release(key(1))]), (5, packed(0), [])])
    play(session, [(6, TicketEnded(key(0), "cancelled"), [Release(key(0)), BlocksReleased("q1")])])
    play(session, [(7, acquired(2), [Release(key(2))]), (7, Staged(key(1), ""), []), (7, TicketEnded(key(0), ""), [])])


@pytest.mark.parametrize("event", [TicketEnded(key(0), "peer reset"), Acquired(key(1), 0, "too large")])
def test_a_slot_that_cannot_be_filled_fails_the_fetch(event):
    session = target(Strategy.SCATTER)
    commands = play(session, [*SCATTERING, (1, acquired(0), [Post])]) and session.handle(event, 2.0)
    assert failure(commands).reason == m.Reason.TRANSPORT
    if event.key == key(1):
        assert BlocksReleased("q1") not in commands
        commands = session.handle(TicketEnded(key(0), ""), 3.0)
    assert commands[-2:] == [Release(key(0)), BlocksReleased("q1")]


def test_a_scatter_that_fails_fails_the_fetch():
    session = target(Strategy.SCATTER)
    play(session, [*SCATTERING, (1, acquired(0), [Post]), (2, TicketEnded(key(0), ""), [Stage])])
    commands = session.handle(Staged(key(0), "no such memory"), 3.0)
    assert "scatter failed" in str(failure(commands))
    assert commands[-2:] == [Release(key(0)), BlocksReleased("q1")]


def test_source_tables_that_cannot_be_are_the_end_of_the_fetch():
    """The first slots are planned when they are asked for."""
    session = target(Strategy.SCATTER)
    commands = play(session, SCATTERING[:-1]) and session.handle(answer(m.Grant("q1", ((99,),))), 0.4)
    assert failure(commands).reason == m.Reason.OUT_OF_RANGE
    assert commands[-1] == BlocksReleased("q1")


# --- a target whose source fills its slots


@pytest.mark.parametrize("first", ["valid", "bytes"])
@pytest.mark.parametrize("direction", Direction)
def test_slots_are_told_to_the_source_and_scattered_when_it_has_written_them(direction, first):
    """The last slot may be scattered before or after the source has said that all of it is valid."""
    session = target(Strategy.PACK, direction=direction)
    if direction is Direction.READ:
        play(session, PACKING)
    else:
        steps = [*met()[:2], (0.2, met()[2][1], [Send(PEER, TARGET_OFFER)]), (0.4, REACHED, [Send(PEER, CLAIM)])]
        play(session, [*steps, PACKING[-1]])
    play(session, [(1, acquired(1), [pack(1)]), (2, packed(1), [Stage]), (2, packed(1), []), (2, packed(9), [])])
    play(session, [(3, Staged(key(1), ""), [Release(key(1)), acquire(3)]), (3, packed(1), [])])
    for stretch in (3, 0, 2):
        play(session, [(4, acquired(stretch), [pack(stretch)]), (4, packed(stretch), [Stage])])
        if stretch == 2 and first == "valid":
            play(session, [(4, answer(m.Valid("q1")), [])])
        last = [Fetched] if stretch == 2 and first == "valid" else []
        commands = play(session, [(4, Staged(key(stretch), ""), [Release(key(stretch)), *last])])
    if first == "bytes":
        commands = play(session, [(4.1, Tick(), []), (5, Tick(), [LANDED]), (5, answer(m.Valid("q1")), [Fetched])])
    fetched = commands[-1]
    assert (fetched.report.num_rows, fetched.report.strategy) == (4, "pack")


def test_what_is_packed_is_written_slot_by_slot():
    """Found by fuzzing: a source that said that everything is written ended the read, and its slots stayed for ever."""
    session = target(Strategy.PACK)
    everything = answer(m.Written("q1", 4 * STRETCH_BYTES, 4))
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (2, everything, []), (2, packed(0), [Stage])])


def test_a_slot_that_is_not_written_is_asked_for_again():
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (1.1, Tick(), []), (1.6, Tick(), [pack(0)])])
    play(session, [(1.7, Tick(), []), (1.8, packed(0), [Stage]), (2.9, Tick(), [])])


def test_a_repeated_message_does_not_end_the_scatter_of_a_failed_read():
    """Found by simulation: the slot was given back, and its next owner's bytes were scattered."""
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (2, packed(0), [Stage])])
    commands = session.handle(AbortRequest("q1"), 3.0)
    assert commands[2:] == [Release(key(1)), Release(key(2)), ABORT]
    play(session, [(4, packed(0), []), (5, Staged(key(0), ""), [Release(key(0)), BlocksReleased("q1")])])


def test_own_blocks_that_cannot_be_are_found_when_their_slot_is_planned(monkeypatch):
    monkeypatch.setattr(slot_plan, "TOGETHER", 1)
    session = target(Strategy.PACK)
    wanted = replace(WANTED, block_tables=((0, 5, 2, 99),))
    claim = Send(PEER, structs.replace(CLAIM, block_tables=wanted.block_tables))
    play(session, [*met(wanted), *OFFERING[3:], (0.4, REACHED, [claim]), PACKING[-1]])
    play(session, [(1, acquired(0), [pack(0)]), (1, acquired(1), [pack(1)]), (2, packed(0), [Stage])])
    commands = session.handle(Staged(key(0), ""), 3.0)
    assert failure(commands).reason == m.Reason.OUT_OF_RANGE
    assert [command for command in commands if isinstance(command, Release)] == [Release(key(0)), Release(key(2))]
    play(session, [(4, packed(1), [Release(key(1)), BlocksReleased("q1")])])


@pytest.fixture
def planned(monkeypatch):
    """The stretches that are planned, in this order."""
    found, plan = [], SlotPlan._plan

    def acknowledged(self, numbers):
        found.extend(numbers)
        return plan(self, numbers)

    monkeypatch.setattr(SlotPlan, "_plan", acknowledged)
    return found


def test_the_first_slot_is_planned_while_the_source_thinks_and_not_again(planned):
    session = target(Strategy.PACK)
    play(session, [*PACKING[:-1], (0.5, Tick(), [])])
    assert planned == [0]
    play(session, [(0.5, Tick(), []), (0.6, answer(m.Grant("q1", ())), WINDOW)])
    assert planned == [0, 1, 2, 3]


@pytest.mark.parametrize("ticks", [(), (Tick(),)], ids=["at the grant", "before the grant"])
def test_own_blocks_that_cannot_be_are_told_when_the_source_has_answered(ticks):
    session = target(Strategy.PACK)
    wanted = replace(WANTED, block_tables=((99, 0, 5, 2),))
    claim = Send(PEER, structs.replace(CLAIM, block_tables=wanted.block_tables))
    play(session, [*met(wanted), *OFFERING[3:], (0.4, REACHED, [claim]), *[(0.5, tick, []) for tick in ticks]])
    commands = session.handle(answer(m.Grant("q1", ())), 0.6)
    assert failure(commands).reason == m.Reason.OUT_OF_RANGE


def test_a_slot_of_a_failed_read_waits_for_its_source():
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (1, acquired(1), [pack(1)])])
    assert session.handle(AbortRequest("q1"), 2.0)[2:] == [Release(key(2)), ABORT]
    assert session.may_be_written()
    play(session, [(3, packed(1), [Release(key(1))]), (4, Tick(), [ABORT])])
    play(session, [(5, answer(CLEAN), [Release(key(0)), BlocksReleased("q1")])])
    assert not session.may_be_written()


def test_a_message_of_a_source_does_not_end_the_scatter_of_a_failed_read():
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (1, acquired(1), [pack(1)]), (2, packed(0), [Stage])])
    session.handle(AbortRequest("q1"), 2.0)
    play(
        session,
        [(3, answer(CLEAN), [Release(key(1))]), (4, Staged(key(0), ""), [Release(key(0)), BlocksReleased("q1")])],
    )


def test_after_a_write_that_ended_badly_a_slot_waits_a_while_longer():
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)])])
    session.handle(AbortRequest("q1"), 2.0)
    play(session, [(3, answer(UNCLEAN), [])])
    for tick in range(1, 10):
        play(session, [(3 + tick * 0.44, Tick(), [])])
    play(session, [(7.1, Tick(), [Release(key(0)), BlocksReleased("q1")])])


def test_whoever_waits_for_slots_has_patience_as_long_as_others_get_on():
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)])])
    behind = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    grant = answer(m.Grant("q2", ()))
    play(session, [(2, behind, [Send]), (2.1, grant, [Acquire, Acquire, Acquire])])
    play(session, [(20, Tick(), [pack(0)]), (20.9, answer(m.Queued("q1")), []), (21, Tick(), [pack(0)])])
    play(session, [(40.5, Tick(), [pack(0)])])
    # Somebody else who gets in line is no reason: nobody gets on by that.
    third = replace(WANTED, request_id="q3", reference=m.Reference("p0", "epoch-1", "r3", "l3"))
    play(session, [(40.6, third, [Send]), (40.7, answer(m.Grant("q3", ())), [Acquire, Acquire, Acquire])])
    failed = [command.request_id for command in session.handle(Tick(), 41.0) if isinstance(command, FetchFailed)]
    assert failed == ["q1", "q2"]


def test_a_source_that_only_says_queued_keeps_slots_from_others_for_so_long_and_no_longer():
    session = target(Strategy.PACK)
    play(session, [*PACKING, *[(1, acquired(number), [pack(number)]) for number in range(3)]])
    behind = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    play(session, [(2, behind, [Send]), (2.1, answer(m.Grant("q2", ())), [Acquire, Acquire, Acquire])])
    failed_at = {}
    for now in range(3, 1000):
        play(session, [(now, answer(m.Queued("q1")), [])] if "q1" not in failed_at else [])
        commands = session.handle(Tick(), now + 0.5)
        failed_at |= {command.request_id: now for command in commands if isinstance(command, FetchFailed)}
    latest = TIMING.hold_s + TIMING.transfer_s + 2
    assert TIMING.hold_s < failed_at["q1"] <= latest
    # Who waited for the slots fails with it: while their source may write to them nobody gets them.
    assert failed_at["q2"] <= latest


def test_who_cannot_be_written_to_does_without_packing():
    refusal = answer(m.Refusal(m.Reason.UNREACHABLE, "no transport reaches the target", "", "", ""))
    session = target(Strategy.SCATTER, Strategy.PACK)
    slow_rows = replace(CONNECTED, costs=replace(TYPICAL_HOST, row_s=1.0))
    play(session, [*met(), (0.3, slow_rows, [Send(PEER, TARGET_OFFER)]), (0.4, refusal, [Count, READ_CLAIM])])
    session = target(Strategy.PACK)
    commands = play(session, OFFERING) and session.handle(refusal, 0.4)
    assert "cannot write to our staging memory" in str(failure(commands))


# --- a source that packs


def source():
    return SourceSession(SourceIdentity(SOURCE, "0.1.0", (SOURCE_LAYOUT,), (), m.Probe(0, 0, 0)), TIMING)


@pytest.fixture
def session():
    return source()


def asked(stretch, number=0, address=ARENA):
    return m.Pack(US, "q1", "l1", stretch, number, address)


def own(stretch, number=0):
    return SlotKey(ClaimKey("l1", US, "q1"), stretch, number)


OWN = 1 << 35
LEASE = LeaseRequest("r1", "l1", SOURCE_TABLES, NUM_TOKENS)
CLAIMED = [
    (0, LEASE, []),
    (0, said(TARGET_OFFER), [Connect]),
    (0, PeerConnected(US, "shm", "shm"), [Reply]),
    (0, said(CLAIM), [Reply("x", m.Grant("q1", ()))]),
]
OWN_ACQUIRE = Acquire(own(0), STRETCH_BYTES, ARENA)
GATHERING = [*CLAIMED, (1, said(asked(0)), [OWN_ACQUIRE]), (1, Acquired(own(0), OWN), [Stage])]
WRITING = [*GATHERING, (2, Staged(own(0), ""), [Post])]
PACKED = m.Packed("q1", 0, 0)
ABORT_SAID = said(m.Abort(US, "q1", "l1"))
LANDED_SAID, VALID = said(m.Landed(US, "q1", "l1")), Reply("x", m.Valid("q1"))
CLEAN, UNCLEAN = m.Aborted("q1", "epoch-1"), m.Aborted("q1", "epoch-1", is_clean=False)


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


def reasons(commands):
    return [str(each.message.reason) for each in commands if isinstance(each, Reply)]


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
    two_readers = m.Claim(*fields_with(readers=(0, 1), party=m.Party("d0", "epoch-9", 1), claim_id="q1"))
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


# --- gathered into the target's own slots ---


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


def test_a_claim_that_has_failed_is_not_refused_again_when_its_lease_ends(session):
    play(session, GATHERING)
    assert reasons(session.handle(Staged(own(0), "a bad row"), 3.0)) == ["transport"]
    play(session, [(4, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn")])])


def test_a_lease_that_ends_between_two_slots_leaves_nothing_open(session):
    play(session, [*WRITING, (3, TicketEnded(own(0), ""), [Release, Reply])])
    play(session, [(4, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn"), Reply, Count])])
    assert reasons(session.handle(said(asked(1)), 5.0)) == ["expired"]


GROWING = replace(LEASE, block_tables=((),), is_growing=True)
DIRECT_CLAIM = m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,), Direction.WRITE, TABLES, RANGES)
PART = Part(("model.layers.0.k",), (Span(0, 2), Span(0, 4)), ALL_TOKENS, RANGES[0])
DIGESTED_CLAIM = structs.replace(CLAIM, subject=Subject(DigestPolicy.SAMPLED, 3, (PART,)))


def written(stretch):
    """A slot is asked for, gathered and written."""
    steps = [(3, said(asked(stretch)), [Acquire]), (3, Acquired(own(stretch), OWN), [Stage])]
    return [*steps, (4, Staged(own(stretch), ""), [Post])]


def test_when_the_last_slot_is_written_all_of_it_is_valid_and_the_blocks_are_free(session):
    play(session, [*CLAIMED, (1, Tick(), [])])
    for stretch in (2, 0, 1):
        play(session, [*written(stretch), (4, TicketEnded(own(stretch), ""), [Release, Reply])])
        assert reasons(session.handle(LANDED_SAID, 4.0)) == ["not_claimed"]
    (write,) = (write for lease in session._leases for write in lease.writes.values())
    assert write.plan._planned.cache_info().currsize
    last = Reply("x", m.Packed("q1", 3, 0))
    play(session, [*written(3), (5, TicketEnded(own(3), ""), [Release, last, VALID, LeaseEnded("r1", "done")])])
    # Its record is kept for a while, but not what was planned.
    assert not write.plan._planned.cache_info().currsize
    play(session, [(6, said(asked(3)), [last]), (6, said(CLAIM), [Reply("x", m.Grant("q1", ()))])])
    assert reasons(session.handle(said(asked(4)), 6.0)) == ["out_of_range"]
    play(session, [(7, LANDED_SAID, [VALID]), (8, LANDED_SAID, [VALID])])
    forgotten = session._leases.next_deadline()
    play(session, [(forgotten - 1, said(asked(3)), [last]), (forgotten, Tick(), [])])
    assert not list(session._leases)


def test_what_is_packed_is_digested_once_a_slot_is_asked_for_and_valid_with_its_last_slot(session):
    """Not before: the first slot is what the target waits for."""
    play(session, [*CLAIMED[:-1], (0, said(DIGESTED_CLAIM), [Reply]), (1, Tick(), [])])
    key, values = own(0).work, (b"12345678",)
    play(session, [*written(0), (3 + LOOK_AFTER_S, Tick(), [Digest]), (3.5, Digested(key, values), [])])
    for stretch in (0, 1, 2):
        play(session, [(4, TicketEnded(own(stretch), ""), [Release, Reply]), *written(stretch + 1)])
    valid = Reply("x", m.Valid("q1", values))
    play(session, [(5, TicketEnded(own(3), ""), [Release, Reply, valid, LeaseEnded("r1", "done")])])


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_was_packed_before_all_is_computed_is_digested_when_it_is(session, is_asked):
    play(session, [(0, GROWING, []), (0, grown(8), []), *CLAIMED[1:3], (0, said(DIGESTED_CLAIM), [Reply])])
    play(session, [*(written(0) if is_asked else ()), (3 + LOOK_AFTER_S, Tick(), [])])
    play(session, [(5, grown(16), [Reply]), (5 + LOOK_AFTER_S, Tick(), [Digest])])


def test_what_is_written_of_a_prompt_that_grows_on_is_not_granted_again(session):
    """The target wants its first twelve tokens."""
    some = structs.replace(CLAIM, num_tokens=12, ranges=(TokenRange(0, 12),))
    play(session, [(0, GROWING, []), (0, grown(12), []), *CLAIMED[1:3], (1, said(some), [Reply]), (1, Tick(), [])])
    for stretch in (0, 1, 2):
        valid = [VALID] if stretch == 2 else []
        play(session, [*written(stretch), (4, TicketEnded(own(stretch), ""), [Release, Reply, *valid])])
    play(session, [(5, grown(14), []), (6, grown(16), [LeaseEnded("r1", "done")])])


def test_what_was_planned_is_forgotten_with_its_lease(session):
    play(session, [*CLAIMED, (1, Tick(), [])])
    (write,) = (write for lease in session._leases for write in lease.writes.values())
    assert write.plan._planned.cache_info().currsize
    play(session, [(2, LeaseWithdrawn("r1"), [LeaseEnded, Reply, Count])])
    assert not write.plan._planned.cache_info().currsize


@pytest.mark.parametrize("claim", [CLAIM, DIRECT_CLAIM], ids=["packed", "direct"])
@pytest.mark.parametrize("is_growing", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "ranges"),
    [
        (0, (TokenRange(5, 0),)),
        (16, (TokenRange(20, 16),)),
        (16, (TokenRange(-5, 16),)),
        (16, (TokenRange(-(1 << 40), 16),)),
        (16, (TokenRange(-(1 << 63), 16),)),
    ],
)
def test_ranges_that_cannot_be_are_refused_when_they_are_claimed(session, num_tokens, ranges, is_growing, claim):
    wrong = structs.replace(claim, num_tokens=num_tokens, ranges=ranges)
    play(session, [(0, replace(LEASE, is_growing=is_growing), []), *CLAIMED[1:3]])
    commands = play(session, [(1, said(wrong), [Reply, Count])])
    assert reasons(commands) == ["out_of_range"]
    play(session, [(2, said(CLAIM), [Reply]), (3, LeaseWithdrawn("r1"), [LeaseEnded, Reply, Count])])


def test_a_packed_claim_without_ranges_is_refused(session):
    play(session, CLAIMED[:3])
    commands = play(session, [(1, said(structs.replace(CLAIM, num_tokens=0, ranges=())), [Reply, Count])])
    assert reasons(commands) == ["out_of_range"]


@pytest.mark.parametrize("tables", [((99, 5, 2, 7),), ((),), ()])
def test_blocks_that_cannot_be_are_refused_by_a_push_of_what_is_still_computed(tables, monkeypatch):
    monkeypatch.setattr(writes, "STRETCH_BYTES", STRETCH_BYTES)
    session = source()
    wrong = structs.replace(DIRECT_CLAIM, block_tables=tables)
    play(session, [(0, GROWING, []), (0, grown(9), []), *CLAIMED[1:3]])
    commands = play(session, [(1, said(wrong), [Reply, Count])])
    assert reasons(commands) == ["out_of_range"]
    play(session, [(2, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn")])])


@pytest.mark.parametrize("claim", [CLAIM, DIRECT_CLAIM], ids=["packed", "direct"])
def test_who_has_read_all_of_it_has_nothing_written(session, claim):
    """Under the same claim: its blocks are free when the lease ends, whatever else is asked for."""
    play(session, [(0, GROWING, []), *CLAIMED[1:3]])
    nothing = m.Claim(US, "q1", REFERENCE, 0, (0,))
    play(session, [(1, said(nothing), [Reply("x", m.Grant("q1", ((),)))]), (1, LANDED_SAID, [VALID])])
    assert reasons(session.handle(said(claim), 2.0)) == ["already_claimed"]
    assert reasons(session.handle(said(asked(0)), 2.0)) == ["not_claimed"]
    play(session, [(3, LeaseWithdrawn("r1"), [LeaseEnded("r1", "withdrawn")])])
    assert reasons(session.handle(said(asked(0)), 4.0)) == ["expired"]


def test_a_claim_of_which_nothing_moves_is_valid_at_once(session):
    empty = structs.replace(CLAIM, num_tokens=0, ranges=(TokenRange(0, 0),))
    play(session, [*CLAIMED[:-1], (0, said(empty), [Reply("x", m.Grant("q1", ())), VALID, LeaseEnded("r1", "done")])])


# --- which way


def test_strategies_have_names():
    assert allowed_by("auto") == AUTO
    assert allowed_by("pack") == (Strategy.PACK,)
    with pytest.raises(ConfigurationError, match="auto, direct, scatter, pack"):
        allowed_by("fast")


def test_what_is_left_without_packing():
    StagingPolicy(AUTO, 1).check_without_packing("p0")
    with pytest.raises(TransferError, match="p0 cannot write"):
        StagingPolicy((Strategy.PACK,), 1).check_without_packing("p0")


def test_a_slot_goes_round_once():
    over = {state for (_, event), state in SLOT_TABLE.items() if event in ("emptied", "ended")}
    assert over == {SlotState.OVER}


# --- a source whose request is still computed

GROWING_CLAIMED = [
    (0, GROWING, []),
    *CLAIMED[1:-1],
    (0, said(CLAIM), [Reply("x", m.Grant("q1", (), NUM_TOKENS))]),
]


def missing(num_tokens):
    return Reply("x", m.Grant("q1", (), num_tokens))


def grown(num_ready):
    return LeaseProgress("r1", (SOURCE_TABLES[0][: -(-num_ready // 4)],), num_ready)


def test_a_target_holds_no_slot_for_tokens_that_are_not_computed():
    session = target(Strategy.PACK)
    play(session, [*PACKING[:-1], (0.5, answer(m.Grant("q1", (), NUM_TOKENS - 3)), [])])
    play(session, [(1, answer(m.Grant("q1", (), NUM_TOKENS - 5)), [acquire(0)]), (1, acquired(0), [pack(0)])])
    play(session, [(2, packed(0, NUM_TOKENS - 5), [Stage]), (3, Staged(key(0), ""), [Release(key(0))])])
    play(session, [(4, answer(m.Grant("q1", (), 1)), [acquire(1), acquire(2)]), (5, acquired(1), [pack(1)])])
    # What a slot's own word says counts as well: it may overtake the other.
    play(session, [(6, packed(1, 0), [Stage, acquire(3)])])


def test_stretches_of_which_nothing_moves_are_waited_for_by_nobody():
    """As of layers with windows or chunks: three before the slot, of which tokens are missing, and two after it."""
    one = slot_plan.Slot(STRETCH_BYTES, (), Copies(*[np.zeros(1, np.uint64)] * 3, 1), ())
    plan = SimpleNamespace(
        num_tokens=6, stretches=range(6), tokens_for=int, slots=lambda number: (one,) * (number == 3)
    )
    read = slot_pipeline.SlotPipeline(key(0).work, plan, Strategy.PACK, ("l1", US), num_missing=6)
    assert list(read.go_on()) == []
    assert (read.awaits_tokens, read.is_done) == (True, False)
    assert list(read.computed(3)) == [acquire(3)]
    assert list(read.acquired(key(3), at(3), 1.0)) == [pack(3)]
    assert [type(command) for command in read.filled(key(3))] == [Stage]
    assert list(read.emptied(key(3))) == [Release(key(3))]
    assert (read.awaits_tokens, read.is_done) == (False, True)


def test_a_target_that_waits_for_tokens_asks_again_how_far_they_are_and_is_patient_as_long_as_it_hears():
    session, claim = target(Strategy.PACK), PACKING[-2][2][0]
    play(session, [*PACKING[:-1], (0.5, answer(m.Grant("q1", (), NUM_TOKENS)), [])])
    asked = 0
    for now in range(1, 100):
        asked += claim in session.handle(Tick(), float(now))
        play(session, [(now, answer(m.Grant("q1", (), NUM_TOKENS)), [])])
    assert asked > 90
    play(session, [(100, answer(m.Grant("q1", (), 0)), WINDOW)])
    asked = sum(claim in session.handle(Tick(), 100.0 + now) for now in range(10))
    assert not asked


def test_a_source_that_says_no_more_of_its_tokens_is_waited_for_no_longer_than_for_bytes():
    session = target(Strategy.PACK)
    play(session, [*PACKING[:-1], (0.5, answer(m.Grant("q1", (), 8)), [acquire(0), acquire(1)])])
    for number in range(2):
        play(session, [(1, acquired(number), [pack(number)]), (2, packed(number, 8), [Stage])])
        play(session, [(3, Staged(key(number), ""), [Release(key(number))])])
    session.handle(answer(m.Renewed(())), 22.0)
    session.handle(Tick(), 23.0)
    assert failure(session.handle(Tick(), 23.1)).reason == "deadline"


@pytest.mark.parametrize(("missing_now", "ends_at"), [(8, 20.5), (4, 30.0)])
def test_a_repeated_grant_gives_nobody_more_time(missing_now, ends_at):
    """Found by simulation: late answers to a repeated claim put off the deadline of who waited for a slot."""
    session = target(Strategy.PACK)
    play(session, [*PACKING[:-1], (0.5, answer(m.Grant("q1", (), 8)), WINDOW[:2])])
    session.handle(answer(m.Grant("q1", (), missing_now)), 10.0)
    play(session, [(ends_at, Tick(), [])])
    assert failure(session.handle(Tick(), ends_at + 0.1)).reason == "deadline"


def test_a_lease_that_ends_is_told_to_whoever_waits_for_its_tokens(session):
    play(session, [*GROWING_CLAIMED, (1, said(asked(0)), [Reply("x", m.Queued("q1"))])])
    assert reasons(session.handle(LeaseWithdrawn("r1"), 2.0)) == ["expired"]


def test_what_a_source_says_late_makes_no_token_missing_again():
    session = target(Strategy.PACK)
    play(session, [*PACKING[:-1], (0.5, answer(m.Grant("q1", (), 4)), WINDOW)])
    play(session, [(1, acquired(0), [pack(0)]), (2, packed(0, 0), [Stage]), (3, packed(0, 16), [])])
    play(session, [(3, Staged(key(0), ""), [Release(key(0)), acquire(3)])])


def test_a_slot_that_is_asked_for_before_its_tokens_are_computed_has_to_be_asked_for_again(session):
    queued = Reply("x", m.Queued("q1"))
    play(session, [*GROWING_CLAIMED, (1, said(asked(0)), [queued]), (2, grown(3), [missing(13)])])
    play(session, [(3, said(asked(0)), [queued]), (3, grown(5), [missing(11)]), (4, said(asked(0)), [OWN_ACQUIRE])])
    play(session, [(4, Acquired(own(0), OWN), [Stage]), (4, said(asked(1)), [queued])])
    told = Reply("x", m.Packed("q1", 0, 0, NUM_TOKENS - 5))
    play(session, [(4, Staged(own(0), ""), [Post]), (5, TicketEnded(own(0), ""), [Release, told])])
    told = Reply("x", m.Packed("q1", 0, 0, NUM_TOKENS - 9))
    play(session, [(5, grown(9), [missing(7)]), (5, said(asked(0)), [told]), (5, said(asked(1)), [Acquire])])
    commands = session.handle(LeaseWithdrawn("r1"), 6.0)
    assert LeaseEnded("r1", "withdrawn") in commands


def test_a_source_says_how_many_tokens_are_missing_as_often_as_it_is_asked(session):
    again = (1, said(CLAIM), [missing(NUM_TOKENS)])
    play(session, [*GROWING_CLAIMED, again, again, (2, grown(5), [missing(11)]), (3, said(CLAIM), [missing(11)])])


def test_a_slot_that_does_not_exist_is_refused_once_its_tokens_would_be_computed(session):
    play(session, [*GROWING_CLAIMED, (1, said(asked(0, number=9)), [Reply("x", m.Queued("q1"))])])
    play(session, [(2, grown(4), [missing(12)])])
    assert reasons(session.handle(said(asked(0, number=9)), 3.0)) == ["out_of_range"]
    assert reasons(session.handle(said(asked(99)), 3.0)) == ["out_of_range"]


def test_a_push_of_what_is_still_computed_goes_stretch_by_stretch(monkeypatch):
    monkeypatch.setattr(writes, "STRETCH_BYTES", STRETCH_BYTES)
    session = source()
    play(session, [*GROWING_CLAIMED[:3], (0, said(DIRECT_CLAIM), [Reply("x", m.Grant("q1", ()))])])
    play(session, [(1, grown(3), []), (2, grown(9), [Post, Post])])
    play(session, [(2, said(DIRECT_CLAIM), [Reply("x", m.Grant("q1", ()))]), (3, TicketEnded(own(1), ""), [])])
    # To be patient with: it has got on since, and there is more to come. Asked again, it has not.
    play(session, [(3, said(DIRECT_CLAIM), [Reply("x", m.Queued("q1"))])])
    play(session, [(3, said(DIRECT_CLAIM), [Reply("x", m.Grant("q1", ()))])])
    play(session, [(4, grown(16), [Post, Post]), (5, TicketEnded(own(0), ""), []), (5, TicketEnded(own(3), ""), [])])
    done = [Reply, VALID, LeaseEnded("r1", "done")]
    said_written, *_ = play(session, [(6, TicketEnded(own(2), ""), done)])
    assert said_written.message.num_bytes == 4 * STRETCH_BYTES


def test_a_stretch_that_cannot_be_written_fails_the_claim(monkeypatch):
    monkeypatch.setattr(writes, "STRETCH_BYTES", STRETCH_BYTES)
    session = source()
    play(session, [*GROWING_CLAIMED[:3], (0, said(DIRECT_CLAIM), [Reply]), (2, grown(8), [Post, Post])])
    commands = session.handle(TicketEnded(own(0), "peer reset"), 3.0)
    assert reasons(commands) == ["transport"]
    assert Cancel(own(1)) in commands
    assert reasons(session.handle(said(DIRECT_CLAIM), 4.0)) == ["transport"]
    play(session, [(4, grown(12), []), (5, ABORT_SAID, [])])
    play(session, [(6, Staged(own(1), ""), []), (6, Acquired(own(1), OWN), [])])
    (acknowledged, _) = play(session, [(7, TicketEnded(own(1), "cancelled"), [Reply, LeaseEnded])])
    assert acknowledged.message == UNCLEAN


def test_blocks_that_an_engine_does_not_have_fail_what_waits_for_them(session):
    play(session, [*GROWING_CLAIMED[:3], (0, said(DIRECT_CLAIM), [Reply])])
    assert reasons(session.handle(LeaseProgress("r1", ((99,) * 4,), 16), 1.0)) == ["transport"]


def test_a_read_waits_for_the_last_token():
    session = source()
    claim = READ_CLAIM.message
    queued, grant = Reply("x", m.Queued("q1")), Reply("x", m.Grant("q1", SOURCE_TABLES))
    play(session, [(0, GROWING, []), (1, said(claim), [queued]), (2, grown(8), []), (3, grown(16), [grant])])
    play(session, [(4, grown(7), []), (4, LeaseProgress("r9", ((),), 1), [])])
    session = source()
    play(session, [(0, GROWING, []), (1, said(claim), [queued])])
    assert reasons(session.handle(LeaseWithdrawn("r1"), 2.0)) == ["expired"]


def test_a_strategy_is_chosen_among_those_that_are_allowed():
    program = bind_of_both()
    cheap_rows, dear_rows = (replace(TYPICAL_HOST, row_s=row_s) for row_s in (1e-12, 1.0))
    policy = StagingPolicy(AUTO, STRETCH_BYTES)
    packed = TransferMode(Direction.WRITE, Strategy.PACK)
    assert policy.before_claim(program, RANGES, cheap_rows, Direction.READ) == TransferMode(Direction.READ)
    assert policy.before_claim(program, RANGES, dear_rows, Direction.READ) == packed
    only_runs = StagingPolicy((Strategy.SCATTER,), STRETCH_BYTES)
    assert only_runs.before_claim(program, RANGES, cheap_rows, Direction.WRITE) == packed
    # What is read may be scattered: that is decided when the rows are known.
    assert only_runs.before_claim(program, RANGES, cheap_rows, Direction.READ) == TransferMode(Direction.READ)
    copies, starts = copies_for(program, SOURCE_TABLES, TABLES, RANGES), region_starts(SOURCE_LAYOUT, TARGET_LAYOUTS[0])
    assert policy.before_read(copies, cheap_rows, starts) is Strategy.DIRECT
    assert policy.before_read(copies, dear_rows, starts) is Strategy.SCATTER
    assert StagingPolicy((Strategy.PACK,), 1).before_read(copies, dear_rows, starts) is Strategy.DIRECT


@pytest.mark.parametrize(("wire_rows", "expected"), [(1, Strategy.SCATTER), (16, Strategy.DIRECT)])
def test_runs_end_where_stretches_do(wire_rows, expected):
    """Blocks that are neighbours at the source are one run only if they are read together."""
    rows = np.arange(64, dtype=np.uint64)
    copies = Copies(rows * np.uint64(4096), rows * np.uint64(8192), np.full(64, 4096, np.uint64), 64)
    costs = replace(TYPICAL_HOST, row_s=1e-3)
    policy, starts = StagingPolicy(AUTO, 1 << 20), RegionStarts(np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert policy.before_read(copies, costs, starts) is Strategy.SCATTER
    wire = Copies(*[np.zeros(wire_rows, np.uint64)] * 3, wire_rows)
    slot = slot_plan.Slot(16 * 4096, (), wire, ())
    assert policy.when_cut(copies, costs, (slot,)) is expected
    assert policy.when_cut(copies, costs, ()) is Strategy.SCATTER
    assert StagingPolicy((Strategy.SCATTER,), 1).when_cut(copies, costs, (slot,)) is Strategy.SCATTER


@pytest.mark.parametrize(("num_stretches", "expected"), [(1, Acquire), (4, Post)])
def test_what_is_worth_staging_only_in_one_piece_moves_straight_where_it_is_cut(num_stretches, expected):
    table = (1, 2, 3, 4)
    policy = StagingPolicy((Strategy.DIRECT, Strategy.SCATTER), 4 // num_stretches * STRETCH_BYTES)
    starts = region_starts(SOURCE_LAYOUT, TARGET_LAYOUTS[0])
    copies = copies_for(bind_of_both(), (table,), TABLES, RANGES)
    dearer = (replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist())
    costs = next(each for each in dearer if policy.before_read(copies, each, starts) is Strategy.SCATTER)
    session = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, staging=policy), TIMING)
    play(session, [*met(), (0.3, PeerConnected(PEER, "shm", "", costs), [Send])])
    play(session, [(0.4, answer(m.Grant("q1", (table,))), [expected])])


@pytest.mark.parametrize(
    ("descriptor", "is_near", "expected"),
    [(b"here", True, m.TargetOffer), (b"", True, m.Claim), (b"here", False, m.Claim)],
)
def test_where_nobody_can_attach_staging_memory_pack_has_a_wire(descriptor, is_near, expected):
    """However near the source is."""
    policy, program = StagingPolicy(AUTO, 1 << 20), bind_of_both()

    def is_packed(costs):
        return policy.before_claim(program, RANGES, costs, Direction.READ).strategy is Strategy.PACK

    dearer = (replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist())
    cheap = (each for each in dearer if not is_packed(each))
    costs = next(each for each in cheap if is_packed(replace(each, gathers_into_peer=True)))
    ours = TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, staging_descriptor=descriptor, staging=policy)
    session = TargetSession(ours, TIMING)
    connected = PeerConnected(PEER, "shm", "", replace(costs, gathers_into_peer=is_near))
    (asked,) = play(session, [*met(), (0.3, connected, [Send])])
    assert isinstance(asked.message, expected)
    if isinstance(asked.message, m.TargetOffer):
        assert asked.message.staging == descriptor
        # The source knows better: what can be read need not be packed after all.
        for reaches, claimed in ((False, Strategy.DIRECT), (True, Strategy.PACK)):
            source = copy.deepcopy(session)
            (claim,) = play(source, [(0.4, answer(m.Reached("shm", "", reaches)), [Send])])
            assert claim.message.strategy is claimed


@pytest.mark.parametrize(("slot_bytes", "expected"), [(64, Strategy.DIRECT), (1 << 20, Strategy.PACK)])
def test_a_price_is_that_of_the_slots_that_are_used(slot_bytes, expected):
    """Each slot costs something: many small ones cost more than the rows do."""
    costs = replace(TYPICAL_HOST, row_s=1e-4, launch_s=1e-3)
    found = StagingPolicy(AUTO, slot_bytes).before_claim(bind_of_both(), RANGES, costs, Direction.READ)
    assert found.strategy is expected


def test_what_would_be_shared_and_cannot_be_cut_is_packed_if_that_is_next():
    """Four tokens are one block."""
    program, ranges = bind_of_both(), (TokenRange(0, 4),)
    packed, shared = TransferMode(Direction.WRITE, Strategy.PACK), TransferMode(Direction.READ, read_from=8)
    policy = StagingPolicy(AUTO, 1 << 20)
    dearer = [replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist()]
    costs = next(each for each in dearer if policy.before_claim(program, RANGES, each, Direction.READ) == packed)
    both = replace(costs, sharing_s=1e-12)
    assert policy.before_claim(program, RANGES, both, Direction.READ) == shared
    few = next(each for each in dearer if policy.before_claim(program, ranges, each, Direction.READ) == packed)
    assert policy.before_claim(program, ranges, replace(few, sharing_s=1e-12), Direction.READ) == packed


def bind_of_both():
    found = route((SOURCE_LAYOUT,), TARGET_LAYOUTS)
    return bind(found.between(0, 0), SOURCE_LAYOUT, TARGET_LAYOUTS[0])


def test_blocks_that_no_transport_reaches_are_packed_or_nothing():
    assert StagingPolicy(AUTO, 1).packing_only("p0") == TransferMode(Direction.WRITE, Strategy.PACK)
    with pytest.raises(TransferError, match="only be reached through its staging memory"):
        StagingPolicy((Strategy.DIRECT,), 1).packing_only("p0")


@pytest.mark.parametrize(
    ("allowed", "slot_bytes"),
    [
        ((), 1 << 20),
        (AUTO, 0),
        ((Strategy.PACK,), 0),
        ((Strategy.DIRECT, Strategy.SCATTER), -5),
        ((Strategy.DIRECT,), -1),
    ],
)
def test_a_policy_that_nothing_can_be_moved_with_is_refused(allowed, slot_bytes):
    with pytest.raises(ConfigurationError):
        StagingPolicy(allowed, slot_bytes)
    assert StagingPolicy((Strategy.DIRECT,), 0) == NO_STAGING
