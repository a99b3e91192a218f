"""Staging memory of a target: whose a slot is at every moment, whatever is late, repeated or broken."""

from dataclasses import replace

import pytest
from msgspec import structs
from playbook import play
from session_cases import ABORT, LANDED, PEER, SOURCE, answer, failure
from staging_cases import (
    CLAIM,
    CLEAN,
    CONNECTED,
    OFFERING,
    PACKING,
    REACHED,
    READ_CLAIM,
    SOURCE_LAYOUT,
    SOURCE_TABLES,
    STRETCH_BYTES,
    TARGET_OFFER,
    TIMING,
    UNCLEAN,
    WANTED,
    WINDOW,
    acquire,
    acquired,
    at,
    key,
    met,
    pack,
    packed,
    target,
)

from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.slots import slot_plan
from kvferry.plan.strategy.calibration import TYPICAL_HOST
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    Acquire,
    BlocksReleased,
    Cancel,
    Connect,
    Count,
    Disconnect,
    Fetched,
    FetchFailed,
    Post,
    Release,
    Send,
    Stage,
)
from kvferry.session.events import AbortRequest, Acquired, HostSilent, PeerMoved, Staged, Tick, TicketEnded
from kvferry.session.keys import ReadKey, SlotKey
from kvferry.session.target.read_strategy import AUTO
from kvferry.wire import messages as m

pytestmark = pytest.mark.usefixtures("three_slots_at_a_time")


def test_a_source_that_packs_has_time_to_notice_that_it_cannot_write():
    """As one that writes to blocks has: until then heartbeats are short."""
    waiting = target(Strategy.PACK)
    waiting._liveness._timing = replace(TIMING, heartbeat_s=1.0, missed_heartbeats=30)
    play(waiting, [*PACKING, (0.6, acquired(0), [pack(0)])])
    renewals = [each.message for now in range(1, 8) for each in waiting.handle(Tick(), now + 0.5) if is_renewal(each)]
    assert [bool(renewal.padding) for renewal in renewals] == [False] * 4 + [True] * 3


def is_renewal(command):
    return isinstance(command, Send) and isinstance(command.message, m.Renew)


SCATTERING = [*met(), (0.3, CONNECTED, [READ_CLAIM]), (0.4, answer(m.Grant("q1", SOURCE_TABLES)), WINDOW)]


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
    # No scatter touches the blocks any more. What is read comes into a slot.
    play(session, [(4, Staged(key(1), ""), [Release(key(1)), BlocksReleased("q1")]), (5, packed(0), [])])
    play(session, [(6, TicketEnded(key(0), "cancelled"), [Release(key(0))])])
    play(session, [(7, acquired(2), [Release(key(2))]), (7, Staged(key(1), ""), []), (7, TicketEnded(key(0), ""), [])])


@pytest.mark.parametrize("event", [TicketEnded(key(0), "peer reset"), Acquired(key(1), 0, "too large")])
def test_a_slot_that_cannot_be_filled_fails_the_fetch(event):
    session = target(Strategy.SCATTER)
    commands = play(session, [*SCATTERING, (1, acquired(0), [Post])]) and session.handle(event, 2.0)
    assert failure(commands).reason == m.Reason.TRANSPORT
    assert BlocksReleased("q1") in commands
    if event.key == key(1):
        commands = session.handle(TicketEnded(key(0), ""), 3.0)
    assert Release(key(0)) in commands


def test_a_source_is_met_again_when_one_slot_after_the_other_cannot_be_filled():
    """Though another slot of each read could be."""
    session = target(Strategy.SCATTER)
    play(
        session,
        [*SCATTERING, (1, acquired(0), [Post]), (1, acquired(1), [Post]), (2, TicketEnded(key(1), ""), [Stage])],
    )
    commands = session.handle(TicketEnded(key(0), "peer reset"), 2.0)
    for number in range(2, 4):
        assert Disconnect(PEER) not in commands
        name, now = f"q{number}", float(number)
        first, second = (SlotKey(ReadKey(name, PEER), stretch, 0) for stretch in (0, 1))
        session.handle(replace(WANTED, request_id=name), now)
        session.handle(answer(m.Grant(name, SOURCE_TABLES)), now)
        play(session, [(now, Acquired(first, at(0), ""), [Post]), (now, Acquired(second, at(1), ""), [Post])])
        play(session, [(now, TicketEnded(second, ""), [Stage])])
        commands = session.handle(TicketEnded(first, "peer reset"), now + 0.5)
    assert Disconnect(PEER) in commands


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


@pytest.mark.parametrize("first", ["valid", "bytes"])
@pytest.mark.parametrize("direction", Direction)
def test_slots_are_told_to_the_source_and_scattered_when_it_has_written_them(direction, first):
    """The last slot may be scattered before or after the source has said that all of it is valid."""
    session = target(Strategy.PACK, direction=direction)
    if direction is Direction.READ:
        play(session, PACKING)
    else:
        steps = [
            *met()[:2],
            (0.2, met()[2][1], [Send(PEER, TARGET_OFFER, access=SOURCE)]),
            (0.4, REACHED, [Send(PEER, CLAIM)]),
        ]
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
    assert commands[-1] == BlocksReleased("q1")
    play(session, [(4, packed(1), [Release(key(1))])])


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
    """Its blocks do not: a source that stays silent, or whose host is gone, keeps no request from being computed."""
    session = target(Strategy.PACK)
    play(session, [*PACKING, (1, acquired(0), [pack(0)]), (1, acquired(1), [pack(1)])])
    assert session.handle(AbortRequest("q1"), 2.0)[2:] == [Release(key(2)), ABORT, BlocksReleased("q1")]
    assert session.may_be_written()
    assert session.num_open() == 1
    play(session, [(3, packed(1), [Release(key(1))]), (4, Tick(), [ABORT]), (5, answer(CLEAN), [Release(key(0))])])
    assert not session.may_be_written()
    assert session.num_open() == 0


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
    play(session, [(7.1, Tick(), [Release(key(0))])])


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


def test_bytes_of_other_reads_are_no_reason_to_wait_for_slots():
    """A read through slots has its own progress."""
    session = target(Strategy.PACK)
    play(session, [*PACKING, *[(1, acquired(number), [pack(number)]) for number in range(3)]])
    failed_at = []
    for now in range(3, 100):
        play(session, [(now, PeerMoved(PEER), [])])
        commands = session.handle(Tick(), now + 0.5)
        failed_at += [now for command in commands if isinstance(command, FetchFailed)]
    assert len(failed_at) == 1
    assert failed_at[0] <= TIMING.transfer_s + 2


NOT_REACHED = answer(m.Refusal(m.Reason.UNREACHABLE, "no transport reaches the target", "", "", ""))


def test_who_cannot_be_written_to_does_without_packing():
    session = target(Strategy.SCATTER, Strategy.PACK)
    slow_rows = replace(CONNECTED, costs=replace(TYPICAL_HOST, row_s=1.0))
    play(
        session,
        [*met(), (0.3, slow_rows, [Send(PEER, TARGET_OFFER, access=SOURCE)]), (0.4, NOT_REACHED, [Count, READ_CLAIM])],
    )


STAGED_OFFER = answer(m.Offer(SOURCE, SOURCE_LAYOUT, (), m.Probe(0, 0, 0), is_staged=True))
STAGED_OFFERING = [*OFFERING[:2], (0.2, STAGED_OFFER, [Connect]), OFFERING[-1]]


@pytest.mark.parametrize(
    ("allowed", "offering"), [((Strategy.PACK,), OFFERING), (AUTO, STAGED_OFFERING)], ids=["pack", "staged source"]
)
def test_a_source_that_could_not_write_to_us_is_asked_again_where_nothing_else_is_left(allowed, offering):
    session = target(*allowed)
    commands = play(session, offering) and session.handle(NOT_REACHED, 0.4)
    assert "cannot write to our staging memory" in str(failure(commands))
    second = replace(WANTED, request_id="q2")
    assert "cannot write" in str(failure(session.handle(second, 0.3 + TIMING.handshake_s)))
    again, answered = 0.5 + TIMING.handshake_s, answer(m.Aborted("q1", "epoch-1"))
    play(session, [(again, answered, []), (again, replace(WANTED, request_id="q3"), [OFFERING[-1][2][0]])])
    (claim,) = session.handle(REACHED, again + 1)
    assert claim.message.strategy is Strategy.PACK


def test_a_source_that_has_needed_longer_to_connect_to_us_may_write():
    session = target(Strategy.PACK)
    play(session, OFFERING)
    late = 0.3 + TIMING.handshake_s
    assert "cannot write" in str(failure(session.handle(Tick(), late)))
    play(session, [(late + 0.1, REACHED, []), (late + 0.2, replace(WANTED, request_id="q2"), [Send])])


def test_a_host_that_ignores_new_connections_may_still_write_to_us():
    """It was met, and is about to connect to our memory: its answer, or the deadline, says whether it can."""
    session = target(Strategy.PACK)
    play(session, [*OFFERING, (0.35, HostSilent(PEER), []), *PACKING[len(OFFERING) :]])
