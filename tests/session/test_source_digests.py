"""Digests of a source: when it digests, whom it answers, and what it refuses."""

from dataclasses import replace

import msgspec
import pytest
from playbook import play
from session_cases import OTHER_TARGET, PART, REFERENCE, STATES, SUBJECT, TARGET, VALUES, said, source_session

from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenRange, TokenSet
from kvferry.plan.digests.subject import NO_TOKENS, DigestPolicy, Subject
from kvferry.session.commands import (
    Count,
    Digest,
    DropDigest,
    LeaseEnded,
    Reply,
)
from kvferry.session.events import (
    Digested,
    LeaseProgress,
    LeaseRequest,
    LeaseWithdrawn,
    Tick,
)
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey
from kvferry.session.source.session import SourceSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, heartbeat_s=1.0, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, tombstone_s=60.0)

LEASE = LeaseRequest("r1", "l1", ((3, 5),), 7)
CLAIM = said(m.Claim(TARGET, "c1", REFERENCE, 6, (0,), subject=SUBJECT))
LANDED = said(m.Landed(TARGET, "c1", "l1"))
KEY = ClaimKey("l1", TARGET, "c1")
VALID = Reply("x", m.Valid("c1", VALUES))
DONE = LeaseEnded("r1", "done")


def source() -> SourceSession:
    return source_session(TIMING)


DIGESTING = [(0, LEASE, []), (1, CLAIM, [Reply]), (2, LANDED, [Digest])]


def test_valid_waits_for_the_digest_and_comes_with_it():
    (digest,) = play(source(), DIGESTING)
    assert digest.key == KEY
    assert sum(len(extract.numbers) for extract in digest.extracts) == len(STATES)
    play(source(), [*DIGESTING, (3, Digested(KEY, VALUES), [VALID, DONE]), (4, LANDED, [VALID]), (5, LANDED, [VALID])])


def test_a_repeated_question_is_told_that_somebody_is_here_and_answered_at_its_last_address():
    again = said(LANDED.message, "y")
    alive, valid = Reply("y", m.Renewed(())), Reply("y", m.Valid("c1", VALUES))
    play(source(), [*DIGESTING, (2.5, again, [alive]), (3, Digested(KEY, VALUES), [valid, DONE])])


def test_a_lease_that_ends_while_it_is_digested_is_not_valid():
    """Its blocks may be another request's by then."""
    session = source()
    told = [Count, LeaseEnded("r1", "expired"), DropDigest(KEY), Reply, Count]
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
    renew = said(m.Renew(TARGET, ("l1",)))
    steps = [(9, renew, [Reply]), (18, renew, [Reply]), (27, Digested(KEY, VALUES), [VALID, DONE])]
    play(source(), [*DIGESTING, *steps])


def test_a_lease_is_renewed_by_its_bytes_having_landed():
    steps = [(10, LANDED, [Digest]), (19, Tick(), []), (19.5, Digested(KEY, VALUES), [VALID, DONE])]
    play(source(), [*DIGESTING[:2], *steps])


@pytest.mark.parametrize(
    ("event", "freed"),
    [
        (LeaseWithdrawn("r1"), "withdrawn"),
        (said(m.Abort(TARGET, "c1", "l1")), "aborted"),
    ],
)
def test_a_digest_ends_with_its_lease(event, freed):
    session = source_after(DIGESTING)
    commands = session.handle(event, 3)
    assert LeaseEnded("r1", freed) in commands
    assert DropDigest(KEY) in commands
    play(session, [(4, Digested(KEY, VALUES), [])])


def test_readers_are_digested_for_one_by_one_and_the_last_frees_the_blocks():
    both = [said(m.Claim(party, "c1", REFERENCE, 6, (0, 1), subject=SUBJECT)) for party in (TARGET, OTHER_TARGET)]
    other_key = ClaimKey("l1", OTHER_TARGET, "c1")
    play(
        source(),
        [
            (0, LEASE, []),
            (1, both[0], [Reply]),
            (1, both[1], [Reply]),
            (2, LANDED, [Digest]),
            (2, said(m.Landed(OTHER_TARGET, "c1", "l1"), "z"), [Digest]),
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
    session = source_after([(0, LEASE, []), (1, said(wrong), [Reply])])
    for now in (2, 3):
        assert not session.handle(Tick(), now)
        commands = session.handle(LANDED, now)
        assert [c.message.reason for c in commands if isinstance(c, Reply)] == [m.Reason.OUT_OF_RANGE]
    play(session, [(4, said(m.Abort(TARGET, "c1", "l1")), [Reply, LeaseEnded("r1", "aborted")])])


def test_a_digest_that_nobody_asked_for_changes_nothing():
    peer = PeerKey("tcp://127.0.0.1:1", "d0", "epoch-9")
    keys = ClaimKey("l9", TARGET, "c1"), ClaimKey("l1", OTHER_TARGET, "c1"), ReadKey("c1", peer)
    play(source(), [*DIGESTING, *((3, Digested(key, VALUES), []) for key in keys)])


SOON = 1
LOOKING = [*DIGESTING[:2], (SOON, Tick(), [Digest])]


def test_a_source_digests_while_the_bytes_move_and_answers_at_once():
    session = source()
    play(session, DIGESTING[:2])
    assert session.next_deadline() == 0.0
    (digest,) = play(session, [(SOON, Tick(), [Digest])])
    assert digest.key == KEY
    assert session.next_deadline() > SOON
    play(session, [(1.5, Tick(), []), (1.6, Digested(KEY, VALUES), [])])
    play(session, [(2, CLAIM, [Reply]), (3, Tick(), []), (4, LANDED, [VALID, DONE]), (5, LANDED, [VALID])])


def test_all_bytes_are_looked_at_only_when_somebody_asks():
    """That is as much work as to move them, and those that are asked for go first."""
    claim = msgspec.structs.replace(CLAIM.message, subject=replace(SUBJECT, policy=DigestPolicy.FULL))
    play(source(), [(0, LEASE, []), (1, said(claim), [Reply]), (SOON, Tick(), []), (2, LANDED, [Digest])])


def test_a_repeated_claim_with_another_subject_is_answered_like_the_first():
    other = msgspec.structs.replace(CLAIM.message, subject=replace(SUBJECT, parts=(replace(PART, states=STATES[:2]),)))
    (digest,) = play(source(), [*DIGESTING[:2], (1, said(other), [Reply]), (2, LANDED, [Digest])])
    assert sum(len(extract.numbers) for extract in digest.extracts) == len(STATES)


def test_a_lease_that_an_engine_opens_twice_is_not_looked_at():
    play(source(), [*DIGESTING[:2], (1, LEASE, []), (SOON, Tick(), [])])


def test_who_asks_during_an_early_digest_is_answered_when_it_is_there():
    alive, renewed = Reply("x", m.Renewed(())), said(m.Renew(TARGET, ("l1",)))
    play(source(), [*LOOKING, (10, LANDED, []), (19, LANDED, [alive]), (19.5, Digested(KEY, VALUES), [VALID, DONE])])
    play(source(), [*LOOKING, (9, renewed, [Reply]), (18, Digested(KEY, VALUES), []), (18.5, LANDED, [VALID, DONE])])


def test_an_early_digest_that_cannot_be_made_is_tried_again_when_somebody_asks():
    session = source_after([*LOOKING, (2, Digested(KEY, (), "no such memory"), []), (3, LANDED, [Digest])])
    play(session, [(4, Digested(KEY, VALUES), [VALID, DONE])])


def test_who_has_asked_before_is_digested_for_once():
    play(source(), [*DIGESTING[:2], (1, LANDED, [Digest]), (SOON, Tick(), [])])
    play(source(), [*DIGESTING[:2], (1, LANDED, [Digest]), (1, Digested(KEY, VALUES), [VALID, DONE]), (2, Tick(), [])])


def test_a_reader_that_is_done_is_not_looked_at_again_while_others_read():
    both = [said(m.Claim(party, "c1", REFERENCE, 6, (0, 1), subject=SUBJECT)) for party in (TARGET, OTHER_TARGET)]
    claimed = [(0, LEASE, []), (1, both[0], [Reply]), (1, both[1], [Reply])]
    session = source_after([*claimed, (1, LANDED, [Digest]), (1, Digested(KEY, VALUES), [VALID])])
    (digest,) = play(session, [(SOON, Tick(), [Digest])])
    assert digest.key == ClaimKey("l1", OTHER_TARGET, "c1")
    play(session, [(2, Tick(), [])])


def test_a_repeated_claim_changes_nothing_about_its_digest():
    session = source()
    play(session, [*DIGESTING[:2], (1, CLAIM, [Reply]), (SOON, Tick(), [Digest])])
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
    play(source(), [(0, LEASE, []), (1, said(claim), [Reply]), (SOON, Tick(), [])])


def test_nothing_is_looked_at_that_is_still_computed():
    growing, all_of_it = replace(LEASE, is_growing=True), LeaseProgress("r1", ((3, 5),), 7)
    some = [(0, growing, []), (0, LeaseProgress("r1", ((3, 5),), 6), []), (1, CLAIM, [Reply]), (SOON, Tick(), [])]
    play(source(), [*some, (2, LANDED, [Digest])])
    play(source(), [(0, growing, []), (0, CLAIM, [Reply]), (1, all_of_it, [Reply]), (SOON, Tick(), [Digest])])
