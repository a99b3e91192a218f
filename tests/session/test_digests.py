"""Digests in both sessions: who digests when, what is compared, and what is refused."""

from dataclasses import replace

import msgspec
import pytest
from playbook import play

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange, TokenSet
from kvferry.plan.digests.subject import NO_TOKENS, DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import (
    BlocksReleased,
    Connect,
    Count,
    Digest,
    Disconnect,
    DropDigest,
    Fetched,
    FetchFailed,
    LeaseEnded,
    Post,
    Reply,
    Send,
)
from kvferry.session.events import (
    AbortRequest,
    AnswerArrived,
    Digested,
    FetchRequest,
    FrameArrived,
    LeaseProgress,
    LeaseRequest,
    LeaseWithdrawn,
    PeerConnected,
    PeerUnreachable,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey
from kvferry.session.source.completed_reads import LOOK_AFTER_S
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.session.timeouts import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, heartbeat_s=1.0, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, tombstone_s=60.0)
MODEL = attention(2, 2, 4, "float32", 4)
SOURCE_LAYOUT = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
TARGET_LAYOUTS = describe(MODEL, EngineShape(1, 1, 8, 4, "head-major"), 1 << 30)
STATES = ("model.layers.0.k", "model.layers.0.v", "model.layers.1.k", "model.layers.1.v")
PART = Part(STATES, (Span(0, 2), Span(0, 4)), ALL_TOKENS, TokenRange(0, 6))
SUBJECT = Subject(DigestPolicy.SAMPLED, 3, (PART,))
VALUES = tuple(bytes([number] * 8) for number in range(4))
SOURCE, TARGET, OTHER = m.Party("p0", "e1", 0), m.Party("d0", "e9", 0), m.Party("d0", "e9", 1)
REFERENCE = m.Reference("p0", "e1", "r1", "l1")

# --- source ---

LEASE = LeaseRequest("r1", "l1", ((3, 5),), 7)
CLAIM = FrameArrived("x", m.Claim(TARGET, "c1", REFERENCE, 6, (0,), subject=SUBJECT))
LANDED = FrameArrived("x", m.Landed(TARGET, "c1", "l1"))
KEY = ClaimKey("l1", TARGET, "c1")
VALID = Reply("x", m.Valid("c1", VALUES))
DONE = LeaseEnded("r1", "done")


def source() -> SourceSession:
    return SourceSession(SourceIdentity(SOURCE, "0.1.0", (SOURCE_LAYOUT,), (), m.Probe(0, 0, 0)), TIMING)


DIGESTING = [(0, LEASE, []), (1, CLAIM, [Reply]), (2, LANDED, [Digest])]


def test_valid_waits_for_the_digest_and_comes_with_it():
    (digest,) = play(source(), DIGESTING)
    assert digest.key == KEY
    assert sum(len(extract.numbers) for extract in digest.extracts) == len(STATES)
    play(source(), [*DIGESTING, (3, Digested(KEY, VALUES), [VALID, DONE]), (4, LANDED, [VALID]), (5, LANDED, [VALID])])


def test_a_repeated_question_is_told_that_somebody_is_here_and_answered_at_its_last_address():
    again = FrameArrived("y", LANDED.message)
    alive, valid = Reply("y", m.Renewed(())), Reply("y", m.Valid("c1", VALUES))
    play(source(), [*DIGESTING, (2.5, again, [alive]), (3, Digested(KEY, VALUES), [valid, DONE])])


def test_a_lease_that_ends_while_it_is_digested_is_not_valid():
    """Its blocks may be another request's by then."""
    session = source()
    told = [LeaseEnded("r1", "expired"), Count, DropDigest(KEY), Reply, Count]
    commands = play(session, [*DIGESTING, (12.5, Tick(), told)])
    assert [c.message.reason for c in commands if isinstance(c, Reply)] == [m.Reason.EXPIRED]
    play(session, [(12.6, Digested(KEY, VALUES), []), (13, LANDED, [Reply, Count])])


def test_a_digest_that_comes_with_the_end_of_its_lease_comes_too_late():
    commands = source_after(DIGESTING).handle(Digested(KEY, VALUES), 12.5)
    assert [c.message.reason for c in commands if isinstance(c, Reply)] == [m.Reason.EXPIRED]


def source_after(steps):
    session = source()
    play(session, steps)
    return session


def test_heartbeats_keep_a_lease_while_it_is_digested():
    renew = FrameArrived("x", m.Renew(TARGET, ("l1",)))
    steps = [(9, renew, [Reply]), (18, renew, [Reply]), (27, Digested(KEY, VALUES), [VALID, DONE])]
    play(source(), [*DIGESTING, *steps])


def test_a_lease_is_renewed_by_its_bytes_having_landed():
    steps = [(10, LANDED, [Digest]), (19, Tick(), []), (19.5, Digested(KEY, VALUES), [VALID, DONE])]
    play(source(), [*DIGESTING[:2], *steps])


@pytest.mark.parametrize(
    ("event", "freed"),
    [
        (LeaseWithdrawn("r1"), "withdrawn"),
        (FrameArrived("x", m.Abort(TARGET, "c1", "l1")), "aborted"),
    ],
)
def test_a_digest_ends_with_its_lease(event, freed):
    session = source_after(DIGESTING)
    commands = session.handle(event, 3)
    assert LeaseEnded("r1", freed) in commands
    assert DropDigest(KEY) in commands
    play(session, [(4, Digested(KEY, VALUES), [])])


def test_readers_are_digested_for_one_by_one_and_the_last_frees_the_blocks():
    both = [FrameArrived("x", m.Claim(party, "c1", REFERENCE, 6, (0, 1), subject=SUBJECT)) for party in (TARGET, OTHER)]
    other_key = ClaimKey("l1", OTHER, "c1")
    play(
        source(),
        [
            (0, LEASE, []),
            (1, both[0], [Reply]),
            (1, both[1], [Reply]),
            (2, LANDED, [Digest]),
            (2, FrameArrived("z", m.Landed(OTHER, "c1", "l1")), [Digest]),
            (3, Digested(other_key, VALUES), [Reply("z", m.Valid("c1", VALUES))]),
            (4, Digested(KEY, VALUES), [VALID, DONE]),
        ],
    )


def test_memory_that_cannot_be_read_is_a_refusal():
    commands = source_after(DIGESTING).handle(Digested(KEY, (), "no such memory"), 3)
    assert [(c.message.reason, c.message.found) for c in commands if isinstance(c, Reply)] == [
        (m.Reason.DIGEST, "no such memory")
    ]


@pytest.mark.parametrize(
    "part",
    [
        replace(PART, states=("model.layers.7.k",)),
        replace(PART, box=(Span(0, 2),)),
        replace(PART, box=(Span(0, 2), Span(0, 5))),
        replace(PART, seen=TokenRange(0, 8)),
        replace(PART, seen=NO_TOKENS),
        replace(PART, states=STATES * 2),
        replace(PART, tokens=TokenSet(1 << 20, (Span((1 << 20) - 1, 1 << 20),))),
    ],
)
def test_a_subject_that_does_not_fit_the_record_is_refused_and_the_lease_goes_on(part):
    wrong = msgspec.structs.replace(CLAIM.message, subject=Subject(DigestPolicy.FULL, 0, (part,)))
    session = source_after([(0, LEASE, []), (1, FrameArrived("x", wrong), [Reply])])
    for now in (2, 3):
        assert not session.handle(Tick(), now)
        commands = session.handle(LANDED, now)
        assert [c.message.reason for c in commands if isinstance(c, Reply)] == [m.Reason.OUT_OF_RANGE]
    play(session, [(4, FrameArrived("x", m.Abort(TARGET, "c1", "l1")), [Reply, LeaseEnded("r1", "aborted")])])


def test_a_digest_that_nobody_asked_for_changes_nothing():
    peer = PeerKey("tcp://127.0.0.1:1", "d0", "e9")
    keys = ClaimKey("l9", TARGET, "c1"), ClaimKey("l1", OTHER, "c1"), ReadKey("c1", peer)
    play(source(), [*DIGESTING, *((3, Digested(key, VALUES), []) for key in keys)])


SOON = 1 + LOOK_AFTER_S
LOOKING = [*DIGESTING[:2], (SOON, Tick(), [Digest])]


def test_a_source_digests_while_the_bytes_move_and_answers_at_once():
    session = source()
    play(session, DIGESTING[:2])
    assert session.next_deadline() == SOON
    (digest,) = play(session, [(1 + LOOK_AFTER_S / 2, Tick(), []), (SOON, Tick(), [Digest])])
    assert digest.key == KEY
    assert session.next_deadline() > SOON
    play(session, [(1.5, Tick(), []), (1.6, Digested(KEY, VALUES), [])])
    play(session, [(2, CLAIM, [Reply]), (3, Tick(), []), (4, LANDED, [VALID, DONE]), (5, LANDED, [VALID])])


def test_all_bytes_are_looked_at_only_when_somebody_asks():
    """That is as much work as to move them, and those that are asked for go first."""
    claim = msgspec.structs.replace(CLAIM.message, subject=replace(SUBJECT, policy=DigestPolicy.FULL))
    play(source(), [(0, LEASE, []), (1, FrameArrived("x", claim), [Reply]), (SOON, Tick(), []), (2, LANDED, [Digest])])


def test_a_repeated_claim_with_another_subject_is_answered_like_the_first():
    other = msgspec.structs.replace(CLAIM.message, subject=replace(SUBJECT, parts=(replace(PART, states=STATES[:2]),)))
    (digest,) = play(source(), [*DIGESTING[:2], (1, FrameArrived("x", other), [Reply]), (2, LANDED, [Digest])])
    assert sum(len(extract.numbers) for extract in digest.extracts) == len(STATES)


def test_a_lease_that_an_engine_opens_twice_is_not_looked_at():
    play(source(), [*DIGESTING[:2], (1, LEASE, []), (SOON, Tick(), [])])


def test_who_asks_during_an_early_digest_is_answered_when_it_is_there():
    alive, renewed = Reply("x", m.Renewed(())), FrameArrived("x", m.Renew(TARGET, ("l1",)))
    play(source(), [*LOOKING, (10, LANDED, []), (19, LANDED, [alive]), (19.5, Digested(KEY, VALUES), [VALID, DONE])])
    play(source(), [*LOOKING, (9, renewed, [Reply]), (18, Digested(KEY, VALUES), []), (18.5, LANDED, [VALID, DONE])])


def test_an_early_digest_that_cannot_be_made_is_tried_again_when_somebody_asks():
    session = source_after([*LOOKING, (2, Digested(KEY, (), "no such memory"), []), (3, LANDED, [Digest])])
    play(session, [(4, Digested(KEY, VALUES), [VALID, DONE])])


def test_who_has_asked_before_is_digested_for_once():
    play(source(), [*DIGESTING[:2], (1, LANDED, [Digest]), (SOON, Tick(), [])])
    play(source(), [*DIGESTING[:2], (1, LANDED, [Digest]), (1, Digested(KEY, VALUES), [VALID, DONE]), (2, Tick(), [])])


def test_a_reader_that_is_done_is_not_looked_at_again_while_others_read():
    both = [FrameArrived("x", m.Claim(party, "c1", REFERENCE, 6, (0, 1), subject=SUBJECT)) for party in (TARGET, OTHER)]
    claimed = [(0, LEASE, []), (1, both[0], [Reply]), (1, both[1], [Reply])]
    session = source_after([*claimed, (1, LANDED, [Digest]), (1, Digested(KEY, VALUES), [VALID])])
    (digest,) = play(session, [(SOON, Tick(), [Digest])])
    assert digest.key == ClaimKey("l1", OTHER, "c1")
    play(session, [(2, Tick(), [])])


def test_a_repeated_claim_changes_nothing_about_its_digest():
    session = source()
    play(session, [*DIGESTING[:2], (1 + LOOK_AFTER_S / 2, CLAIM, [Reply]), (SOON, Tick(), [Digest])])
    for state in ([], [(2, Digested(KEY, VALUES), [])]):
        play(session, [*state, (2, CLAIM, [Reply])])
        assert session.next_deadline() == 2 + TIMING.lease_s


def test_an_early_digest_ends_with_its_lease_and_nobody_is_refused_who_has_not_asked():
    withdrawn = LeaseWithdrawn("r1")
    play(source(), [*LOOKING, (2, withdrawn, [LeaseEnded, DropDigest(KEY)]), (2, Digested(KEY, VALUES), [])])
    play(source(), [*DIGESTING[:2], (1, withdrawn, [LeaseEnded]), (2, Tick(), [])])


def test_what_was_digested_before_a_lease_ended_makes_nothing_valid():
    session = source_after([*LOOKING, (2, Digested(KEY, VALUES), []), (3, LeaseWithdrawn("r1"), [LeaseEnded])])
    assert [c.message.reason for c in session.handle(LANDED, 4) if isinstance(c, Reply)] == [m.Reason.EXPIRED]


@pytest.mark.parametrize("policy", [DigestPolicy.SAMPLED, DigestPolicy.OFF])
def test_nothing_is_looked_at_of_what_is_not_asked_for(policy):
    claim = msgspec.structs.replace(CLAIM.message, subject=Subject(policy, 0, ()))
    play(source(), [(0, LEASE, []), (1, FrameArrived("x", claim), [Reply]), (SOON, Tick(), [])])


def test_nothing_is_looked_at_that_is_still_computed():
    growing, all_of_it = replace(LEASE, is_growing=True), LeaseProgress("r1", ((3, 5),), 7)
    some = [(0, growing, []), (0, LeaseProgress("r1", ((3, 5),), 6), []), (1, CLAIM, [Reply]), (SOON, Tick(), [])]
    play(source(), [*some, (2, LANDED, [Digest])])
    play(source(), [(0, growing, []), (0, CLAIM, [Reply]), (1, all_of_it, [Reply]), (SOON, Tick(), [Digest])])


# --- target ---

PEER = PeerKey("tcp://127.0.0.1:1", "p0", "e1")
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 6),))
READ = ReadKey("q1", PEER)
ABORT = Send(PEER, m.Abort(TARGET, "q1", "l1"))


def target(policy=DigestPolicy.SAMPLED, layouts=TARGET_LAYOUTS) -> TargetSession:
    return TargetSession(TargetIdentity(TARGET, "0.1.0", layouts, policy), TIMING)


def answer(message):
    return AnswerArrived(PEER, message)


def meeting(layout=SOURCE_LAYOUT, claim=(Send,)):
    return [
        (0.0, WANTED, [Send]),
        (0.1, answer(m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(layout))), [Send]),
        (0.2, answer(m.Offer(SOURCE, layout, (), m.Probe(0, 0, 0))), [Connect]),
        (0.3, PeerConnected(PEER, "shm", ""), claim),
    ]


POSTED = [*meeting(), (0.4, answer(m.Grant("q1", ((3, 5),))), [Post])]
ENDED = [*POSTED, (0.6, TicketEnded(READ, ""), [Send, Digest])]
THEIRS = answer(m.Valid("q1", VALUES))
OURS = Digested(READ, VALUES)


def claim_and_digest(policy=DigestPolicy.SAMPLED):
    session = target(policy)
    (claim,), (_, digest) = play(session, meeting()), play(session, ENDED[len(meeting()) :])
    return claim.message, digest


@pytest.mark.parametrize("policy", [DigestPolicy.SAMPLED, DigestPolicy.FULL])
def test_what_is_asked_for_is_what_has_landed(policy):
    claim, digest = claim_and_digest(policy)
    assert claim.subject.policy is policy
    assert claim.subject.parts == (PART,)
    assert digest.key == READ
    full = MODEL.bytes_per_token * 6
    assert (sum(extract.num_bytes for extract in digest.extracts) == full) == (policy is DigestPolicy.FULL)


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_equal_digests_are_needed_whoever_is_first(order):
    (fetched,) = play(target(), [*ENDED, (0.7, order[0], []), (0.8, order[1], [Fetched])])
    assert fetched.report.verified == "sampled"


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_difference_names_the_states_and_fails_the_fetch(ours_first):
    wrong = (*VALUES[:2], b"differen", VALUES[3])
    order = [Digested(READ, wrong), THEIRS] if ours_first else [THEIRS, Digested(READ, wrong)]
    commands = play(
        target(),
        [*ENDED, (0.7, order[0], []), (0.8, order[1], [Count("fetches_failed", "digest"), FetchFailed, Send, Free])],
    )
    error = commands[1].error
    assert error.reason is m.Reason.DIGEST
    assert "1 of 4 states differ: model.layers.1.k" in str(error)


Free = BlocksReleased


@pytest.mark.parametrize("theirs", [(), VALUES[:3], (*VALUES, VALUES[0])])
def test_too_few_or_too_many_values_are_no_proof(theirs):
    commands = play(
        target(), [*ENDED, (0.7, OURS, []), (0.8, answer(m.Valid("q1", theirs)), [Count, FetchFailed, Send, Free])]
    )
    assert "4 of 4 states differ" in str(commands[1].error)


def test_values_that_were_not_asked_for_are_no_proof_either():
    steps = [*POSTED, (0.6, TicketEnded(READ, ""), [Send]), (0.7, THEIRS, [Count, FetchFailed, Send, Free])]
    play(target(DigestPolicy.OFF), steps)


def test_without_a_digest_the_lease_alone_decides():
    steps = [*POSTED, (0.6, TicketEnded(READ, ""), [Send]), (0.7, answer(m.Valid("q1")), [Fetched])]
    (fetched,) = play(target(DigestPolicy.OFF), steps)
    assert fetched.report.verified == "off"


def test_what_cannot_be_told_ends_the_fetch_before_it_is_claimed(monkeypatch):
    monkeypatch.setattr("kvferry.plan.digests.subject.MAX_PARTS", 0)
    commands = play(target(), meeting(claim=[Count("fetches_failed", "digest"), FetchFailed, ABORT, BlocksReleased]))
    assert "too many parts" in str(commands[1].error)


@pytest.mark.parametrize("values", [VALUES, VALUES[::-1]], ids=["equal", "different"])
def test_what_the_source_says_before_its_bytes_are_there_is_compared_all_the_same(values):
    """It writes, so it knows before we do."""
    session = TargetSession(
        TargetIdentity(TARGET, "0.1.0", TARGET_LAYOUTS, DigestPolicy.FULL, direction=Direction.WRITE), TIMING
    )
    play(session, [*meeting()[:2], (0.2, meeting()[2][1], [Send]), (0.3, answer(m.Reached("shm", "")), [Send])])
    play(session, [(0.4, THEIRS, []), (0.5, answer(m.Written("q1", 768, 12)), [Digest])])
    commands = session.handle(Digested(READ, values), 0.6)
    assert isinstance(commands[0], Fetched) == (values == VALUES)
    assert any(isinstance(each, FetchFailed) for each in commands) == (values != VALUES)


def test_an_unanswered_question_is_repeated():
    session = target()
    landed, _ = play(session, ENDED)
    assert landed in session.handle(Tick(), 1.2)
    play(session, [(1.3, OURS, [])])
    assert landed in session.handle(Tick(), 1.9)


def test_once_the_source_has_spoken_it_is_not_needed_any_more():
    """Our own digest may take longer than the source lives."""
    session = target()
    play(session, [*ENDED, (0.7, THEIRS, []), (10.0, Tick(), []), (15.0, OURS, [Fetched])])


def test_the_lease_is_renewed_until_the_source_has_spoken():
    session = target()
    play(session, [*ENDED, (0.7, OURS, [])])
    assert Send(PEER, m.Renew(TARGET, ("l1",))) in session.handle(Tick(), 1.5)


@pytest.mark.parametrize("heard", [[], [(0.65, THEIRS, [])]])
def test_a_fetch_that_fails_drops_its_digest(heard):
    failing = [Count, FetchFailed, DropDigest(READ), ABORT, BlocksReleased]
    play(target(), [*ENDED, *heard, (0.7, AbortRequest("q1"), failing), (0.8, OURS, [])])


def test_a_fetch_that_fails_after_its_digest_has_nothing_to_drop():
    play(target(), [*ENDED, (0.65, OURS, []), (0.7, AbortRequest("q1"), [Count, FetchFailed, ABORT, BlocksReleased])])


def test_a_lost_peer_ends_a_digest():
    play(
        target(),
        [*ENDED, (0.7, PeerUnreachable(PEER, "gone"), [Count, FetchFailed, DropDigest, BlocksReleased, Disconnect])],
    )


def test_memory_of_ours_that_cannot_be_read_fails_the_fetch():
    session = target()
    commands = play(
        session, [*ENDED, (0.7, Digested(READ, (), "no such memory"), [Count, FetchFailed, DropDigest, Send, Free])]
    )
    assert "no such memory" in str(commands[1].error)


def test_digests_of_others_and_repeated_ones_change_nothing():
    other = PeerKey("tcp://127.0.0.1:2", "p0", "e1")
    keys = ReadKey("q9", PEER), ReadKey("q1", other), KEY
    play(target(), [*ENDED, *((0.7, Digested(key, VALUES), []) for key in keys), (0.8, OURS, []), (0.9, OURS, [])])


def on_device(layout):
    return replace(layout, regions=tuple(replace(region, kind="vram") for region in layout.regions))


@pytest.mark.parametrize("side", ["source", "target"])
def test_device_memory_is_not_sampled_and_the_report_says_so(side):
    ours = tuple(map(on_device, TARGET_LAYOUTS)) if side == "target" else TARGET_LAYOUTS
    theirs = on_device(SOURCE_LAYOUT) if side == "source" else SOURCE_LAYOUT
    steps = [
        *meeting(theirs),
        *POSTED[4:],
        (0.6, TicketEnded(READ, ""), [Send]),
        (0.7, answer(m.Valid("q1")), [Fetched]),
    ]
    (fetched,) = play(target(layouts=ours), steps)
    assert fetched.report.verified == "unreadable"


def test_device_memory_is_never_digested_in_full():
    commands = play(
        target(DigestPolicy.FULL), meeting(on_device(SOURCE_LAYOUT), [Count, FetchFailed, Send, BlocksReleased])
    )
    assert "digest policy full needs memory that the CPU can read; found: memory of kind vram" in str(commands[1].error)


def test_a_rank_without_any_work_says_what_its_engine_does():
    nothing = replace(TARGET_LAYOUTS[0], states=(), placements=())
    session = TargetSession(TargetIdentity(OTHER, "0.1.0", (TARGET_LAYOUTS[0], nothing), DigestPolicy.FULL), TIMING)
    _, fetched = play(session, meeting(claim=[Send, Fetched]))
    assert fetched.report.verified == "full"
