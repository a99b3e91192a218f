"""Slots of a request that is still computed: nobody holds one for tokens that are missing, and patience ends."""

from types import SimpleNamespace

import numpy as np
import pytest
from playbook import play
from session_cases import TARGET as US
from session_cases import answer, failure, said
from staging_cases import (
    ABORT_SAID,
    CLAIM,
    CLAIMED,
    DIRECT_CLAIM,
    GROWING,
    NUM_TOKENS,
    OWN,
    OWN_ACQUIRE,
    PACKING,
    READ_CLAIM,
    SOURCE_TABLES,
    STRETCH_BYTES,
    UNCLEAN,
    VALID,
    WINDOW,
    acquire,
    acquired,
    asked,
    at,
    grown,
    key,
    own,
    pack,
    packed,
    reasons,
    source,
    target,
)

from kvferry.plan.programs.copies import Copies
from kvferry.plan.slots import slot_plan
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Acquire, Cancel, LeaseEnded, Post, Release, Reply, Stage
from kvferry.session.events import Acquired, LeaseProgress, LeaseWithdrawn, Staged, Tick, TicketEnded
from kvferry.session.source import writes
from kvferry.session.target.reads import slot_pipeline
from kvferry.wire import messages as m

pytestmark = pytest.mark.usefixtures("three_slots_at_a_time")

GROWING_CLAIMED = [
    (0, GROWING, []),
    *CLAIMED[1:-1],
    (0, said(CLAIM), [Reply("x", m.Grant("q1", (), NUM_TOKENS))]),
]


def missing(num_tokens):
    return Reply("x", m.Grant("q1", (), num_tokens))


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
