"""Reads that begin before their grant: what counts of them, and what is read again."""

from dataclasses import replace

import pytest
from playbook import play
from session_cases import (
    ABORT,
    HELLO,
    LANDED,
    OFFER,
    PEER,
    REFERENCE,
    RENEW,
    SOURCE,
    SOURCE_LAYOUT,
    TARGET,
    TARGET_LAYOUTS,
    WELCOME,
    answer,
    failure,
    phases,
    said,
    source_session,
)

from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.request import copies_for
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import BlocksReleased, Cancel, Connect, Count, Fetched, FetchFailed, Post, Reply, Send
from kvferry.session.events import AbortRequest, FetchRequest, LeaseRequest, PeerConnected, Tick, TicketEnded
from kvferry.session.keys import ReadKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0)
TABLES = ((3, 5),)
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 6),), source_tables=TABLES)
KEY, READ = ReadKey("q1", PEER), TicketEnded(ReadKey("q1", PEER), "")
CLAIM, GRANT = Send(PEER, m.Claim(TARGET, "q1", REFERENCE, 6, (0,))), answer(m.Grant("q1", TABLES))
ELSEWHERE, EARLY = answer(m.Grant("q1", ((3, 6),))), answer(m.Grant("q1", TABLES, is_early=True))
VALID = answer(m.Valid("q1"))
FAILED = [Count, FetchFailed, Cancel(KEY), ABORT]


def met(wanted: FetchRequest, *commands: object, staging: StagingPolicy | None = None) -> TargetSession:
    """A target that has met its source, and what it does in its next turn."""
    ours = TargetIdentity(TARGET, "0.1.0", TARGET_LAYOUTS)
    session = TargetSession(replace(ours, staging=staging) if staging else ours, TIMING)
    play(
        session,
        [
            (0.0, wanted, [HELLO]),
            (0.1, answer(WELCOME), [Send(PEER, m.OfferRequest(TARGET))]),
            (0.2, answer(OFFER), [Connect(PEER, OFFER)]),
            (0.3, PeerConnected(PEER, "shm", "shm 9 GB/s"), commands[:1]),
        ],
    )
    play(session, [(0.3, Tick(), commands[1:])])
    return session


def rows(session: TargetSession, tables: tuple[tuple[int, ...], ...]) -> list[int]:
    program = session._reads.bindings.to((PEER,), session._peers).programs[PEER]
    return copies_for(program, tables, WANTED.block_tables, WANTED.ranges).source.tolist()


def test_the_claim_is_on_its_way_before_anything_is_planned():
    session = met(replace(WANTED, source_tables=()), CLAIM)
    play(session, [(0.4, replace(WANTED, request_id="q2"), [Send])])
    assert session.next_deadline(0.4) == 0.4
    play(session, [(0.4, Tick(), [Post])])
    assert session.next_deadline(0.4) > 0.4


def test_reading_begins_beside_the_claim():
    session = met(WANTED, CLAIM, Post)
    (fetched,) = play(session, [(0.4, GRANT, []), (0.6, READ, [LANDED]), (0.7, VALID, [Fetched])])
    assert phases(fetched) == {"handshake": 0.3, "claim": 0.0, "wire": 0.3, "verify": 0.1}
    assert session.num_open() == 0


def test_bytes_that_are_there_before_the_grant_wait_for_it():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, READ, []), (0.5, Tick(), []), (0.6, VALID, []), (0.9, Tick(), [CLAIM])])
    (fetched,) = play(session, [(1.0, GRANT, [LANDED]), (1.1, VALID, [Fetched])])
    assert (fetched.report.num_rows, fetched.report.strategy) == (len(rows(met(WANTED, CLAIM, Post), TABLES)), "direct")


@pytest.mark.parametrize(("grant", "why"), [(ELSEWHERE, "other_blocks"), (EARLY, "early")])
def test_what_is_not_granted_is_read_again_at_once_where_it_is_there_already(grant, why):
    session = met(WANTED, CLAIM, Post)
    post = play(session, [(0.4, READ, []), (0.5, grant, [Count("reads_repeated", why), Post])])[-1]
    assert post.copies.source.tolist() == rows(session, grant.message.block_tables)
    (fetched,) = play(session, [(0.6, READ, [LANDED]), (0.7, VALID, [Fetched])])
    assert fetched.report.num_bytes == post.copies.num_bytes


@pytest.mark.parametrize(("grant", "why"), [(ELSEWHERE, "other_blocks"), (EARLY, "early")])
def test_what_is_not_granted_is_read_again_when_its_ticket_has_ended(grant, why):
    session = met(WANTED, CLAIM, Post)
    counted = Count("reads_repeated", why)
    play(session, [(0.4, grant, [counted, Cancel(KEY)]), (0.5, grant, []), (0.9, Tick(), [])])
    # However its ticket ends: nothing of it is wanted.
    play(session, [(1.0, TicketEnded(KEY, "broken"), [CLAIM]), (1.1, grant, [Post]), (1.2, grant, [])])
    play(session, [(1.3, READ, [LANDED]), (1.4, VALID, [Fetched])])


def test_what_a_reference_says_may_lie_where_nothing_can_be_read():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, TicketEnded(KEY, "a row is outside"), [Count("reads_repeated", "transport")])])
    play(session, [(0.5, GRANT, [Post]), (0.6, READ, [LANDED]), (0.7, VALID, [Fetched])])


def test_a_granted_read_that_fails_is_not_read_again():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, GRANT, [])])
    assert failure(session.handle(TicketEnded(KEY, "broken"), 0.5)).reason == m.Reason.TRANSPORT


@pytest.mark.parametrize("tables", [(), ((3, 5), (3, 5)), ((3,),), ((3, 1 << 40),), ((-1, 3),)])
def test_a_reference_that_says_nothing_of_use_changes_nothing(tables):
    session = met(replace(WANTED, source_tables=tables), CLAIM)
    play(session, [(0.4, GRANT, [Post]), (0.5, READ, [LANDED]), (0.6, VALID, [Fetched])])


def test_nothing_is_read_speculatively_that_is_not_wanted():
    nothing = replace(WANTED, ranges=(TokenRange(0, 0),), block_tables=((),))
    session = met(nothing, Send)
    play(session, [(0.4, answer(m.Grant("q1", TABLES)), [Post])])


@pytest.mark.parametrize("strategy", [Strategy.PACK, Strategy.SCATTER])
def test_nothing_goes_through_staging_memory_before_the_grant(strategy):
    met(WANTED, Send, staging=StagingPolicy((strategy,), 1 << 20))


@pytest.mark.parametrize("before", [[], [(0.4, ELSEWHERE, [Count, Cancel])]], ids=["speculating", "misread"])
def test_a_refused_read_keeps_its_blocks_until_its_ticket_has_ended(before):
    session = met(WANTED, CLAIM, Post)
    play(session, before)
    refused = answer(m.Refusal(m.Reason.EXPIRED, "over", "", "", "q1"))
    play(session, [(0.5, refused, FAILED), (0.6, GRANT, []), (0.7, READ, [BlocksReleased("q1")])])


def test_a_refused_read_that_was_there_already_gives_its_blocks_back():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, READ, []), (0.5, AbortRequest("q1"), [Count, FetchFailed, ABORT, BlocksReleased("q1")])])


def test_one_table_is_that_of_every_cache_group():
    groups = SOURCE_LAYOUT.groups * 2
    placed = [replace(each, group=number % 2) for number, each in enumerate(SOURCE_LAYOUT.placements)]
    layout = replace(SOURCE_LAYOUT, groups=groups, placements=tuple(placed))
    session = TargetSession(TargetIdentity(TARGET, "0.1.0", TARGET_LAYOUTS), TIMING)
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(layout))
    offer = m.Offer(SOURCE, layout, (), m.Probe(0, 0, 0))
    play(session, [(0.0, WANTED, [HELLO]), (0.1, answer(welcome), [Send]), (0.2, answer(offer), [Connect])])
    play(session, [(0.3, PeerConnected(PEER, "shm", ""), [CLAIM]), (0.3, Tick(), [Post])])
    play(session, [(0.4, answer(m.Grant("q1", TABLES * 2)), []), (0.5, READ, [LANDED]), (0.6, VALID, [Fetched])])


def test_a_misread_claim_is_repeated_once_and_its_lease_renewed_meanwhile():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, ELSEWHERE, [Count, Cancel])])
    assert RENEW in session.handle(Tick(), 1.2)
    play(session, [(2.6, answer(m.Renewed(())), []), (2.7, READ, [CLAIM]), (2.8, Tick(), [])])
    play(session, [(3.0, ELSEWHERE, [Post]), (3.1, AbortRequest("q1"), FAILED), (3.2, READ, [BlocksReleased("q1")])])


@pytest.mark.parametrize("before", [[], [(0.4, READ, [])]], ids=["speculating", "speculated"])
def test_a_source_that_says_wait_is_waited_for(before):
    session = met(WANTED, CLAIM, Post)
    play(session, before)
    for now in range(1, 60):
        session.handle(answer(m.Queued("q1")), now)
        assert not [each for each in session.handle(Tick(), now) if isinstance(each, FetchFailed)]


def test_what_is_digested_is_planned_when_nothing_else_is_to_be_done():
    """Not before the bytes move, nor between their arrival and a grant that is expected any moment."""
    session = met(WANTED, CLAIM, Post)
    (fetch,) = session._fetches.values()
    assert not fetch.reads[PEER].is_prepared
    waiting = met(WANTED, CLAIM, Post)
    play(waiting, [(0.4, READ, []), (0.4, Tick(), [])])
    (other,) = waiting._fetches.values()
    assert not other.reads[PEER].is_prepared
    play(session, [(0.4, Tick(), [])])
    assert fetch.reads[PEER].is_prepared


def test_what_is_read_again_has_its_own_time():
    session = met(WANTED, CLAIM, Post)
    play(session, [(0.4, ELSEWHERE, [Count, Cancel])])
    for now in range(1, 21):
        session.handle(answer(m.Renewed(())), now)
        session.handle(Tick(), now)
    play(session, [(20.3, READ, [CLAIM]), (20.4, ELSEWHERE, [Post])])
    for now in range(21, 41):
        session.handle(answer(m.Renewed(())), now)
        assert not [each for each in session.handle(Tick(), now) if isinstance(each, FetchFailed)]
    assert failure(session.handle(Tick(), 40.5)).reason == m.Reason.DEADLINE


# --- the source's side ---


def test_a_lease_is_said_to_be_early_by_whoever_asks():
    source = source_session(TIMING)
    lease = LeaseRequest("r1", "l1", TABLES, 6, prompt=Prompt.of(range(6)))
    claim = m.Claim(TARGET, "q1", REFERENCE, 6, (0,))
    granted = Reply("x", m.Grant("q1", TABLES, is_early=True))
    play(source, [(0, said(claim), []), (1, lease, [granted]), (2, said(claim), [granted])])


def test_a_lease_is_said_to_be_early_long_after_somebody_has_asked():
    source, early = source_session(TIMING), TIMING.early_claim_s
    claim = m.Claim(TARGET, "q1", REFERENCE, 6, (0,))
    play(source, [(0, said(claim), []), (early, Tick(), [Reply, Count])])
    granted = Reply("x", m.Grant("q1", TABLES, is_early=True))
    play(source, [(early + 1, LeaseRequest("r1", "l1", TABLES, 6), []), (early + 2, said(claim), [granted])])


def test_who_asks_is_remembered_for_so_long_and_no_longer():
    source = source_session(TIMING)
    play(
        source,
        [(0, said(m.Claim(TARGET, "q1", REFERENCE, 6, (0,))), []), (TIMING.early_claim_s, Tick(), [Reply, Count])],
    )
    assert source.next_deadline() == TIMING.tombstone_s
    play(source, [(TIMING.tombstone_s, Tick(), [])])
    assert source.next_deadline() == float("inf")


def test_too_many_who_ask_make_every_lease_an_early_one(monkeypatch):
    monkeypatch.setattr("kvferry.session.source.early_messages.MAX_ASKED_FOR", 1)
    source = source_session(TIMING)
    others = [m.Claim(TARGET, "q2", m.Reference("p0", "epoch-1", "r1", lease_id), 6, (0,)) for lease_id in ("l2", "l3")]
    play(source, [*((0, said(other), []) for other in others), (1, LeaseRequest("r1", "l1", TABLES, 6), [])])
    assert len(source._early._asked_for) == 1
    claim = m.Claim(TARGET, "q1", REFERENCE, 6, (0,))
    play(source, [(2, said(claim), [Reply("x", m.Grant("q1", TABLES, is_early=True))])])


@pytest.mark.parametrize("epoch", ["epoch-0", "epoch-1"], ids=["refused", "waits for its lease"])
def test_a_source_helps_those_who_read_what_it_does_not_grant(epoch):
    """Some transports need its help until their tickets end."""
    source = source_session(TIMING)
    assert not source.may_be_read(0.0)
    source.handle(said(m.Claim(TARGET, "q1", m.Reference("p0", epoch, "r1", "l1"), 6, (0,))), 1.0)
    assert source.may_be_read(1.0)
    assert source.may_be_read(0.9 + TIMING.transfer_s)
    assert not source.may_be_read(1.0 + TIMING.transfer_s)


@pytest.mark.parametrize("how", ["is_growing", "is_early"])
def test_what_may_have_been_known_too_early_is_said_to_be_early(how):
    source = source_session(TIMING)
    nothing = m.Claim(TARGET, "q1", REFERENCE, 0, (0,))
    lease = replace(LeaseRequest("r1", "l1", TABLES, 6), **{how: True})
    play(source, [(0, lease, []), (1, said(nothing), [Reply("x", m.Grant("q1", TABLES, is_early=True))])])


def test_a_lease_that_began_before_anybody_asked_is_not_early():
    source = source_session(TIMING)
    claim = m.Claim(TARGET, "q1", REFERENCE, 6, (0,))
    play(source, [(0, LeaseRequest("r1", "l1", TABLES, 6), []), (1, said(claim), [Reply("x", m.Grant("q1", TABLES))])])
