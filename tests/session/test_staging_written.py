"""Claims that a source writes in slots or by itself: when all of it is valid, and what is refused."""

from dataclasses import replace

import pytest
from msgspec import structs
from playbook import play
from session_cases import REFERENCE, said
from session_cases import TARGET as US
from staging_cases import (
    CLAIM,
    CLAIMED,
    DIRECT_CLAIM,
    GROWING,
    LANDED_SAID,
    LEASE,
    RANGES,
    STRETCH_BYTES,
    VALID,
    asked,
    grown,
    own,
    reasons,
    source,
    written,
)

from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.session.commands import Count, Digest, LeaseEnded, Release, Reply
from kvferry.session.events import Digested, LeaseWithdrawn, Tick, TicketEnded
from kvferry.session.source import writes
from kvferry.wire import messages as m

PART = Part(("model.layers.0.k",), (Span(0, 2), Span(0, 4)), ALL_TOKENS, RANGES[0])
DIGESTED_CLAIM = structs.replace(CLAIM, subject=Subject(DigestPolicy.SAMPLED, 3, (PART,)))


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
    play(session, [*written(0), (3, Tick(), [Digest]), (3.5, Digested(key, values), [])])
    for stretch in (0, 1, 2):
        play(session, [(4, TicketEnded(own(stretch), ""), [Release, Reply]), *written(stretch + 1)])
    valid = Reply("x", m.Valid("q1", values))
    play(session, [(5, TicketEnded(own(3), ""), [Release, Reply, valid, LeaseEnded("r1", "done")])])


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_was_packed_before_all_is_computed_is_digested_when_it_is(session, is_asked):
    play(session, [(0, GROWING, []), (0, grown(8), []), *CLAIMED[1:3], (0, said(DIGESTED_CLAIM), [Reply])])
    play(session, [*(written(0) if is_asked else ()), (3, Tick(), [])])
    play(session, [(5, grown(16), [Reply]), (5, Tick(), [Digest])])


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
