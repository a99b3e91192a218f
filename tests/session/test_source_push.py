"""The source of a push: it writes once, says how far it is, and keeps its blocks until its ticket has ended."""

import msgspec
import pytest
from playbook import play
from session_cases import MODEL, OTHER_TARGET, REFERENCE, reason, said, source_session
from session_cases import SOURCE_LAYOUT as LAYOUT
from session_cases import TARGET as THEM
from session_cases import TARGET_LAYOUTS as TARGETS
from session_cases import TARGET_OFFER as OFFER

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import NOTHING, DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Cancel, Connect, Count, Digest, Disconnect, DropDigest, LeaseEnded, Post, Reply
from kvferry.session.events import (
    Digested,
    LeaseRequest,
    LeaseWithdrawn,
    PeerConnected,
    PeerMoved,
    PeerUnreachable,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.session.source.direct_write import DirectWrite
from kvferry.session.source.early_messages import MAX_ABORTED, MAX_EARLY_AND_ABORTED
from kvferry.session.source.session import SourceSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, tombstone_s=60.0, idle_peer_s=100.0)
LEASE = LeaseRequest("r1", "l1", ((3, 5),), 7)
CLAIM = m.Claim(THEM, "c1", REFERENCE, 6, (0,), Direction.WRITE, ((2,),), (TokenRange(0, 6),))
KEY = ClaimKey("l1", THEM, "c1")
TICKET = SlotKey(KEY, 0, 0)
GRANT, CANCEL = Reply("x", m.Grant("c1", ())), Cancel(TICKET)
ABORT = m.Abort(THEM, "c1", "l1")
CLEAN, UNCLEAN = Reply("x", m.Aborted("c1", "epoch-1")), Reply("x", m.Aborted("c1", "epoch-1", is_clean=False))
LANDED = m.Landed(THEM, "c1", "l1")
NUM_BYTES = 6 * MODEL.bytes_per_token


@pytest.fixture
def source() -> SourceSession:
    return source_session(TIMING)


MET = [
    (0, LEASE, []),
    (0, said(OFFER), [Connect(THEM, OFFER)]),
    (0, PeerConnected(THEM, "shm", "shm 9 GB/s"), [Reply("x", m.Reached("shm", "shm 9 GB/s"))]),
]
WRITING = [*MET, (1, said(CLAIM), [GRANT, Post])]
FREE, VALID = LeaseEnded("r1", "done"), Reply("x", m.Valid("c1"))
ENDED = [Reply, VALID]
STATES = tuple(state.name for state in LAYOUT.states[:2])
SUBJECT = Subject(DigestPolicy.FULL, 0, (Part(STATES, (Span(0, 2), Span(0, 4)), ALL_TOKENS, TokenRange(0, 6)),))
TWO = describe(MODEL, EngineShape(2, 1, 8, 4, "head-major"), 1 << 30)


def test_a_cache_is_written_and_valid(source):
    _, post = play(source, WRITING)
    assert (post.key, post.direction, post.copies.num_bytes) == (TICKET, Direction.WRITE, NUM_BYTES)
    written = m.Written("c1", NUM_BYTES, len(post.copies))
    play(source, [(2, TicketEnded(TICKET, ""), [Reply("x", written), VALID, FREE])])
    assert source.num_live() == 0


def test_a_target_that_asks_is_told_that_bytes_move(source):
    """Not that they do where they do not: it gives up a write that hangs."""
    queued = Reply("x", m.Queued("c1"))
    play(source, [*WRITING, (2, said(CLAIM), [GRANT]), (3, PeerMoved(OTHER_TARGET), []), (3, said(CLAIM), [GRANT])])
    play(source, [(4, PeerMoved(THEM), []), (4, said(CLAIM), [queued]), (5, said(CLAIM), [GRANT])])
    play(source, [(6, PeerMoved(THEM), []), (7, TicketEnded(TICKET, ""), [*ENDED, FREE]), (8, PeerMoved(THEM), [])])


def test_a_write_that_hangs_beside_others_is_given_up_in_the_end():
    """What moves to its target are their bytes."""
    timing = Timing(lease_s=10.0, hold_s=30.0, idle_peer_s=1000.0)
    source, told = source_session(timing), []
    play(source, WRITING)
    for now in range(2, 60):
        play(source, [(now, said(m.Renew(THEM, ("l1",))), [Reply]), (now, PeerMoved(THEM), [])])
        (answer,) = play(source, [(now, said(CLAIM), [Reply])])
        told += [now] if isinstance(answer.message, m.Queued) else []
    assert told == list(range(2, 32))


def test_a_ticket_that_ends_is_progress_of_the_write_itself():
    write = DirectWrite(KEY, "x", None, [], uses={TICKET: None, SlotKey(KEY, 1, 0): None}, moving_since=5.0)
    assert list(write.handle(TicketEnded(TICKET, ""))) == []
    assert write.moving_since < 0
    assert isinstance(write.status(), m.Queued)
    assert isinstance(write.status(), m.Grant)


def two_readers(source, subject=NOTHING):
    """The claims of two ranks, both being written."""
    play(source, [MET[0]])
    parties = [m.Party("d0", "epoch-9", rank) for rank in (0, 1)]
    for party in parties:
        offer = msgspec.structs.replace(OFFER, party=party, layouts=TWO)
        claim = msgspec.structs.replace(CLAIM, party=party, readers=(0, 1), subject=subject)
        play(source, [(0, said(offer), [Connect]), (0, PeerConnected(party, "shm", ""), [Reply])])
        play(source, [(1, said(claim), [GRANT, Post])])
    return [SlotKey(ClaimKey("l1", party, "c1"), 0, 0) for party in parties]


def test_the_end_of_a_write_is_repeated_when_the_lease_is_over(source):
    _, post = play(source, WRITING)
    play(source, [(2, TicketEnded(TICKET, ""), [*ENDED, FREE])])
    forgotten = source.next_deadline()
    written = m.Written("c1", NUM_BYTES, len(post.copies))
    renewed = Reply("x", m.Renewed(()))
    play(source, [(3, said(CLAIM, "y"), [Reply("y", written)]), (3, said(m.Renew(THEM, ("l1",))), [renewed])])
    play(source, [(4, said(LANDED), [VALID]), (5, said(LANDED), [VALID]), (6, said(ABORT), [CLEAN])])
    assert source.next_deadline() == forgotten


def test_another_claim_of_what_is_written_is_none_of_it(source):
    play(source, [*WRITING, (2, TicketEnded(TICKET, ""), [*ENDED, FREE])])
    fields = {each: getattr(CLAIM, each) for each in CLAIM.__struct_fields__}
    for changes in ({"claim_id": "c2"}, {"party": OTHER_TARGET}, {"direction": Direction.READ}):
        commands = source.handle(said(m.Claim(**fields | changes)), 3.0)
        assert not any(isinstance(each, Post) for each in commands)
        if "direction" not in changes:
            assert reason(commands) == "expired"


def test_what_is_written_is_digested_at_once_and_the_reader_told(source):
    """It may ask meanwhile."""
    claim = msgspec.structs.replace(CLAIM, subject=SUBJECT)
    play(source, [*MET, (1, said(claim), [GRANT, Post])])
    *_, digest = play(source, [(2, TicketEnded(TICKET, ""), [Reply, Digest])])
    assert digest.key == KEY
    values = (b"12345678", b"abcdefgh")
    play(source, [(3, said(LANDED, "y"), [Reply("y", m.Renewed(()))])])
    play(source, [(4, Digested(KEY, values), [Reply("y", m.Valid("c1", values)), FREE])])


@pytest.mark.parametrize("is_there", [True, False], ids=["before its end", "after it"])
def test_what_is_written_is_digested_meanwhile(source, is_there):
    sampled, values = Subject(DigestPolicy.SAMPLED, 1, SUBJECT.parts), (b"12345678", b"abcdefgh")
    claim = msgspec.structs.replace(CLAIM, subject=sampled)
    play(source, [*MET, (1, said(claim), [GRANT, Post]), (1, Tick(), [Digest])])
    valid, digested = [Reply("x", m.Valid("c1", values)), FREE], Digested(KEY, values)
    if is_there:
        play(source, [(2, digested, []), (3, TicketEnded(TICKET, ""), [Reply, *valid])])
    else:
        play(source, [(2, TicketEnded(TICKET, ""), [Reply]), (3, digested, valid)])


def test_the_end_of_one_write_says_nothing_of_another_that_is_digested(source):
    """Neither while the lease lives nor afterwards, when its blocks may be another request's."""
    both = two_readers(source, SUBJECT)
    play(source, [(2, TicketEnded(TICKET, ""), [Reply, Digest]), (3, TicketEnded(both[1], ""), [Reply, Digest])])
    play(source, [(4, LeaseWithdrawn("r1"), [LeaseEnded, DropDigest, Reply, Count, DropDigest, Reply, Count])])


def test_a_write_that_ends_after_its_lease_begins_no_digest_of_another(source):
    both = two_readers(source, SUBJECT)
    play(source, [(2, TicketEnded(TICKET, ""), [Reply, Digest])])
    told = [Cancel(both[1]), Reply, Count, DropDigest(KEY), Reply, Count]
    play(source, [(3, LeaseWithdrawn("r1"), told), (4, TicketEnded(both[1], ""), [LeaseEnded("r1", "withdrawn")])])


def test_a_claim_repeated_after_the_end_of_its_lease_is_refused(source):
    play(source, [*WRITING, (2, LeaseWithdrawn("r1"), [CANCEL, Reply, Count])])
    assert reason(play(source, [(3, said(CLAIM), [Reply, Count])])) == "expired"


def test_what_is_written_for_a_reader_that_has_left_is_not_digested(source):
    claim = msgspec.structs.replace(CLAIM, subject=SUBJECT)
    play(source, [*MET, (1, said(claim), [GRANT, Post]), (2, said(ABORT), [CANCEL])])
    play(source, [(3, TicketEnded(TICKET, ""), [CLEAN, LeaseEnded("r1", m.Reason.ABORTED)])])


def test_of_two_readers_the_last_that_is_written_to_frees_the_blocks(source):
    _, other = two_readers(source)
    play(source, [(2, TicketEnded(other, ""), ENDED), (3, TicketEnded(TICKET, ""), [*ENDED, FREE])])


def test_a_claim_said_twice_is_written_once(source):
    play(
        source,
        [
            *WRITING,
            (2, said(CLAIM, "y"), [Reply("y", GRANT.message)]),
            (3, TicketEnded(TICKET, ""), [Reply, Reply, FREE]),
        ],
    )


def test_who_says_its_claim_again_is_answered_where_it_is_by_then(source):
    play(source, [*WRITING, (2, said(CLAIM, "y"), [Reply("y", GRANT.message)])])
    words = source.handle(TicketEnded(TICKET, ""), 3)
    assert [status.peer for status in words if isinstance(status, Reply)] == ["y", "y"]


def test_a_repeated_claim_keeps_its_lease(source):
    play(source, [*WRITING, (9, said(CLAIM), [GRANT]), (12, Tick(), []), (19.5, Tick(), [CANCEL, Reply, Count])])


def test_an_offer_said_twice_connects_once(source):
    again = Reply("y", m.Reached("shm", "shm 9 GB/s"))
    play(source, [*MET[:2], (0, said(OFFER), []), *MET[2:], (1, said(OFFER, "y"), [again])])


def test_a_target_that_cannot_be_reached_is_told_and_forgotten(source):
    steps = [*MET[:2], (1, PeerUnreachable(THEM, "shm: other host"), [Disconnect(THEM), Reply, Count])]
    assert reason(play(source, steps)) == "unreachable"
    play(source, [(2, said(OFFER), [Connect(THEM, OFFER)])])


def test_a_failed_write_is_told_again_and_again(source):
    failed = [(2, TicketEnded(TICKET, "peer reset"), [Reply, Count]), (3, said(CLAIM), [Reply])]
    assert reason(play(source, [*WRITING, *failed])) == "transport"
    play(source, [(4, said(ABORT), [UNCLEAN, LeaseEnded("r1", m.Reason.ABORTED)])])


@pytest.mark.parametrize("error", ["", "cancelled"])
def test_an_abort_is_acknowledged_and_the_blocks_come_back_when_the_ticket_has_ended(source, error):
    play(source, [*WRITING, (2, said(ABORT), [CANCEL]), (3, said(ABORT), []), (4, said(CLAIM), [Reply, Count])])
    assert source.num_live() == 1
    status = UNCLEAN if error else CLEAN
    play(
        source,
        [(5, TicketEnded(TICKET, error), [status, LeaseEnded("r1", m.Reason.ABORTED)]), (6, said(ABORT), [status])],
    )
    assert source.num_live() == 0


ENDS = {
    "withdrawn": (2, LeaseWithdrawn("r1")),
    "expired": (11.5, Tick()),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_lease_that_ends_while_it_is_written_keeps_its_blocks_and_is_never_valid(source, how):
    play(source, WRITING)
    commands = play(source, [(*ENDS[how], [CANCEL, Reply, Count])])
    assert reason(commands) == "expired"
    play(source, [(12, LeaseWithdrawn("r1"), []), (12, said(LANDED), [Reply, Count])])
    # Longer than its record would be kept.
    play(source, [(100, Tick(), []), (200, Tick(), [])])
    assert source.num_live() == 1
    *counted, freed = source.handle(TicketEnded(TICKET, ""), 201)
    assert freed == LeaseEnded("r1", how)
    assert counted == ([Count("leases_expired", "expired")] if how == "expired" else [])
    play(source, [(202, said(ABORT), [CLEAN]), (203, said(CLAIM), [Reply, Count])])
    # Its record is forgotten: a claim waits for a lease that is not known yet.
    play(source, [(270, Tick(), []), (270, said(CLAIM), [])])


def test_a_claim_that_arrives_after_its_abort_is_never_written(source):
    """Another reader has claimed the lease, so the abort does not end it."""
    other = m.Claim(OTHER_TARGET, "c2", REFERENCE, 6, (0, 1))
    play(source, [*MET, (1, said(other), [Reply]), (2, said(ABORT), [CLEAN])])
    assert reason(play(source, [(3, said(CLAIM), [Reply, Count])])) == "aborted"


def test_an_abort_that_arrives_before_the_lease_is_known_is_remembered(source):
    play(source, [*MET[1:], (1, said(ABORT), [CLEAN]), (2, said(CLAIM), [Reply, Count])])
    play(source, [(3, LEASE, [CLEAN, LeaseEnded("r1", m.Reason.ABORTED)]), (4, said(CLAIM), [Reply, Count])])


def test_no_abort_is_acknowledged_that_cannot_be_remembered(source):
    for number in range(MAX_ABORTED):
        assert source.handle(said(m.Abort(THEM, f"c{number}", "l9")), 0)
    assert source.handle(said(m.Abort(THEM, "one more", "l9")), 1) == []
    assert source.handle(said(m.Abort(THEM, "one more", "l9")), 61) != []


def test_one_claim_is_aborted_of_so_many_leases_only_as_there_is_room_for(source):
    for number in range(MAX_EARLY_AND_ABORTED):
        assert source.handle(said(m.Abort(THEM, "c0", f"l{number}")), 0)
    assert source.handle(said(m.Abort(THEM, "c0", "one more")), 1) == []
    assert source.handle(said(m.Abort(THEM, "c0", "l0")), 1) != []
    assert source.handle(said(m.Abort(THEM, "c0", "one more")), 61) != []


def test_a_lease_with_the_id_of_one_that_is_still_written_from_ends_at_once(source):
    """What is written out of the older one's blocks would not find it any more, and the blocks were never free."""
    play(source, [*WRITING, (2, LeaseWithdrawn("r1"), [CANCEL, Reply, Count])])
    play(source, [(3, LeaseRequest("r2", "l1", ((4, 6),), 7), [LeaseEnded("r2", "lease_id_in_use")])])
    play(source, [(4, TicketEnded(TICKET, "cancelled"), [LeaseEnded("r1", "withdrawn")])])
    play(source, [(5, LeaseRequest("r2", "l1", ((4, 6),), 7), [])])


def test_landed_before_it_is_written_is_refused(source):
    assert reason(play(source, [*WRITING, (2, said(LANDED), [Reply, Count])])) == "not_claimed"


HOSTILE = {
    "out of range": ({"block_tables": ((99,),)}, "out_of_range"),
    "negative": ({"block_tables": ((-1,),)}, "out_of_range"),
    "too few": ({"block_tables": ((),)}, "out_of_range"),
    "no tables": ({"block_tables": ()}, "out_of_range"),
    "no ranges": ({"ranges": ()}, "out_of_range"),
    "more tokens than claimed": ({"ranges": (TokenRange(0, 7),)}, "out_of_range"),
    "backwards": ({"ranges": (TokenRange(9, 6),)}, "out_of_range"),
    "negative range": ({"ranges": (TokenRange(-4, 6),)}, "out_of_range"),
    "more tokens than there are": ({"num_tokens": 8, "ranges": (TokenRange(0, 8),)}, "out_of_range"),
    "another rank": ({"party": OTHER_TARGET}, "unreachable"),
    "another start": ({"party": m.Party("d0", "epoch-8", 0)}, "unreachable"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_claim_that_makes_no_sense_writes_nothing(source, name):
    changes, why = HOSTILE[name]
    fields = {each: getattr(CLAIM, each) for each in CLAIM.__struct_fields__} | changes
    assert reason(play(source, [*MET, (1, said(m.Claim(**fields)), [Reply, Count])])) == why
    play(source, [(2, said(CLAIM), [GRANT, Post])])


def test_offers_that_make_no_sense_are_refused(source):
    no_such_rank = m.TargetOffer(OTHER_TARGET, TARGETS, (), m.Probe(0, 0, 0))
    assert reason(play(source, [(0, said(no_such_rank), [Reply, Count])])) == "malformed"
    other = m.TargetOffer(THEM, TARGETS, (), m.Probe(0, 0, 0))
    assert reason(play(source, [*MET, (1, said(other), [Reply, Count])])) == "malformed"
    play(source, [(2, said(CLAIM), [GRANT, Post])])


def test_a_target_that_meets_us_again_may_judge_otherwise_whether_we_are_near(source):
    near = msgspec.structs.replace(OFFER, staging=b"here")
    play(source, [*MET, (1, said(near), [Disconnect(THEM), Connect(THEM, near)]), MET[2]])
    play(source, [(1, said(near), MET[2][2]), (2, said(CLAIM), [GRANT, Post])])
    # Not while it is written to.
    play(source, [(3, said(OFFER), MET[2][2]), (3, TicketEnded(TICKET, ""), [*ENDED, FREE])])


NEW_ACCESS = (m.TransportOffer("shm", b"here, by another key", ""),)


def test_a_target_that_meets_us_again_may_give_us_other_access(source):
    """What was connected by the older one is of no use any more, nor is a claim that knows of nothing else."""
    newer = msgspec.structs.replace(OFFER, transports=NEW_ACCESS, handshake=1)
    play(source, [*MET, (1, said(newer), [Disconnect(THEM), Connect(THEM, newer)])])
    reached = Reply("x", m.Reached("shm", "shm 9 GB/s", handshake=1))
    play(source, [(1, MET[2][1], [reached]), (1, said(OFFER), []), (1, said(newer), [reached])])
    assert reason(play(source, [(2, said(CLAIM), [Reply, Count])])) == "unreachable"
    play(source, [(2, said(msgspec.structs.replace(CLAIM, handshake=1)), [GRANT, Post])])


def test_an_older_offer_that_judges_otherwise_whether_we_are_near_changes_nothing(source):
    near = msgspec.structs.replace(OFFER, staging=b"here", handshake=1)
    play(source, [MET[0], (0, said(near), [Connect(THEM, near)]), (0, MET[2][1], [Reply])])
    play(source, [(1, said(OFFER), MET[2][2]), (2, said(CLAIM), [GRANT, Post])])


def test_a_target_that_meets_us_again_with_the_same_access_is_answered_at_once(source):
    newer = msgspec.structs.replace(OFFER, handshake=3)
    reached = Reply("y", m.Reached("shm", "shm 9 GB/s", handshake=3))
    play(source, [*MET, (1, said(newer, "y"), [reached]), (2, said(CLAIM), [GRANT, Post])])


def test_an_older_offer_of_the_same_access_is_answered_as_well(source):
    """The target may know us by two addresses."""
    newer = msgspec.structs.replace(OFFER, handshake=3)
    answers = [Reply("y", m.Reached("shm", "shm 9 GB/s", handshake=3)), MET[2][2][0]]
    play(
        source,
        [*MET, (1, said(newer, "y"), answers[:1]), (1, said(OFFER), answers[1:]), (1, said(newer, "y"), answers[:1])],
    )


def test_an_older_offer_does_not_let_another_one_take_its_place(source):
    newer = msgspec.structs.replace(OFFER, handshake=3)
    void = msgspec.structs.replace(OFFER, transports=NEW_ACCESS, handshake=1)
    play(source, [*MET, (1, said(newer), [Reply]), (1, said(OFFER), [Reply]), (1, said(void), [])])


def test_a_handshake_gives_one_access(source):
    other = msgspec.structs.replace(OFFER, transports=NEW_ACCESS)
    assert reason(play(source, [*MET, (1, said(other), [Reply, Count])])) == "malformed"


def test_another_model_is_refused_with_every_difference(source):
    layouts = describe(attention(2, 4, 4, "float16", 4), EngineShape(1, 1, 8, 4, "head-major"), 1 << 30)
    offer = m.TargetOffer(THEM, layouts, OFFER.transports, OFFER.probe)
    play(source, [MET[0], (0, said(offer), [Connect(THEM, offer)]), MET[2]])
    commands = play(source, [(1, said(CLAIM), [Reply, Count])])
    assert reason(commands) == "incompatible"
    assert "float32 at the source, float16 at the target" in commands[0].message.found


def test_a_claim_without_a_connection_begins_anew(source):
    commands = play(source, [MET[0], (1, said(CLAIM), [Reply, Count])])
    assert reason(commands) == "unreachable"
    assert commands[0].message.claim_id == ""


def test_the_next_start_of_a_target_takes_its_place(source):
    newer = m.TargetOffer(m.Party("d0", "epoch-10", 0), TARGETS, OFFER.transports, OFFER.probe)
    play(source, [*WRITING, (2, said(newer), [Disconnect(THEM), Connect(newer.party, newer)])])


def test_an_idle_target_is_forgotten_but_not_while_it_is_written_to(source):
    play(source, [*MET, (150, Tick(), [Count, LeaseEnded]), (201, Tick(), [Disconnect(THEM)])])
    play(source, [(211, Tick(), [])])
    assert source.next_deadline() == float("inf")


def test_a_target_that_is_written_to_is_not_idle(source):
    play(source, [*WRITING, (12, Tick(), [CANCEL, Reply, Count]), (300, Tick(), []), (600, Tick(), [])])


def test_a_target_that_has_just_been_written_to_is_not_idle(source):
    """It has heard of us, and does not forget us either."""
    play(source, [*WRITING, (12, Tick(), [CANCEL, Reply, Count]), (70, TicketEnded(TICKET, ""), [Count, LeaseEnded])])
    play(source, [(269, Tick(), []), (271, Tick(), [Disconnect(THEM)])])


def test_nothing_to_write_is_written_at_once(source):
    nothing = m.Claim(THEM, "c1", REFERENCE, 0, (0,), Direction.WRITE, ((),), (TokenRange(0, 0),))
    _, post = play(source, [*MET, (1, said(nothing), [GRANT, Post])])
    assert len(post.copies) == 0
