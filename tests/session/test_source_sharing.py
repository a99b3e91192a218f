"""The source of a read that is shared: it grants, writes its part once, and waits to be asked whether all is valid."""

import msgspec
import pytest
from playbook import play
from session_cases import MODEL, REFERENCE, reason, said, source_session
from session_cases import SOURCE_LAYOUT as LAYOUT
from session_cases import TARGET as THEM
from session_cases import TARGET_OFFER as OFFER

from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import parted
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Cancel, Connect, Count, Digest, LeaseEnded, Post, Reply
from kvferry.session.events import (
    Digested,
    LeaseProgress,
    LeaseRequest,
    LeaseWithdrawn,
    PeerConnected,
    PeerMoved,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.session.source.session import SourceSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, tombstone_s=60.0, idle_peer_s=100.0)
TABLES = ((3, 5, 6),)
LEASE, GROWING = LeaseRequest("r1", "l1", TABLES, 12), LeaseRequest("r1", "l1", ((),), 12, is_growing=True)
CLAIM = m.Claim(THEM, "c1", REFERENCE, 12, (0,), Direction.READ, ((2, 0),), (TokenRange(0, 12),), read_from=8)
KEY = ClaimKey("l1", THEM, "c1")
TICKET = SlotKey(KEY, 0, 0)
GRANT, CANCEL = Reply("x", m.Grant("c1", TABLES)), Cancel(TICKET)
ABORT, LANDED = m.Abort(THEM, "c1", "l1"), m.Landed(THEM, "c1", "l1")
CLEAN, UNCLEAN = Reply("x", m.Aborted("c1", "epoch-1")), Reply("x", m.Aborted("c1", "epoch-1", is_clean=False))
FREE, VALID, WITHDRAWN = LeaseEnded("r1", "done"), Reply("x", m.Valid("c1")), LeaseEnded("r1", "withdrawn")
STATES = tuple(state.name for state in LAYOUT.states[:2])
SUBJECT = Subject(DigestPolicy.SAMPLED, 0, (Part(STATES, (Span(0, 2), Span(0, 4)), ALL_TOKENS, TokenRange(0, 12)),))


@pytest.fixture
def source() -> SourceSession:
    return source_session(TIMING)


REACHED = [
    (0, said(OFFER), [Connect(THEM, OFFER)]),
    (0, PeerConnected(THEM, "cma", "cma 9 GB/s"), [Reply("x", m.Reached("cma", "cma 9 GB/s"))]),
]
GRANTED = [(0, LEASE, []), *REACHED, (1, said(CLAIM), [GRANT])]
WRITING = [*GRANTED, (1, Tick(), [Post])]


def test_it_grants_writes_its_part_and_is_asked(source):
    play(source, GRANTED)
    assert source.next_deadline() == 0.0
    (post,) = play(source, [(1, Tick(), [Post])])
    assert source.next_deadline() > 1
    program = source._targets._known[THEM].programs[0]
    ours = copies_for(program, TABLES, CLAIM.block_tables, CLAIM.ranges, parted(8)[0])
    assert (post.key, post.direction, post.copies.num_bytes) == (TICKET, Direction.WRITE, 8 * MODEL.bytes_per_token)
    assert post.copies.target.tolist() == ours.target.tolist()
    written = Reply("x", m.Written("c1", ours.num_bytes, len(ours)))
    play(source, [(2, TicketEnded(TICKET, ""), [written]), (3, said(LANDED), [VALID, FREE])])
    assert source.num_live() == 0


@pytest.mark.parametrize("steps", [GRANTED, WRITING], ids=["granted", "writing"])
def test_what_has_not_been_written_has_not_landed(source, steps):
    play(source, steps)
    assert reason(source.handle(said(LANDED), 1.5)) == "not_claimed"


def test_a_claim_that_is_repeated_is_granted_again_and_written_once(source):
    play(
        source,
        [
            *GRANTED,
            (1, said(CLAIM), [GRANT]),
            (1, Tick(), [Post]),
            (1, Tick(), []),
            (2, said(CLAIM, "y"), [Reply("y", GRANT.message)]),
        ],
    )
    (status,) = play(source, [(3, TicketEnded(TICKET, ""), [Reply])])
    assert status.peer == "y"
    play(source, [(4, said(CLAIM), [GRANT, Reply("x", status.message)])])
    # Late, or repeated: who has been told that all is valid must not hear that the lease is over.
    play(source, [(5, said(LANDED), [VALID, FREE]), (6, said(CLAIM), [Reply("x", status.message)])])


def test_a_target_that_asks_is_told_that_the_sources_part_moves(source):
    queued = Reply("x", m.Queued("c1"))
    play(source, [*WRITING, (2, PeerMoved(THEM), []), (3, said(CLAIM), [GRANT, queued]), (4, said(CLAIM), [GRANT])])


def test_who_has_not_heard_of_its_grant_hears_when_the_lease_is_over(source):
    play(source, [*WRITING, (2, TicketEnded(TICKET, ""), [Reply]), (3, LeaseWithdrawn("r1"), [WITHDRAWN])])
    assert reason(source.handle(said(CLAIM), 4.0)) == "expired"


def test_what_the_source_has_not_computed_waits(source):
    play(source, [(0, GROWING, []), *REACHED, (1, said(CLAIM), [Reply("x", m.Queued("c1"))]), (1, Tick(), [])])
    play(
        source,
        [
            (2, LeaseProgress("r1", ((3,),), 4), []),
            (3, LeaseProgress("r1", TABLES, 12), [GRANT]),
            (3, Tick(), [Post]),
        ],
    )


def test_a_write_that_fails_is_told_and_told_again(source):
    play(source, WRITING)
    assert reason(play(source, [(2, TicketEnded(TICKET, "gone"), [Reply, Count])])) == "transport"
    assert reason(source.handle(said(CLAIM), 3.0)) == "transport"
    play(source, [(4, said(ABORT), [UNCLEAN, LeaseEnded("r1", "aborted")])])


@pytest.mark.parametrize(
    ("event", "ends"), [(LeaseWithdrawn("r1"), [WITHDRAWN]), (said(ABORT), [CLEAN, LeaseEnded("r1", "aborted")])]
)
def test_what_ends_before_it_is_written_is_not_written(source, event, ends):
    """An abort is acknowledged at once; who waits for a part hears when the lease has ended."""
    play(source, GRANTED)
    refusal = [Reply, Count] if isinstance(event, LeaseWithdrawn) else []
    play(source, [(1.1, event, [*ends, *refusal]), (1.2, Tick(), []), (1.3, said(ABORT), [CLEAN])])
    assert source.num_live() == 0


def test_what_ends_while_it_is_written_waits_for_its_ticket(source):
    play(source, WRITING)
    assert reason(play(source, [(2, LeaseWithdrawn("r1"), [CANCEL, Reply, Count])])) == "expired"
    play(source, [(3, said(ABORT), []), (4, TicketEnded(TICKET, "cancelled"), [UNCLEAN, WITHDRAWN])])


def test_an_abort_waits_for_its_ticket(source):
    play(
        source,
        [*WRITING, (2, said(ABORT), [CANCEL]), (3, TicketEnded(TICKET, ""), [CLEAN, LeaseEnded("r1", "aborted")])],
    )


def test_a_sample_is_made_while_it_moves_and_told_when_it_is_asked_for(source):
    claim = msgspec.structs.replace(CLAIM, subject=SUBJECT)
    play(source, [*GRANTED[:-1], (1, said(claim), [GRANT]), (1, Tick(), [Post]), (1, Tick(), [Digest])])
    play(source, [(2, Digested(KEY, (b"v" * 8,) * 2), []), (2, TicketEnded(TICKET, ""), [Reply])])
    play(source, [(3, said(LANDED), [Reply("x", m.Valid("c1", (b"v" * 8,) * 2)), FREE])])


def test_blocks_that_cannot_be_are_told_when_it_is_planned(source):
    wrong = msgspec.structs.replace(CLAIM, block_tables=((-1, 0),))
    play(source, [*GRANTED[:-1], (1, said(wrong), [GRANT])])
    assert reason(play(source, [(1, Tick(), [Reply, Count])])) == "out_of_range"
    assert reason(source.handle(said(wrong), 2.0)) == "transport"
    play(source, [(3, said(ABORT), [CLEAN, LeaseEnded("r1", "aborted")])])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ranges": (TokenRange(0, 5),)}, "out_of_range"),
        ({"ranges": (TokenRange(7, 5),)}, "out_of_range"),
        ({"num_tokens": 13, "ranges": (TokenRange(0, 13),)}, "out_of_range"),
    ],
)
def test_ranges_that_cannot_be_are_refused(source, changed, expected):
    play(source, GRANTED[:-1])
    assert reason(source.handle(said(msgspec.structs.replace(CLAIM, **changed)), 1.0)) == expected


def test_who_has_not_been_reached_begins_anew(source):
    play(source, [(0, LEASE, [])])
    (refused, _) = source.handle(said(CLAIM), 1.0)
    assert (refused.message.reason, refused.message.claim_id) == ("unreachable", "")


@pytest.mark.parametrize(
    "changed", [{"direction": Direction.WRITE}, {"strategy": Strategy.PACK, "slot_bytes": 1}], ids=["pushed", "packed"]
)
@pytest.mark.parametrize("lease", [LEASE, GROWING], ids=["computed", "growing"])
def test_a_share_of_something_else_is_refused(source, changed, lease):
    play(source, [(0, lease, []), *REACHED])
    assert reason(source.handle(said(msgspec.structs.replace(CLAIM, **changed)), 1.0)) == "malformed"
    play(source, [(1, Tick(), [])])
