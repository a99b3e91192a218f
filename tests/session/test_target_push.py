"""The target of a push: its blocks wait for the answer of the source, whatever happens."""

from dataclasses import replace

import pytest
from playbook import play
from session_cases import (
    ABORT,
    ALIVE,
    HELLO,
    LANDED,
    LONG_RENEW,
    OFFER,
    OURS,
    PEER,
    PROBE,
    REFERENCE,
    RENEW,
    SOURCE_LAYOUT,
    TARGET_LAYOUTS,
    TRANSPORTS,
    WELCOME,
    answer,
    failure,
    phases,
)
from session_cases import TARGET as US

from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import NOTHING
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import (
    BlocksReleased,
    CheckLiveness,
    Connect,
    Count,
    Disconnect,
    Fetched,
    FetchFailed,
    Send,
)
from kvferry.session.events import AbortRequest, AnswerArrived, FetchRequest, PeerConnected, PeerGone, Tick
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import Handshakes, TargetIdentity
from kvferry.session.target.quarantine import PendingAborts, Quarantine
from kvferry.session.target.read_strategy import AUTO, StagingPolicy, TransferMode
from kvferry.session.target.reads.fetch import Read
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, fence_s=4.0)
TABLES, RANGES = ((0,),), (TokenRange(0, 6),)
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), TABLES, RANGES)
CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, 6, (0,), Direction.WRITE, TABLES, RANGES))


GRANT, WRITTEN, VALID = answer(m.Grant("q1", ())), answer(m.Written("q1", 1536, 12)), answer(m.Valid("q1"))
CLEAN, UNCLEAN = answer(m.Aborted("q1", "epoch-1")), answer(m.Aborted("q1", "epoch-1", is_clean=False))
NEXT_START = answer(m.Aborted("q1", "epoch-2"))
REFUSED = answer(m.Refusal(m.Reason.TRANSPORT, "the write failed", "peer reset", "", "q1"))
HANDSHAKE = [
    (0.0, WANTED, [HELLO]),
    (0.1, answer(WELCOME), [Send(PEER, m.OfferRequest(US))]),
    (0.2, answer(OFFER), [OURS]),
    (0.3, answer(m.Reached("shm", "shm 9 GB/s")), [CLAIM]),
]
GRANTED = [*HANDSHAKE, (0.4, GRANT, [])]
FAILED = [Count, FetchFailed, ABORT]


@pytest.fixture
def target() -> TargetSession:
    ours = TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, direction=Direction.WRITE, transports=TRANSPORTS, probe=PROBE)
    return TargetSession(ours, TIMING)


def test_a_push_from_the_first_hello_to_the_decoded_request(target):
    (fetched,) = play(target, [*GRANTED, (0.6, WRITTEN, []), (0.7, VALID, [Fetched])])
    report = fetched.report
    assert (report.num_bytes, report.num_rows, report.transport, report.choice) == (1536, 12, "shm", "shm 9 GB/s")
    assert phases(fetched) == {"handshake": 0.3, "claim": 0.1, "wire": 0.2, "verify": 0.1}
    assert target.num_open() == 0
    assert not target.may_be_written()


def test_the_offer_is_repeated_and_a_source_that_cannot_connect_ends_the_fetch(target):
    refusal = answer(m.Refusal(m.Reason.UNREACHABLE, "no transport reaches the target", "shm: other host", "", ""))
    steps = [
        *HANDSHAKE[:3],
        (0.8, Tick(), [OURS, CheckLiveness(PEER)]),
        (0.9, refusal, [Count, FetchFailed, BlocksReleased, Disconnect]),
    ]
    assert failure(play(target, steps)).reason == "unreachable"


def test_written_may_overtake_the_grant(target):
    play(target, [*HANDSHAKE, (0.6, WRITTEN, []), (0.6, GRANT, []), (0.7, VALID, [Fetched])])


@pytest.mark.parametrize("steps", [HANDSHAKE, GRANTED], ids=["claimed", "granted"])
def test_valid_may_overtake_written(target, steps):
    play(target, [*steps, (0.5, VALID, []), (0.5, VALID, []), (0.6, WRITTEN, [Fetched]), (0.7, VALID, [])])


def test_valid_alone_is_not_enough(target):
    """Nothing is known of the write: it is asked for, and may still fail."""
    play(target, [*GRANTED, (0.5, VALID, []), (1.0, Tick(), [CLAIM, RENEW])])
    assert failure(play(target, [(1.1, REFUSED, FAILED)])).reason == "transport"


def test_asked_again_the_source_says_how_far_it_is(target):
    steps = [*HANDSHAKE, (0.9, Tick(), [CLAIM]), (1.0, GRANT, []), (1.5, Tick(), [CLAIM, RENEW])]
    play(target, [*steps, (1.6, WRITTEN, []), (1.7, WRITTEN, []), (2.0, Tick(), []), (2.2, Tick(), [LANDED])])


@pytest.mark.parametrize("steps", [HANDSHAKE, GRANTED], ids=["claimed", "granted"])
def test_an_aborted_push_waits_for_the_acknowledgement(target, steps):
    """Also one that has only been claimed: the source may be faster than its grant."""
    play(target, [*steps, (0.5, AbortRequest("q1"), FAILED)])
    assert target.num_open() == 1
    assert target.may_be_written()
    play(target, [(0.9, Tick(), [])])
    play(target, [(1.1, Tick(), [ABORT]), (1.2, GRANT, []), (1.3, WRITTEN, []), (1.4, CLEAN, [BlocksReleased("q1")])])
    play(target, [(1.5, CLEAN, []), (1.6, AbortRequest("q1"), []), (9.0, Tick(), [])])
    assert target.num_open() == 0


def anew(commands):
    """Whether each abort of these is sent over a new connection."""
    return [
        command.is_anew for command in commands if isinstance(command, Send) and isinstance(command.message, m.Abort)
    ]


def test_an_abort_that_is_not_answered_is_sent_over_a_new_connection(target):
    """What was sent before may be lost again and again, and keep it back; a busy source needs more and more time."""
    play(target, [*GRANTED, (1.0, AbortRequest("q1"), FAILED)])
    sent = {now: anew(target.handle(Tick(), float(now))) for now in range(2, 40)}
    assert all(len(each) == 1 for each in sent.values())
    assert [now for now, (is_anew,) in sent.items() if is_anew] == [5, 13, 29]


def test_an_abort_of_a_source_that_writes_nothing_replaces_no_connection():
    """It may wait on the way: nobody's blocks wait for it."""
    timing = replace(TIMING, fence_s=1.0)
    target = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS), timing)
    play(target, [*HANDSHAKE[:2], (0.2, answer(OFFER), [Connect]), (0.3, PeerConnected(PEER, "tcp", ""), [Send])])
    play(target, [(0.4, AbortRequest("q1"), [*FAILED, BlocksReleased("q1")])])
    sent = [anew(target.handle(Tick(), now / 2)) for now in range(1, 10)]
    assert sum(map(len, sent)) > 3
    assert not any(map(any, sent))


def test_aborts_to_one_source_need_one_new_connection(target):
    again = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    play(target, [*GRANTED, (0.5, again, [Send]), (1.0, AbortRequest("q1"), FAILED)])
    target.handle(AbortRequest("q2"), 1.0)
    assert sorted(anew(target.handle(Tick(), 5.0))) == [False, True]
    assert anew(target.handle(Tick(), 6.0)) == [False, False]


def test_a_failed_write_is_a_failure_that_still_waits(target):
    """What had been sent before may be under way."""
    assert failure(play(target, [*GRANTED, (0.6, REFUSED, FAILED)])).reason == "transport"
    play(target, [(0.7, UNCLEAN, []), (1.5, Tick(), []), (2.5, Tick(), [])])
    freed = [now for now in range(3, 20) if target.handle(Tick(), float(now))]
    assert freed[0] >= 5
    assert target.num_open() == 0


@pytest.mark.parametrize("reason", [m.Reason.EXPIRED, m.Reason.OUT_OF_RANGE, m.Reason.ALREADY_CLAIMED])
def test_a_refusal_is_not_the_end_of_a_ticket(target, reason):
    refused = answer(m.Refusal(reason, "no", "", "", "q1"))
    play(target, [*HANDSHAKE, (0.5, refused, FAILED), (0.6, CLEAN, [BlocksReleased("q1")])])


def silent(target):
    """A source that stops answering once it has granted; returns after it has been given up."""
    play(target, GRANTED)
    said = [target.handle(Tick(), float(now)) for now in range(1, 8)]
    commands = [command for each in said for command in each]
    assert failure(commands).reason == "peer_lost"
    assert Disconnect(PEER) in commands
    assert BlocksReleased("q1") not in commands
    return commands


def test_a_silent_source_is_asked_for_ever_and_never_taken_for_dead(target):
    assert CheckLiveness(PEER) in silent(target)
    for now in range(8, 2000):
        abort, check = target.handle(Tick(), float(now))
        assert (replace(abort, is_anew=False), check) == (ABORT, CheckLiveness(PEER))
    play(target, [(2000.5, CLEAN, [BlocksReleased("q1"), Disconnect(PEER)])])
    assert target.next_deadline(2001.0) == float("inf")


@pytest.mark.parametrize("answer", [PeerGone(PEER), NEXT_START, UNCLEAN], ids=["gone", "another start", "not clean"])
def test_what_a_dead_source_had_sent_is_waited_for(target, answer):
    silent(target)
    play(target, [(10.0, answer, [])])
    first = next(now for now in range(1, 100) if BlocksReleased("q1") in target.handle(Tick(), 10.0 + now / 10))
    assert first >= 10 * TIMING.fence_s


def test_an_end_that_is_told_twice_counts_from_the_first_time(target):
    silent(target)
    play(target, [(10.0, PeerGone(PEER), [])])
    for tenth in range(1, 100):
        again = [*target.handle(PeerGone(PEER), 12.0)] if tenth == 20 else []
        if BlocksReleased("q1") in [*again, *target.handle(Tick(), 10.0 + tenth / 10)]:
            break
    assert tenth == pytest.approx(10 * TIMING.fence_s, abs=1)


def test_a_lost_source_is_known_until_it_acknowledges(target):
    """Of two reads that it may still be writing."""
    other = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    play(target, [*GRANTED, (0.5, other, [Send]), (0.6, answer(m.Grant("q2", ())), [])])
    for now in range(1, 8):
        target.handle(Tick(), float(now))
    play(target, [(9.0, CLEAN, [BlocksReleased("q1")])])
    play(target, [(9.1, answer(m.Aborted("q2", "epoch-1")), [BlocksReleased("q2"), Disconnect(PEER)])])


def test_a_source_that_ends_while_it_writes_is_not_asked_to_acknowledge(target):
    """Nobody is left to give it: what it had sent is all that is waited for, from now on."""
    play(target, [*GRANTED, (0.6, PeerGone(PEER), [Count, FetchFailed, ABORT, Disconnect(PEER)])])
    first = next(now for now in range(1, 100) if BlocksReleased("q1") in target.handle(Tick(), 0.6 + now / 10))
    assert first == pytest.approx(10 * TIMING.fence_s, abs=1)


def test_it_is_known_to_whose_blocks_a_source_may_write(target):
    play(target, HANDSHAKE[:3])
    # Only what tests write to.
    assert target.may_be_written()
    assert target.written_ids() == frozenset()
    play(target, HANDSHAKE[3:])
    assert target.written_ids() == {"q1"}
    play(target, [(0.5, AbortRequest("q1"), FAILED)])
    assert target.written_ids() == {"q1"}
    play(target, [(0.6, CLEAN, [BlocksReleased("q1")])])
    assert target.written_ids() == frozenset()


def test_the_wait_for_what_was_sent_only_counts_while_we_run(target):
    """A target that was stopped has not emptied its own buffers meanwhile."""
    silent(target)
    play(target, [(10.0, PeerGone(PEER), []), (1000.0, Tick(), []), (1001.0, Tick(), [])])
    assert target.num_open() == 1


def test_nobody_else_at_another_address_ends_the_wait(target):
    silent(target)
    elsewhere = PeerKey("tcp://127.0.0.1:2", "p0", "epoch-1")
    play(target, [(8.0, PeerGone(elsewhere), []), (8.1, AnswerArrived(elsewhere, m.Aborted("q1", "epoch-1")), [])])
    play(target, [(8.2, answer(m.Aborted("q2", "epoch-1")), [])])
    assert target.num_open() == 1


def test_a_source_that_has_restarted_elsewhere_may_still_write_from_where_it_was(target):
    play(target, GRANTED)
    newer = PeerKey("tcp://127.0.0.1:7", "p0", "epoch-2")
    reference = m.Reference("p0", "epoch-2", "r2", "l2")
    target.handle(replace(WANTED, request_id="q2", reference=reference, addresses=(newer.address,)), 0.5)
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", m.Party("p0", "epoch-2", 0), 1, fingerprint(SOURCE_LAYOUT))
    commands = target.handle(AnswerArrived(newer, welcome), 0.6)
    assert failure(commands).reason == "peer_lost"
    assert BlocksReleased("q1") not in commands
    assert BlocksReleased("q1") in target.handle(CLEAN, 0.7)


def test_a_push_has_the_deadline_of_a_pull(target):
    play(target, GRANTED)
    for second in range(1, 20):
        target.handle(Tick(), float(second))
        target.handle(answer(ALIVE), second + 0.1)
    commands = target.handle(Tick(), 20.5)
    assert failure(commands).reason == "deadline"
    assert ABORT in commands


def test_a_source_that_writes_has_time_to_notice_that_it_cannot(target):
    """Long heartbeats that are lost would keep back its word of it."""
    play(target, [*HANDSHAKE, (0.4, GRANT, [])])
    for second in range(1, 5):
        play(target, [(float(second), Tick(), [CLAIM, RENEW]), (second + 0.1, answer(m.Renewed(())), [])])
    play(target, [(5.0, Tick(), [CLAIM, LONG_RENEW]), (5.1, answer(m.Renewed(())), [])])
    for second in (6.0, 7.0):
        assert LONG_RENEW in target.handle(Tick(), second)
        target.handle(answer(m.Renewed(())), second + 0.1)
    assert LONG_RENEW in target.handle(Tick(), 8.0)
    assert failure(target.handle(Tick(), 8.1)).reason == "peer_lost"


def test_a_lease_that_is_gone_ends_a_push(target):
    gone = answer(m.Renewed(("l1",)))
    assert failure(play(target, [*GRANTED, (0.5, gone, FAILED)])).reason == "expired"


def test_a_lease_that_the_source_has_not_heard_of_yet_does_not_end_it(target):
    play(target, [*HANDSHAKE, (0.5, answer(m.Renewed(("l1",))), []), (0.6, GRANT, [])])


def test_words_of_a_push_mean_nothing_to_a_pull():
    pull = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS), TIMING)
    play(pull, [(0.0, WANTED, [HELLO]), (0.1, answer(m.Reached("shm", "")), []), (0.2, WRITTEN, [])])


def test_a_few_rows_are_not_packed_where_nobody_has_measured_what_they_cost():
    """Who is written to tests nothing: slots are asked for, and threads woken, there as well."""
    staging = StagingPolicy(AUTO, 1 << 20)
    ours = TargetIdentity(
        US, "0.1.0", TARGET_LAYOUTS, direction=Direction.WRITE, transports=TRANSPORTS, probe=PROBE, staging=staging
    )
    tables, ranges = ((0, 1, 2),), (TokenRange(0, 24),)
    wanted = replace(WANTED, block_tables=tables, ranges=ranges)
    claim = Send(PEER, m.Claim(US, "q1", REFERENCE, 24, (0,), Direction.WRITE, tables, ranges))
    reached = answer(m.Reached("shm", "shm 9 GB/s"))
    play(TargetSession(ours, TIMING), [(0.0, wanted, [HELLO]), *HANDSHAKE[1:3], (0.3, reached, [claim])])


def test_nothing_to_receive_is_still_claimed_and_released(target):
    empty = replace(WANTED, ranges=(TokenRange(0, 0),))
    claim = Send(PEER, m.Claim(US, "q1", REFERENCE, 0, (0,), Direction.WRITE, TABLES, empty.ranges))
    play(target, [(0.0, empty, [HELLO]), *HANDSHAKE[1:3], (0.3, answer(m.Reached("shm", "")), [claim])])
    play(target, [(0.4, answer(m.Written("q1", 0, 0)), []), (0.5, VALID, [Fetched])])


def test_sources_hear_of_the_attempt_and_the_engine_of_its_request(target):
    play(target, HANDSHAKE)
    target.handle(replace(WANTED, request_id="q2", attempt="7:q2"), 0.5)
    assert target.written_ids() == {"q1", "q2"}
    commands = target.handle(AbortRequest("q2"), 0.6)
    assert Send(PEER, m.Abort(US, "7:q2", "l1")) in commands
    assert [command.request_id for command in commands if isinstance(command, FetchFailed)] == ["q2"]
    assert target.handle(answer(m.Aborted("7:q2", "epoch-1")), 0.7) == [BlocksReleased("q2")]


def test_a_lost_source_whose_abort_was_repeated_is_not_kept_connected_by_a_read_that_is_over():
    """Late words may have ended the read: nobody but its abort was connected then."""
    peers = Handshakes(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS), TIMING)
    aborts = PendingAborts(US, peers, TIMING)
    quarantine = Quarantine({}, aborts, peers)
    (sent,) = aborts.send(WANTED, PEER, Read.started("read", TransferMode(Direction.WRITE), NOTHING, 0.0), 0.0)
    assert list(quarantine.end_acknowledged(1.0)) == []
    aborts.acknowledged(PEER, m.Aborted(sent.message.claim_id, PEER.epoch), 1.0)
    assert list(quarantine.end_acknowledged(1.1)) == [Disconnect(PEER)]
    assert not aborts
