"""Digests of a target: when it digests, what is compared, and what is not valid."""

from dataclasses import replace

import pytest
from playbook import play
from session_cases import (
    ABORT,
    MODEL,
    OTHER_TARGET,
    PART,
    PEER,
    REFERENCE,
    SOURCE,
    SOURCE_LAYOUT,
    TARGET,
    TARGET_LAYOUTS,
    VALUES,
    answer,
)

from kvferry.errors import LayoutError
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
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
    Post,
    Send,
)
from kvferry.session.events import (
    AbortRequest,
    Digested,
    FetchRequest,
    PeerConnected,
    PeerUnreachable,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.reads.fetch import ReadState
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(lease_s=10.0, heartbeat_s=1.0, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, tombstone_s=60.0)

WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 6),))
READ = ReadKey("q1", PEER)


def target(policy=DigestPolicy.SAMPLED, layouts=TARGET_LAYOUTS) -> TargetSession:
    return TargetSession(TargetIdentity(TARGET, "0.1.0", layouts, policy), TIMING)


def meeting(layout=SOURCE_LAYOUT, claim=(Send,)):
    return [
        (0.0, WANTED, [Send]),
        (0.1, answer(m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(layout))), [Send]),
        (0.2, answer(m.Offer(SOURCE, layout, (), m.Probe(0, 0, 0))), [Connect]),
        (0.3, PeerConnected(PEER, "shm", ""), claim),
    ]


# The loop's turn after that plans what is to be digested.
POSTED = [*meeting(), (0.3, Tick(), []), (0.4, answer(m.Grant("q1", ((3, 5),))), [Post])]
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
    play(session, [(0.4, THEIRS, []), (0.5, answer(m.Written("q1", 768, 12)), []), (0.5, Tick(), [Digest])])
    commands = session.handle(Digested(READ, values), 0.6)
    assert isinstance(commands[0], Fetched) == (values == VALUES)
    assert any(isinstance(each, FetchFailed) for each in commands) == (values != VALUES)


def test_two_digests_that_cannot_be_made_are_one_failure(monkeypatch):
    """The first ends the fetch, and with it the second."""
    session = target()
    play(session, meeting())
    (fetch,) = session._fetches.values()
    other = replace(PEER, address="tcp://127.0.0.1:2")
    fetch.reads[other] = replace(fetch.reads[PEER], machine=replace(fetch.reads[PEER].machine))
    for read in fetch.reads.values():
        read.may_prepare = False
        read.machine.state = ReadState.LANDED
        read.movers = set()

    def fail(*_):
        raise LayoutError("no")

    monkeypatch.setattr(session._reads.verifier._extractor, "extracts", fail)
    commands = session.handle(Tick(), 0.5)
    assert [type(each) for each in commands if not isinstance(each, Send | DropDigest)] == [Count, FetchFailed, Free]


def test_the_question_does_not_wait_until_it_is_known_what_to_digest():
    session = target()
    granted = answer(m.Grant("q1", ((3, 5),)))
    play(session, [*meeting(), (0.4, granted, [Post]), (0.6, TicketEnded(READ, ""), [Send])])
    assert session.next_deadline(0.6) == 0.6
    play(session, [(0.6, Tick(), [Digest]), (0.7, THEIRS, []), (0.8, OURS, [Fetched])])


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
    other = PeerKey("tcp://127.0.0.1:2", "p0", "epoch-1")
    keys = ReadKey("q9", PEER), ReadKey("q1", other), ClaimKey("l1", TARGET, "c1")
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
    session = TargetSession(
        TargetIdentity(OTHER_TARGET, "0.1.0", (TARGET_LAYOUTS[0], nothing), DigestPolicy.FULL), TIMING
    )
    _, fetched = play(session, meeting(claim=[Send, Fetched]))
    assert fetched.report.verified == "full"
