from dataclasses import replace

import numpy as np
import pytest
from playbook import play
from session_cases import (
    ABORT,
    ALIVE,
    HELLO,
    LANDED,
    LONG_RENEW,
    MODEL,
    OFFER,
    OTHER_TARGET,
    PEER,
    REFERENCE,
    RENEW,
    SOURCE,
    SOURCE_LAYOUT,
    TARGET_LAYOUTS,
    WELCOME,
    answer,
    failure,
    phases,
)
from session_cases import TARGET as US

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention, latent
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.program import bind, region_starts
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.plan.strategy.calibration import TYPICAL_HOST
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    Acquire,
    BlocksReleased,
    Cancel,
    CheckLiveness,
    Connect,
    Count,
    Disconnect,
    Fetched,
    FetchFailed,
    Post,
    Send,
)
from kvferry.session.events import (
    AbortRequest,
    AnswerArrived,
    FetchRequest,
    HandshakeRefused,
    HoldRequest,
    HostSilent,
    PeerConnected,
    PeerGone,
    PeerMoved,
    PeerUnreachable,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import PeerKey, ReadKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy, beside
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0)
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 6),))
KEY = ReadKey("q1", PEER)
CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, 6, (0,)))
GRANT = m.Grant("q1", ((3, 5),))


def session(layouts=TARGET_LAYOUTS, timing=TIMING) -> TargetSession:
    return TargetSession(TargetIdentity(US, "0.1.0", layouts), timing)


@pytest.fixture
def target():
    return session()


HANDSHAKE = [
    (0.0, WANTED, [HELLO]),
    (0.1, answer(WELCOME), [Send(PEER, m.OfferRequest(US))]),
    (0.2, answer(OFFER), [Connect(PEER, OFFER)]),
    (0.3, PeerConnected(PEER, "shm", "shm 9 GB/s"), [CLAIM]),
]
POSTED = [*HANDSHAKE, (0.4, answer(GRANT), [Post])]
DONE = [*POSTED, (0.6, TicketEnded(KEY, ""), [LANDED]), (0.7, answer(m.Valid("q1")), [Fetched])]
FAILED = [Count, FetchFailed, Cancel(KEY), ABORT]


def test_a_fetch_from_the_first_hello_to_the_decoded_request(target):
    (fetched,) = play(target, DONE)
    report = fetched.report
    assert (report.tokens, report.num_bytes, report.transport) == (6, 6 * MODEL.bytes_per_token, "shm")
    assert phases(fetched) == {"handshake": 0.3, "claim": 0.1, "wire": 0.2, "verify": 0.1}
    assert target.num_open() == 0


def test_ranges_that_nothing_can_be_planned_with_end_their_own_fetch(target):
    play(target, [(0.0, replace(WANTED, ranges=(TokenRange(-4, 6),)), [HELLO]), *HANDSHAKE[1:3]])
    commands = target.handle(HANDSHAKE[3][1], 0.3)
    assert failure(commands).reason == m.Reason.OUT_OF_RANGE
    assert target.num_open() == 0


def test_the_second_fetch_from_a_known_peer_claims_at_once(target):
    play(target, DONE)
    again = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    play(target, [(1.0, again, [Send(PEER, m.Claim(US, "q2", again.reference, 6, (0,)))])])
    key = replace(KEY, claim_id="q2")
    play(target, [(1.1, answer(m.Grant("q2", ((3, 5),))), [Post]), (1.3, TicketEnded(key, ""), [Send])])
    (fetched,) = play(target, [(1.6, answer(m.Valid("q2")), [Fetched])])
    assert phases(fetched) == {"handshake": 0.0, "claim": 0.1, "wire": 0.2, "verify": 0.3}


def test_a_late_message_about_another_attempt_does_not_concern_this_one(target):
    play(target, DONE)
    again = replace(WANTED, attempt="2:q1", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    key = replace(KEY, claim_id="2:q1")
    play(
        target,
        [
            (1.0, again, [Send(PEER, m.Claim(US, "2:q1", again.reference, 6, (0,)))]),
            (1.1, answer(GRANT), []),
            (1.2, answer(m.Grant("2:q1", ((3, 5),))), [Post]),
            (1.3, TicketEnded(key, ""), [Send(PEER, m.Landed(US, "2:q1", "l2"))]),
            (1.4, answer(m.Valid("q1")), []),
            (1.5, answer(m.Valid("2:q1")), [Fetched]),
        ],
    )


def test_an_abort_ends_every_attempt_of_its_request(target):
    play(target, HANDSHAKE)
    again = replace(WANTED, attempt="2:q1")
    play(target, [(1.0, again, [Send(PEER, m.Claim(US, "2:q1", REFERENCE, 6, (0,)))])])
    commands = play(target, [(1.1, AbortRequest("q1"), [Count, FetchFailed, Send, BlocksReleased] * 2)])
    assert [command.request_id for command in commands if isinstance(command, BlocksReleased)] == ["q1", "q1"]
    assert target.num_open() == 0


def test_nothing_to_receive_still_asks_whether_the_lease_is_good(target):
    empty = replace(WANTED, ranges=(TokenRange(0, 0),))
    steps = [(0.0, empty, [HELLO]), *HANDSHAKE[1:3]]
    play(target, steps)
    play(target, [(0.3, PeerConnected(PEER, "shm", ""), [Send(PEER, m.Claim(US, "q1", REFERENCE, 0, (0,)))])])
    (post,) = play(target, [(0.4, answer(GRANT), [Post])])
    assert len(post.copies) == 0


def test_valid_is_the_only_way_to_a_decoded_request(target):
    """Bytes that landed under an ended lease never reach the model."""
    refused = m.Refusal(m.Reason.EXPIRED, "the lease ended", "expired", "live", "q1")
    commands = play(
        target,
        [
            *POSTED,
            (0.6, TicketEnded(KEY, ""), [LANDED]),
            (0.7, answer(refused), [Count, FetchFailed, ABORT, BlocksReleased]),
        ],
    )
    assert failure(commands).reason == "expired"


def test_a_failed_read_frees_its_blocks_because_the_ticket_has_ended():
    commands = play(
        session(), [*POSTED, (0.6, TicketEnded(KEY, "peer reset"), [Count, FetchFailed, ABORT, BlocksReleased])]
    )
    assert failure(commands).reason == "transport"
    assert "peer reset" in str(failure(commands))


def fetch_of(number, began, ended, error, then=(), fetched=()):
    """The steps of another fetch from a source that is met already, whose ticket ends so."""
    name = f"q{number}"
    wanted, key, grant = replace(WANTED, request_id=name), ReadKey(name, PEER), m.Grant(name, ((3, 5),))
    over = [Count, FetchFailed, Send, BlocksReleased] if error else [Send]
    steps = [(began, wanted, [Send]), (began, answer(grant), [Post]), (ended, TicketEnded(key, error), [*over, *then])]
    return steps if error else [*steps, (ended, answer(m.Valid(name)), [Fetched])]


def test_a_source_is_met_again_when_one_read_after_the_other_fails(target):
    """Another transport may work where the one that was chosen does not any more. It lives: it is told what is over,
    and keeps what waiting requests need."""
    play(target, [*POSTED, (0.6, TicketEnded(KEY, "reset"), [Count, FetchFailed, ABORT, BlocksReleased])])
    play(target, [*fetch_of(2, 0.7, 0.8, "reset"), *fetch_of(3, 0.9, 1.0, ""), *fetch_of(4, 1.1, 1.2, "reset")])
    waiting = m.Reference("p0", "epoch-1", "r9", "l9")
    play(target, [(1.25, HoldRequest(waiting, (PEER.address,)), []), *fetch_of(5, 1.3, 1.4, "reset")])
    *other, (_, other_ended, _) = fetch_of(6, 1.45, 1.6, "cancelled")
    play(target, other)
    told = [Count, FetchFailed, Cancel(ReadKey("q6", PEER)), Send(PEER, m.Abort(US, "q6", "l1"))]
    play(target, fetch_of(7, 1.5, 1.6, "reset", [*told, Disconnect(PEER)]))
    play(target, [(1.7, other_ended, [BlocksReleased("q6")])])
    commands = [command for now in range(2, 12) for command in target.handle(Tick(), float(now))]
    assert HELLO in commands


def test_reads_that_fail_together_count_once(target):
    play(target, POSTED)
    together = [fetch_of(number, 0.5, 0.6, "reset") for number in range(2, 6)]
    for step in range(3):
        play(target, [steps[step] for steps in together])
    play(target, [(0.6, TicketEnded(KEY, "reset"), [Count, FetchFailed, ABORT, BlocksReleased])])
    play(target, fetch_of(7, 0.7, 0.8, ""))


def test_reads_that_were_cancelled_are_no_failures_of_the_source(target):
    play(target, HANDSHAKE[:3])
    play(target, [(0.3, PeerConnected(PEER, "shm", "shm 9 GB/s"), [CLAIM])])
    for number in range(2, 7):
        *steps, (ended, ticket, _) = fetch_of(number, number, number + 0.5, "cancelled")
        key = ReadKey(f"q{number}", PEER)
        play(target, [*steps, (number, AbortRequest(f"q{number}"), [Count, FetchFailed, Cancel(key), Send])])
        play(target, [(ended, ticket, [BlocksReleased])])


def test_valid_counts_only_when_the_bytes_that_we_read_are_there(target):
    """Said before, it says nothing of what we read after it."""
    play(target, [*POSTED, (0.5, answer(m.Valid("q1")), []), (0.6, TicketEnded(KEY, ""), [LANDED])])
    play(target, [(0.7, answer(m.Valid("q1")), [Fetched])])


def test_a_message_about_slots_does_not_end_a_read_without_any(target):
    """Found by fuzzing: it freed the blocks, into which our ticket still went."""
    play(target, [*POSTED, (0.5, AbortRequest("q1"), FAILED), (0.6, answer(m.Packed("q1", 0, 0)), [])])
    play(target, [(0.7, answer(m.Aborted("q1", "epoch-1")), []), (0.8, TicketEnded(KEY, ""), [BlocksReleased("q1")])])


def test_blocks_stay_in_quarantine_while_a_ticket_is_open(target):
    play(target, [*POSTED, (0.5, AbortRequest("q1"), FAILED)])
    assert target.num_open() == 1
    play(target, [(5.0, TicketEnded(KEY, ""), [BlocksReleased("q1")])])
    assert target.num_open() == 0


def test_blocks_that_nobody_has_been_told_to_write_to_are_free_at_once(target):
    play(target, [*HANDSHAKE, (0.4, AbortRequest("q1"), [Count, FetchFailed, ABORT, BlocksReleased("q1")])])
    assert target.num_open() == 0


def test_a_repeated_abort_and_late_answers_change_nothing():
    play(
        session(),
        [
            *POSTED,
            (0.5, AbortRequest("q1"), FAILED),
            (0.6, AbortRequest("q1"), []),
            (0.6, answer(GRANT), []),
            (0.6, answer(m.Valid("q1")), []),
            (0.7, TicketEnded(KEY, "cancelled"), [BlocksReleased("q1")]),
            (0.8, AbortRequest("q1"), []),
        ],
    )


def test_an_abort_is_repeated_until_the_source_has_noted_it():
    play(
        session(),
        [
            *POSTED,
            (2.0, AbortRequest("q1"), FAILED),
            (2.0, TicketEnded(KEY, ""), [BlocksReleased]),
            (2.4, Tick(), []),
            (2.6, Tick(), [ABORT]),
            (2.9, Tick(), []),
            (3.1, answer(m.Aborted("q1", PEER.epoch)), []),
            (3.8, Tick(), []),
        ],
    )


def test_a_silent_peer_is_lost_within_three_heartbeats(target):
    play(target, POSTED)
    play(target, [(1.2, Tick(), [Send(PEER, m.Renew(US, ("l1",)))])])
    commands = target.handle(Tick(), 3.5)
    assert failure(commands).reason == "peer_lost"
    assert Disconnect(PEER) in commands
    play(target, [(3.6, TicketEnded(KEY, "disconnected"), [BlocksReleased("q1")])])


def test_a_peer_that_answers_heartbeats_is_not_lost_until_the_transfer_deadline(target):
    play(target, POSTED)
    for second in range(1, 20):
        (sent,) = target.handle(Tick(), float(second))
        assert sent.message.lease_ids == ("l1",)
        target.handle(answer(ALIVE), second + 0.1)
    assert failure(target.handle(Tick(), 20.5)).reason == "deadline"


def test_heartbeats_are_as_long_as_frames_while_a_read_stands_still(target):
    """What loses long packets only would let short heartbeats pass."""
    play(target, POSTED)
    play(target, [(1.2, Tick(), [RENEW]), (2.3, Tick(), [LONG_RENEW]), (2.4, answer(ALIVE), [])])
    play(target, [(3.4, Tick(), [LONG_RENEW]), (3.5, TicketEnded(KEY, ""), [Send]), (4.3, answer(ALIVE), [])])
    play(target, [(4.5, Tick(), [Send, RENEW]), (5.6, answer(m.Renewed(())), [])])
    assert RENEW in target.handle(Tick(), 8.5)


def test_short_answers_are_no_answers_to_long_heartbeats(target):
    """They are of messages that were sent before, or come over a new connection. What is lost may be longer."""
    play(target, [*POSTED, (1.0, Tick(), [RENEW]), (1.2, answer(m.Renewed(())), []), (2.3, Tick(), [LONG_RENEW])])
    for second in (3.2, 4.2, 5.1):
        target.handle(answer(m.Renewed(())), second)
    assert LONG_RENEW in target.handle(Tick(), 5.2)
    error = failure(target.handle(Tick(), 5.4))
    assert error.reason == "peer_lost"
    assert "MTU" in error.hint


def test_a_slow_source_has_as_long_as_ever_to_answer_a_long_heartbeat(target):
    play(target, [*POSTED, (1.2, Tick(), [RENEW]), (2.3, Tick(), [LONG_RENEW]), (3.4, answer(m.Renewed(())), [])])
    assert LONG_RENEW in target.handle(Tick(), 4.4)
    target.handle(answer(ALIVE), 5.1)
    assert LONG_RENEW in target.handle(Tick(), 8.0)


def test_nobody_writes_to_a_target_that_reads(target):
    for step in POSTED:
        play(target, [step])
        assert not target.may_be_written()


def test_an_idle_peer_is_not_lost_and_not_bothered(target):
    play(target, DONE)
    play(target, [(100.0, Tick(), []), (200.0, Tick(), [])])


def test_a_peer_that_had_nothing_to_say_for_long_is_not_lost_by_the_next_claim(target):
    play(target, DONE)
    again = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-1", "r2", "l2"))
    claim = Send(PEER, m.Claim(US, "q2", again.reference, 6, (0,)))
    play(target, [(500.0, again, [claim]), (500.0, Tick(), []), (500.6, Tick(), [claim])])
    assert failure(target.handle(Tick(), 503.1)).reason == "peer_lost"


def test_a_lease_that_is_gone_ends_the_read_at_once():
    commands = play(session(), [*POSTED, (0.5, answer(m.Renewed(("l1",))), FAILED)])
    assert failure(commands).reason == "expired"


def test_unanswered_messages_are_repeated():
    target = session()
    play(
        target,
        [(0.0, WANTED, [HELLO]), (0.3, Tick(), []), (0.6, Tick(), [HELLO, CheckLiveness(PEER)]), (0.9, Tick(), [])],
    )
    target = session()
    play(target, [*HANDSHAKE, (0.7, Tick(), []), (0.9, Tick(), [CLAIM]), (1.1, Tick(), [])])
    target = session()
    play(target, [*POSTED, (0.6, TicketEnded(KEY, ""), [LANDED])])
    assert LANDED in target.handle(Tick(), 1.2)


def test_a_source_whose_process_has_ended_is_not_waited_for(target):
    play(target, [(0.0, WANTED, [HELLO]), (0.6, Tick(), [HELLO, CheckLiveness(PEER)])])
    commands = play(target, [(0.7, PeerGone(PEER), [Count, FetchFailed, BlocksReleased, Disconnect(PEER)])])
    assert failure(commands).reason == "peer_lost"
    play(target, [(0.8, PeerGone(PEER), []), (1.0, replace(WANTED, request_id="q2"), [HELLO])])


def test_a_source_whose_host_is_silent_is_not_waited_for(target):
    play(target, [(0.0, WANTED, [HELLO]), (0.6, Tick(), [HELLO, CheckLiveness(PEER)])])
    commands = play(target, [(3.0, HostSilent(PEER), [Count, FetchFailed, BlocksReleased, Disconnect(PEER)])])
    assert failure(commands).reason == "unreachable"
    assert "nothing answers at" in str(failure(commands))
    play(target, [(3.1, HostSilent(PEER), []), (3.2, replace(WANTED, request_id="q2"), [HELLO])])


def test_whoever_lets_nobody_in_is_not_waited_for(target):
    """It has another token, or is another program."""
    play(target, [(0.0, WANTED, [HELLO])])
    commands = play(target, [(0.1, HandshakeRefused(PEER), [Count, FetchFailed, BlocksReleased, Disconnect(PEER)])])
    assert failure(commands).reason == "unreachable"
    assert "token-file" in str(failure(commands))
    play(target, [(0.2, HandshakeRefused(PEER), []), (0.3, replace(WANTED, request_id="q2"), [HELLO])])


def test_whoever_lets_nobody_in_is_asked_again_for_a_request_that_waits(target):
    """It may be a proxy, before an engine that starts."""
    play(target, [(0.0, HOLD, [HELLO]), (0.1, HandshakeRefused(PEER), [Disconnect(PEER)])])
    play(target, [(4.9, Tick(), []), (5.2, Tick(), [HELLO])])


def test_a_source_that_was_met_is_not_lost_if_somebody_ends_a_handshake(target):
    play(target, [*POSTED, (0.8, HandshakeRefused(PEER), [])])


def test_a_source_that_was_met_and_speaks_is_not_lost_if_its_host_ignores_attempts_to_connect(target):
    play(target, POSTED)
    play(target, [(0.8, HostSilent(PEER), []), (2.3, HostSilent(PEER), [])])


def test_a_source_that_was_met_and_whose_host_is_silent_is_lost_before_all_heartbeats_are_missed():
    """A rank that computes may miss many."""
    timing = replace(TIMING, missed_heartbeats=30)
    target = session(timing=timing)
    play(target, POSTED)
    commands = target.handle(HostSilent(PEER), 5.5)
    assert failure(commands).reason == "peer_lost"
    assert "has said nothing for 5.1 s" in str(failure(commands))
    assert Disconnect(PEER) in commands
    target = session(timing=timing)
    play(target, [*DONE, (9.0, HostSilent(PEER), [])])


def test_a_silent_source_whose_process_has_ended_is_not_waited_for_either(target):
    play(target, POSTED)
    assert CheckLiveness(PEER) not in target.handle(Tick(), 2.3)
    assert CheckLiveness(PEER) in target.handle(Tick(), 2.5)
    assert CheckLiveness(PEER) not in target.handle(Tick(), 2.9)
    assert failure(target.handle(PeerGone(PEER), 3.0)).reason == "peer_lost"


def test_a_source_that_nobody_waits_for_is_not_lost_by_a_liveness_probe(target):
    play(target, DONE)
    play(target, [(0.8, PeerGone(PEER), [])])


def test_a_read_whose_bytes_move_is_not_given_up(target):
    """However long it takes on its network, up to the time that a lease may wait."""
    play(target, POSTED)
    limit_s, ended = TIMING.hold_s + TIMING.transfer_s, []
    for second in range(1, int(limit_s) + 3):
        now = float(second)
        target.handle(answer(ALIVE), now)
        target.handle(PeerMoved(PEER), now)
        ended += [now for command in target.handle(Tick(), now) if isinstance(command, FetchFailed)]
    assert ended == [limit_s + 1]


def test_bytes_of_another_peer_are_no_reason_to_wait(target):
    play(target, POSTED)
    ended = []
    for second in range(1, int(TIMING.transfer_s) + 3):
        target.handle(answer(ALIVE), float(second))
        target.handle(PeerMoved(replace(PEER, address="tcp://127.0.0.1:2")), float(second))
        target.handle(PeerMoved(US), float(second))
        ended += [second for command in target.handle(Tick(), float(second)) if isinstance(command, FetchFailed)]
    assert ended == [int(TIMING.transfer_s) + 1]


def test_a_peer_may_be_tested_after_many_others(target):
    """Our own tests end by themselves: only a defect would keep the peer for as long as that."""
    play(target, [(0.0, HOLD, [HELLO]), *HANDSHAKE[1:3]])
    patience_s = TIMING.handshake_s + TIMING.transfer_s
    waiting = [command for second in range(1, int(patience_s)) for command in target.handle(Tick(), float(second))]
    assert Disconnect(PEER) not in waiting
    assert CheckLiveness(PEER) in waiting
    assert Disconnect(PEER) in target.handle(Tick(), patience_s + 0.3)


def test_tests_that_do_not_end_are_said_to_be_tests(target):
    play(target, HANDSHAKE[:3])
    patience_s = TIMING.handshake_s + TIMING.transfer_s
    assert "tests of the transports" in str(failure(target.handle(Tick(), patience_s + 0.3)))


def test_a_handshake_has_a_deadline(target):
    target.handle(WANTED, 0.0)
    commands = target.handle(Tick(), 5.0)
    assert failure(commands).reason == "deadline"
    assert "no handshake with" in str(failure(commands))
    assert BlocksReleased("q1") in commands
    play(target, [(6.0, replace(WANTED, request_id="q2"), [HELLO])])


def test_a_restarted_source_is_refused_and_met_anew(target):
    refused = m.Refusal(m.Reason.WRONG_EPOCH, "the engine has restarted", "epoch-1", "epoch-2", "")
    commands = play(
        target, [(0.0, WANTED, [HELLO]), (0.1, answer(refused), [Count, FetchFailed, BlocksReleased, Disconnect])]
    )
    assert failure(commands).reason == "wrong_epoch"
    newer = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-2", "r2", "l2"))
    (hello,) = play(target, [(0.2, newer, [Send])])
    assert hello.peer.epoch == "epoch-2"


def test_no_transport_is_a_typed_failure():
    commands = play(
        session(),
        [
            *HANDSHAKE[:3],
            (0.3, PeerUnreachable(PEER, "shm: other host"), [Count, FetchFailed, BlocksReleased, Disconnect]),
        ],
    )
    assert failure(commands).reason == "unreachable"


@pytest.mark.parametrize(
    "grant",
    [
        m.Grant("q1", ((3,),)),
        m.Grant("q1", ((3, 99),)),
        m.Grant("q1", ((3, 3),)),
        m.Grant("q1", ()),
    ],
    ids=["too few blocks", "out of range", "twice", "no table"],
)
def test_a_grant_that_does_not_fit_the_layout_is_not_read(grant):
    commands = play(session(), [*HANDSHAKE, (0.4, answer(grant), [Count, FetchFailed, ABORT, BlocksReleased])])
    assert failure(commands).reason == "out_of_range"


def test_another_model_is_refused_with_every_difference():
    other = describe(attention(2, 4, 4, "float16", 4), EngineShape(1, 1, 8, 4, "head-major"), 1 << 30)
    commands = play(
        session(other),
        [*HANDSHAKE[:3], (0.3, PeerConnected(PEER, "shm", ""), [Count, FetchFailed, ABORT, BlocksReleased])],
    )
    assert failure(commands).reason == "incompatible"
    assert "float32 at the source, float16 at the target" in str(failure(commands))
    assert "[2, 4] at the source, [4, 4] at the target" in str(failure(commands))


def test_an_unexpected_message_is_counted():
    play(session(), [*HANDSHAKE, (0.4, answer(CLAIM.message), [Count("unexpected_messages", "Claim")])])


RANKS = describe(MODEL, EngineShape(2, 1, 4, 8, "token-major"), 1 << 20)
PEERS = [PeerKey(f"tcp://127.0.0.1:{port}", "p0", "epoch-1") for port in (1, 2)]


def greet(target, ranks=RANKS, numbers=(0, 1), num_ranks=2, costs=TYPICAL_HOST):
    """Two source ranks, met up to the point where their transports have connected; returns the last commands."""
    commands = target.handle(replace(WANTED, addresses=tuple(peer.address for peer in PEERS)), 0.0)
    for peer, layout, number in zip(PEERS, ranks, numbers, strict=True):
        party = m.Party("p0", "epoch-1", number)
        target.handle(
            AnswerArrived(peer, m.Welcome(m.WIRE_VERSION, "0.1.0", party, num_ranks, fingerprint(layout))), 0.1
        )
        target.handle(AnswerArrived(peer, m.Offer(party, layout, (), m.Probe(0, 0, 0))), 0.1)
        commands = target.handle(PeerConnected(peer, "shm", "", costs), 0.2)
    return commands


def test_two_source_ranks_are_read_and_both_must_be_valid(target):
    """Bytes are on their way from the first grant on, whoever comes later."""
    assert [claim.peer for claim in greet(target)] == PEERS
    for began, peer in zip((0.3, 0.6), PEERS, strict=True):
        play(target, [(began, AnswerArrived(peer, GRANT), [Post])])
        play(target, [(began + 0.1, TicketEnded(ReadKey("q1", peer), ""), [Send])])
    play(target, [(0.8, AnswerArrived(PEERS[0], m.Valid("q1")), [])])
    (fetched,) = play(target, [(0.9, AnswerArrived(PEERS[1], m.Valid("q1")), [Fetched])])
    assert fetched.report.num_bytes == 6 * MODEL.bytes_per_token
    assert phases(fetched) == {"handshake": 0.2, "claim": 0.1, "wire": 0.4, "verify": 0.2}


def test_a_source_that_grants_late_has_its_own_time_to_move(target):
    greet(target)
    first, second = PEERS
    play(target, [(0.3, AnswerArrived(first, GRANT), [Post]), (0.4, TicketEnded(ReadKey("q1", first), ""), [Send])])
    play(target, [(1.0, AnswerArrived(first, m.Valid("q1")), []), (4.0, AnswerArrived(second, GRANT), [Post])])
    for now in (0.4 + TIMING.transfer_s, 4.0 + TIMING.transfer_s, 4.1 + TIMING.transfer_s):
        target.handle(AnswerArrived(second, ALIVE), now)
        failed = [command for command in target.handle(Tick(), now) if isinstance(command, FetchFailed)]
        assert bool(failed) == (now > 4.0 + TIMING.transfer_s)


@pytest.mark.parametrize(("granted_at", "ends_at"), [(None, 25), (1, 21), (4, 24), (8, 25)])
def test_that_one_source_gets_on_is_no_reason_to_wait_for_another(granted_at, ends_at):
    """The first says again and again that it still computes, the second is there and no more. A grant gives it the time
    of a read, but not more than the whole fetch has."""
    target, (first, second) = session(), PEERS
    greet(target)
    said = [(now, AnswerArrived(first, m.Queued("q1"))) for now in range(1, 40)]
    said += [(now, AnswerArrived(second, GRANT if now == granted_at else ALIVE)) for now in range(1, 40)]
    ends = [now for now, event in sorted(said, key=lambda each: each[0]) if _fails(target, event, now)]
    assert ends[0] == ends_at + 1


def test_a_read_that_hangs_has_the_time_from_its_own_grant(target):
    greet(target)
    play(target, [(at, AnswerArrived(peer, GRANT), [Post]) for at, peer in zip((1, 5), PEERS, strict=True)])
    said = [(now, AnswerArrived(peer, ALIVE)) for now in range(6, 40) for peer in PEERS]
    assert next(now for now, event in said if _fails(target, event, now)) == 22


def test_a_read_that_is_valid_waits_for_the_others_as_long_as_they_get_on():
    target, (first, second) = session(), PEERS
    greet(target)
    play(target, [(1, AnswerArrived(first, GRANT), [Post]), (2, TicketEnded(ReadKey("q1", first), ""), [Send])])
    play(target, [(3, AnswerArrived(first, m.Valid("q1")), [])])
    for now in range(4, 100):
        assert not _fails(target, AnswerArrived(second, m.Queued("q1")), now)


def test_a_source_that_has_said_all_is_not_idle_while_others_are_waited_for():
    """To forget it would end the fetch."""
    target, (first, second) = session(timing=replace(TIMING, idle_peer_s=5.0)), PEERS
    greet(target)
    play(target, [(1, AnswerArrived(first, GRANT), [Post]), (2, TicketEnded(ReadKey("q1", first), ""), [Send])])
    play(target, [(3, AnswerArrived(first, m.Valid("q1")), [])])
    for now in range(4, 20):
        assert not _fails(target, AnswerArrived(second, m.Queued("q1")), now)
        assert Disconnect(first) not in target.handle(Tick(), now + 0.5)


def _fails(target, event, now):
    return any(isinstance(each, FetchFailed) for step in (event, Tick()) for each in target.handle(step, float(now)))


def test_what_pays_for_two_sources_need_not_pay_for_each():
    """We post the rows of both, if we read them; each that writes posts its own, and each gathers by itself."""
    staging = StagingPolicy((Strategy.DIRECT, Strategy.PACK), 1 << 20)
    program = bind(route(RANKS, TARGET_LAYOUTS).between(0, 0), RANKS[0], TARGET_LAYOUTS[0])
    dearer = [replace(TYPICAL_HOST, gather_bytes_per_s=1e6, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 400)]
    modes = [staging.before_claim(program, WANTED.ranges, costs, Direction.READ).strategy for costs in dearer]
    costs = dearer[modes.index(Strategy.PACK) - 1]
    ours = TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, staging=staging)
    assert {type(command.message) for command in greet(TargetSession(ours, TIMING), costs=costs)} == {m.TargetOffer}
    written = TargetSession(replace(ours, direction=Direction.WRITE), TIMING)
    assert [claim.message.strategy for claim in greet(written, costs=costs)] == [Strategy.DIRECT] * 2


def test_what_is_read_is_scattered_sooner_where_others_are_read_beside_it():
    """While a slot is scattered, others are on the wire."""
    layouts = describe(MODEL, EngineShape(1, 1, 8, 4, "token-major"), 1 << 30)
    staging, starts = StagingPolicy((Strategy.DIRECT, Strategy.SCATTER), 1 << 20), region_starts(RANKS[0], layouts[0])
    program = bind(route(RANKS, layouts).between(0, 0), RANKS[0], layouts[0])
    copies = copies_for(program, GRANT.block_tables, WANTED.block_tables, WANTED.ranges)
    dearer = [replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 400)]
    modes = [staging.before_read(copies, costs, starts) for costs in dearer]
    costs = dearer[modes.index(Strategy.SCATTER) - 1]
    target = TargetSession(TargetIdentity(US, "0.1.0", layouts, staging=staging), TIMING)
    greet(target, costs=costs)
    play(target, [(0.3, AnswerArrived(PEERS[0], GRANT), [Acquire])])


@pytest.mark.parametrize(("direction", "rows_fan_in"), [(Direction.READ, 3.0), (Direction.WRITE, 1.0)])
def test_everything_comes_through_us_but_rows_are_posted_by_who_moves_them(direction, rows_fan_in):
    both = replace(TYPICAL_HOST, sharing_s=1.0)
    found = [beside(both, (3.0, 2), direction, may_share) for may_share in (False, True)]
    fans, shared_s = (
        {"fan_in": 3.0, "fan_out": 2, "rows_fan_in": rows_fan_in},
        1.0 if direction is Direction.READ else 0.0,
    )
    assert found == [replace(both, **fans, sharing_s=each) for each in (0.0, shared_s)]


@pytest.mark.parametrize(("numbers", "num_ranks"), [((1, 0), 2), ((0, 1), 3)], ids=["swapped", "one is missing"])
def test_ranks_that_are_not_those_of_the_reference_are_not_read(numbers, num_ranks):
    assert failure(greet(session(), numbers=numbers, num_ranks=num_ranks)).reason == "incompatible"


def test_a_claim_names_all_ranks_of_our_engine_that_read_this_source():
    """Two target ranks read one source: its lease must wait for both."""
    both = describe(MODEL, EngineShape(2, 1, 8, 4, "head-major"), 1 << 30)
    target = session(both)
    play(target, HANDSHAKE[:3])
    (claim,) = play(target, [(0.3, PeerConnected(PEER, "shm", ""), [Send])])
    assert claim.message.readers == (0, 1)


ONE_LATENT = latent(num_layers=1, dim=4, dtype="float32", item_bytes=4)
REPLICAS = describe(ONE_LATENT, EngineShape(2, 1, 4, 8, "token-major"), 1 << 20)


def test_a_replica_that_is_not_read_is_told_so():
    """Both source ranks hold the same: one is read, the other learns by an empty read that the request is done."""
    target = session(describe(ONE_LATENT, EngineShape(1, 1, 8, 4, "token-major"), 1 << 30))
    claims = greet(target, REPLICAS)
    assert [(claim.peer, claim.message.readers) for claim in claims] == [(PEERS[0], (0,)), (PEERS[1], (0,))]
    posts = [command for peer in PEERS for command in target.handle(AnswerArrived(peer, GRANT), 0.4)]
    assert [post.copies.num_bytes for post in posts] == [6 * ONE_LATENT.bytes_per_token, 0]
    for peer in PEERS:
        play(target, [(0.5, TicketEnded(ReadKey("q1", peer), ""), [Send])])
    play(target, [(0.6, AnswerArrived(PEERS[0], m.Valid("q1")), [])])
    play(target, [(0.6, AnswerArrived(PEERS[1], m.Valid("q1")), [Fetched])])


def test_a_rank_leaves_alone_the_sources_that_another_rank_of_ours_reads():
    """Ranks 0 and 1 of ours read one replica each; neither may end the lease that the other one still needs."""
    both = describe(ONE_LATENT, EngineShape(2, 1, 8, 4, "token-major"), 1 << 30)
    target = session(both)
    claim, tell_unneeded = greet(target, REPLICAS)
    assert (claim.peer, claim.message.readers) == (PEERS[0], (0,))
    assert tell_unneeded == Send(PEERS[1], m.Renew(US, ()))
    play(
        target,
        [
            (0.4, AnswerArrived(PEERS[0], GRANT), [Post]),
            (0.5, TicketEnded(ReadKey("q1", PEERS[0]), ""), [Send]),
            (0.6, AnswerArrived(PEERS[0], m.Valid("q1")), [Fetched]),
        ],
    )
    (again,) = target.handle(replace(WANTED, request_id="q2", addresses=tuple(peer.address for peer in PEERS)), 0.7)
    assert (again.peer, type(again.message)) == (PEERS[0], m.Claim)


def test_a_rank_without_any_work_is_done_at_once():
    """Our second rank holds nothing, and the first one reads both sources and tells them."""
    nothing = replace(TARGET_LAYOUTS[0], states=(), placements=())
    ours = TargetIdentity(OTHER_TARGET, "0.1.0", (TARGET_LAYOUTS[0], nothing))
    *excuses, fetched = greet(TargetSession(ours, TIMING))
    assert excuses == [Send(peer, m.Renew(ours.party, ())) for peer in PEERS]
    assert (type(fetched), fetched.report.num_bytes) == (Fetched, 0)


def test_a_fetch_that_fails_before_its_claim_tells_the_source(target):
    play(target, [*HANDSHAKE[:2], (0.2, AbortRequest("q1"), [Count, FetchFailed, ABORT, BlocksReleased])])


def test_a_peer_that_answers_anything_but_what_it_should_is_a_deadline(target):
    """Neither a grant nor silence: only the limit of the whole fetch ends this."""
    play(target, HANDSHAKE)
    for second in range(1, 26):
        target.handle(answer(ALIVE), float(second))
        commands = target.handle(Tick(), float(second))
        assert not any(isinstance(command, FetchFailed) for command in commands)
    target.handle(answer(ALIVE), 25.1)
    assert failure(target.handle(Tick(), 25.2)).reason == "deadline"


def test_valid_for_another_claim_is_not_ours():
    play(session(), [*POSTED, (0.6, TicketEnded(KEY, ""), [LANDED]), (0.7, answer(m.Valid("q9")), [])])


def test_heartbeats_go_on_until_the_answer_to_landed(target):
    play(target, [*POSTED, (0.6, TicketEnded(KEY, ""), [LANDED])])
    assert Send(PEER, m.Renew(US, ("l1",))) in target.handle(Tick(), 1.5)


def test_a_lease_of_somebody_else_that_is_gone_changes_nothing():
    play(session(), [*POSTED, (0.5, answer(m.Renewed(("l9",))), [])])


def test_losing_a_peer_twice_fails_a_fetch_once(target):
    play(target, [*POSTED, (0.5, PeerUnreachable(PEER, "gone"), [Count, FetchFailed, Cancel(KEY), Disconnect])])
    play(target, [(0.6, PeerUnreachable(PEER, "gone"), [Disconnect])])


def test_an_abort_ends_with_the_silence_of_its_peer(target):
    play(target, [*POSTED, (0.5, AbortRequest("q1"), FAILED), (0.5, TicketEnded(KEY, ""), [BlocksReleased])])
    assert target.next_deadline(0.5) < 2.0
    assert ABORT in target.handle(Tick(), 1.5)
    play(target, [(4.0, Tick(), []), (9.0, Tick(), [])])
    assert target.next_deadline(9.0) > 9.0 + TIMING.lease_s


def test_a_repeated_welcome_and_a_repeated_offer_change_nothing():
    welcome = answer(m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(SOURCE_LAYOUT)))
    play(session(), [*HANDSHAKE[:2], (0.2, welcome, []), *HANDSHAKE[2:3], (0.2, answer(OFFER), [])])


@pytest.mark.parametrize(
    "message",
    [
        m.Welcome(m.WIRE_VERSION, "0.1.0", m.Party("p9", "epoch-1", 0), 1, fingerprint(SOURCE_LAYOUT)),
        m.Welcome(m.WIRE_VERSION, "0.1.0", m.Party("p0", "epoch-2", 0), 1, fingerprint(SOURCE_LAYOUT)),
    ],
)
def test_somebody_else_who_answers_is_not_the_source(message):
    commands = play(
        session(), [(0.0, WANTED, [HELLO]), (0.1, answer(message), [Count, FetchFailed, BlocksReleased, Disconnect])]
    )
    assert failure(commands).reason == "wrong_engine"


def test_another_layout_than_announced_is_refused():
    (other,) = describe(MODEL, EngineShape(1, 1, 4, 9, "token-major"), 1 << 20)
    offer = m.Offer(SOURCE, other, (), m.Probe(0, 0, 0))
    commands = play(session(), [*HANDSHAKE[:2], (0.2, answer(offer), [Count, FetchFailed, BlocksReleased, Disconnect])])
    assert failure(commands).reason == "malformed"


def test_a_new_incarnation_replaces_the_old_one(target):
    """Else every restart of an idle source would keep the memory of the one before mapped."""
    play(target, DONE)
    newer = PeerKey(PEER.address, "p0", "epoch-2")
    welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", m.Party("p0", "epoch-2", 0), 1, fingerprint(SOURCE_LAYOUT))
    wanted = replace(WANTED, request_id="q2", reference=m.Reference("p0", "epoch-2", "r2", "l2"))
    play(target, [(1.0, wanted, [Send]), (1.1, AnswerArrived(newer, welcome), [Send, Disconnect(PEER)])])


HOLD = HoldRequest(REFERENCE, (PEER.address,))


def held() -> TargetSession:
    """Meets the source while the request waits."""
    target = session()
    play(target, [(0.0, HOLD, [HELLO]), *HANDSHAKE[1:3], (0.3, PeerConnected(PEER, "shm", "shm 9 GB/s"), [])])
    return target


def test_a_waiting_request_keeps_its_lease_and_then_claims_at_once():
    target = held()
    for second in (1, 2, 3):
        assert target.handle(Tick(), float(second)) == [RENEW]
        target.handle(answer(ALIVE), second + 0.1)
    assert target.next_deadline(3.5) < 4.5
    assert target.handle(WANTED, 3.6) == [CLAIM]
    target.handle(AbortRequest("q1"), 3.7)
    target.handle(answer(m.Aborted("q1", PEER.epoch)), 3.8)
    assert [c for second in (5, 6, 7) for c in target.handle(Tick(), float(second))] == []


def test_a_source_that_is_silent_while_nothing_is_read_is_not_lost():
    target = held()
    commands = [command for second in range(1, 20) for command in target.handle(Tick(), float(second))]
    assert set(commands) == {RENEW}


def test_a_lease_is_not_held_for_ever():
    target = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS), replace(TIMING, hold_s=5.0))
    play(target, [(0.0, HOLD, [HELLO]), *HANDSHAKE[1:3], (0.3, PeerConnected(PEER, "shm", "shm 9 GB/s"), [])])
    target.handle(HOLD, 4.0)  # Again: it does not begin anew.
    assert target.handle(Tick(), 4.9) == [RENEW]
    assert target.handle(Tick(), 6.0) == []
    assert target.next_deadline(6.0) > 100.0


def test_a_source_that_cannot_be_met_is_met_again_when_the_turn_comes(target):
    target.handle(HOLD, 0.0)
    assert Disconnect(PEER) in target.handle(Tick(), 5.1)
    assert target.handle(Tick(), 6.2) == []
    assert target.handle(WANTED, 7.0) == [HELLO]


@pytest.mark.parametrize("reason", [m.Reason.PEER_LOST, m.Reason.DEADLINE])
def test_a_source_that_was_lost_is_met_again_for_the_leases_of_waiting_requests(reason):
    """Else one silence of a few seconds would cost the cache of everything in the queue."""
    target = held()
    target.handle(answer(m.Refusal(reason, "a pause", "", "", "")), 1.0)
    assert [c for now in (2.0, 3.0, 4.0, 5.9) for c in target.handle(Tick(), now)] == []
    assert target.next_deadline(5.9) < 6.5
    play(target, [(6.0, Tick(), [HELLO])])
    play(target, [(at + 6.1, event, commands) for at, event, commands in HANDSHAKE[1:3]])
    play(target, [(6.5, PeerConnected(PEER, "shm", "shm 9 GB/s"), [])])
    assert RENEW in target.handle(Tick(), 7.6)


def test_a_host_that_is_silent_while_its_source_is_met_again_is_asked_until_it_answers():
    """The network may be mended before the leases end."""
    target = held()
    target.handle(answer(m.Refusal(m.Reason.PEER_LOST, "a pause", "", "", "")), 1.0)
    assert HELLO in target.handle(Tick(), 6.1)
    assert Disconnect(PEER) in target.handle(HostSilent(PEER), 8.0)
    assert target.handle(Tick(), 12.9) == []
    assert HELLO in target.handle(Tick(), 13.1)


def test_a_source_that_has_been_started_again_is_not_met_for_the_leases_of_the_one_before():
    target = held()
    target.handle(answer(m.Refusal(m.Reason.WRONG_EPOCH, "started again", "", "", "")), 1.0)
    assert [c for now in range(2, 30) for c in target.handle(Tick(), float(now))] == []


def test_a_lost_source_that_no_waiting_request_needs_is_left_alone():
    target = held()
    target.handle(answer(m.Refusal(m.Reason.PEER_LOST, "a pause", "", "", "")), 1.0)
    target.handle(WANTED, 2.0)
    target.handle(AbortRequest("q1"), 2.1)
    target.handle(answer(m.Refusal(m.Reason.PEER_LOST, "a pause", "", "", "")), 2.2)
    assert [c for now in range(3, 30) for c in target.handle(Tick(), float(now))] == []


def test_a_lease_is_kept_while_a_transport_to_its_source_is_looked_for(target):
    play(target, HANDSHAKE[:3])
    renew = Send(PEER, m.Renew(US, ("l1",)))
    assert renew in target.handle(Tick(), 1.2)
    assert renew not in target.handle(Tick(), 1.3)
    play(target, [(1.4, PeerConnected(PEER, "shm", "shm 9 GB/s"), [CLAIM])])
    assert renew not in target.handle(Tick(), 2.3)
