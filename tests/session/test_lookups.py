"""An engine that knows only an address asks who is there, and hears of all ranks."""

import msgspec
import pytest
from playbook import play
from session_cases import OFFER, PEER, SOURCE_LAYOUT, TARGET_LAYOUTS, WELCOME, said, source_session
from session_cases import SOURCE as THEM
from session_cases import TARGET as US

from kvferry.plan.description.layout import fingerprint
from kvferry.session.commands import CheckLiveness, Count, Disconnect, Located, LocateFailed, RemoteEngine, Reply, Send
from kvferry.session.events import (
    AnswerArrived,
    HandshakeRefused,
    HostSilent,
    LocateRequest,
    PeerGone,
    RanksKnown,
    Tick,
)
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(resend_s=0.5, handshake_s=5.0)
ADDRESS, ALL = PEER.address, (PEER.address, "tcp://127.0.0.1:9")
NOBODY = PeerKey(ADDRESS, "", "")
ASK = Send(NOBODY, m.Hello(m.WIRE_VERSION, "0.1.0", US, "", ""))
REQUEST = LocateRequest(ADDRESS)


@pytest.fixture
def target() -> TargetSession:
    return TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS), TIMING)


def answer(message):
    return AnswerArrived(NOBODY, message)


# What is none, what only one host can read, and what would have to be looked up.
STRANGE = (
    "ipc:///tmp/x",
    "tcp://[fe80::1%nosuch]:5555",
    "tcp://prefill:5555",
    "tcp://10.0.0.1:0",
    "tcp://10.0.0.1:70000",
)


@pytest.mark.parametrize("may_leave_host", [True, False])
def test_without_a_token_nobody_is_sent_on_to_another_host(may_leave_host):
    """Where nobody proves who it is, an answer may come from anybody of this host."""
    ours = TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, may_leave_host=may_leave_host)
    elsewhere = ("tcp://[::1]:9", "tcp://192.0.2.1:9")
    answered = Located if may_leave_host else LocateFailed
    _, told = play(
        TargetSession(ours, TIMING),
        [(0.0, REQUEST, [ASK]), (0.1, answer(welcome(2, elsewhere)), [Disconnect(NOBODY), answered])],
    )
    if not may_leave_host:
        assert (told.error.reason, told.error.found) == (m.Reason.MALFORMED, elsewhere[1])


def welcome(num_ranks, addresses):
    return m.Welcome(m.WIRE_VERSION, "0.1.0", THEM, num_ranks, fingerprint(SOURCE_LAYOUT), addresses)


@pytest.mark.parametrize(("num_ranks", "addresses", "found"), [(2, ALL, ALL), (1, (), (ADDRESS,))])
def test_whoever_is_there_says_who_it_is(target, num_ranks, addresses, found):
    engine = RemoteEngine(THEM.engine_id, THEM.epoch, found)
    play(
        target,
        [
            (0.0, REQUEST, [ASK]),
            (0.1, answer(welcome(num_ranks, addresses)), [Disconnect(NOBODY), Located(ADDRESS, engine)]),
            # Said again, it changes nothing.
            (0.2, answer(welcome(num_ranks, addresses)), []),
            (9.0, Tick(), []),
        ],
    )


@pytest.mark.parametrize(
    ("event", "reason"),
    [(PeerGone, "peer_lost"), (HostSilent, "unreachable"), (HandshakeRefused, "unreachable")],
)
def test_where_nobody_will_answer_that_is_not_waited_for(target, event, reason):
    play(target, [(0.0, REQUEST, [ASK]), (3.1, Tick(), [ASK, CheckLiveness(NOBODY)])])
    _, failed = play(target, [(3.2, event(NOBODY), [Disconnect(NOBODY), LocateFailed])])
    assert failed.error.reason == reason
    play(target, [(3.3, event(NOBODY), []), (9.0, Tick(), [])])


def test_whoever_is_sent_on_to_it_gives_it_as_long(target):
    second = PeerKey(above(2), "", "")
    play(target, [(0.0, LocateRequest(ADDRESS, 2), [ASK]), (1.5, answer(of_three(0)), [Disconnect(NOBODY), Send])])
    play(target, [(3.2, PeerGone(second), []), (4.4, PeerGone(second), [])])
    play(target, [(4.5, PeerGone(second), [Disconnect(second), LocateFailed])])


def test_an_engine_that_does_not_listen_yet_has_some_seconds_to_start(target):
    """Of a server with data parallelism one may be later than another that has said where it will be."""
    play(target, [(0.0, REQUEST, [ASK]), (1.1, PeerGone(NOBODY), []), (2.9, PeerGone(NOBODY), [])])
    engine = RemoteEngine(THEM.engine_id, THEM.epoch, (ADDRESS,))
    play(target, [(3.0, answer(welcome(1, ())), [Disconnect(NOBODY), Located(ADDRESS, engine)])])


def above(number):
    """The address of that engine of a server whose first one is at ADDRESS."""
    host, _, port = ADDRESS.rpartition(":")
    return f"{host}:{int(port) + number}"


def of_three(number):
    """What rank 0 of an engine says that is one of three."""
    return m.Welcome(m.WIRE_VERSION, "0.1.0", named(number), 1, fingerprint(SOURCE_LAYOUT), (), 3)


def named(number):
    return m.Party(f"p0-{number}", "epoch-1", 0)


def test_of_a_server_with_data_parallelism_the_one_that_is_meant_is_asked(target):
    second = PeerKey(above(2), "", "")
    ask_second = Send(second, ASK.message)
    engine = RemoteEngine("p0-2", "epoch-1", (above(2),))
    found = [Located(ADDRESS, engine, number, 3) for number in (5, 8)]
    first = RemoteEngine("p0-0", "epoch-1", (ADDRESS,))
    play(
        target,
        [
            (0.0, LocateRequest(ADDRESS, 5), [ASK]),
            (0.0, LocateRequest(ADDRESS, 8), []),
            (0.0, LocateRequest(ADDRESS, 5), []),
            (0.0, LocateRequest(ADDRESS, 3), []),
            (0.1, answer(of_three(0)), [Disconnect(NOBODY), ask_second, Located(ADDRESS, first, 3, 3)]),
            (0.2, AnswerArrived(second, of_three(2)), [Disconnect(second), *found]),
            (9.0, Tick(), []),
        ],
    )


def test_who_is_sent_on_waits_no_longer_than_anybody_else(target):
    second = PeerKey(above(2), "", "")
    play(target, [(0.0, LocateRequest(ADDRESS, 2), [ASK]), (4.9, answer(of_three(0)), [Disconnect(NOBODY), Send])])
    *_, failed = play(target, [(5.0, Tick(), [Disconnect(second), LocateFailed])])
    assert (failed.address, failed.number, failed.error.reason) == (ADDRESS, 2, m.Reason.DEADLINE)


def test_whoever_asks_an_engine_itself_means_that_one(target):
    """Its address may be the one that the room of another request leads to."""
    second = PeerKey(above(1), "", "")
    engine = RemoteEngine("p0-1", "epoch-1", (above(1),))
    play(
        target,
        [
            (0.0, LocateRequest(above(1)), [Send(second, ASK.message)]),
            (0.0, LocateRequest(ADDRESS, 1), [ASK]),
            (0.1, answer(of_three(0)), [Disconnect(NOBODY)]),
            (
                0.2,
                AnswerArrived(second, of_three(1)),
                [Disconnect(second), Located(above(1), engine, 0, 3), Located(ADDRESS, engine, 1, 3)],
            ),
        ],
    )


def test_an_engine_for_which_no_port_is_left_is_nowhere(target):
    last, number = "tcp://127.0.0.1:65535", 1
    there = PeerKey(last, "", "")
    play(target, [(0.0, LocateRequest(last, number), [Send(there, ASK.message)])])
    disconnected, failed = target.handle(AnswerArrived(there, of_three(0)), 0.1)
    assert disconnected == Disconnect(there)
    assert (failed.number, failed.error.reason) == (number, m.Reason.MALFORMED)


def test_a_question_is_repeated_and_given_up(target):
    play(target, [(0.0, REQUEST, [ASK])])
    assert target.next_deadline(0.0) <= TIMING.resend_s
    steps = [(0.1, REQUEST, []), (0.3, Tick(), []), (0.6, Tick(), [ASK, CheckLiveness(NOBODY)]), (0.8, Tick(), [])]
    *_, failed = play(target, [*steps, (5.0, Tick(), [Disconnect(NOBODY), LocateFailed])])
    assert failed.error.reason == m.Reason.DEADLINE
    assert target.next_deadline(6.0) == float("inf")
    # It can be asked for again.
    play(target, [(6.0, REQUEST, [ASK])])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (welcome(2, ()), m.Reason.MALFORMED),
        (welcome(2, (ADDRESS,)), m.Reason.MALFORMED),
        (welcome(1, ALL), m.Reason.MALFORMED),
        *((welcome(1, (strange,)), m.Reason.MALFORMED) for strange in STRANGE),
        (welcome(0, ()), m.Reason.MALFORMED),
        (m.Refusal(m.Reason.WIRE_VERSION, "wire versions differ", "1", "2", ""), m.Reason.WIRE_VERSION),
    ],
)
def test_an_answer_that_is_no_use(target, message, reason):
    play(target, [(0.0, REQUEST, [ASK])])
    *_, failed = target.handle(answer(message), 0.1)
    assert (type(failed), failed.address, failed.error.reason) == (LocateFailed, ADDRESS, reason)


def test_an_answer_that_says_something_else_is_counted_and_waited_out(target):
    play(target, [(0.0, REQUEST, [ASK]), (0.1, answer(OFFER), []), (0.2, answer(m.Abort(US, "c", "l")), [Count])])
    play(target, [(0.3, answer(welcome(1, ())), [Disconnect, Located])])


def test_a_lookup_is_no_handshake(target):
    """Who is asked for without a name has not been met: a fetch from there begins with a hello of its own."""
    play(target, [(0.0, REQUEST, [ASK]), (0.1, AnswerArrived(PEER, WELCOME), [])])


def test_a_source_names_its_ranks_once_it_knows_them():
    source = source_session(TIMING)
    hello = m.Hello(m.WIRE_VERSION, "0.1.0", US, "", "")
    play(source, [(0, said(hello), [Reply("x", welcome(1, ()))])])
    play(source, [(1, RanksKnown((ADDRESS,)), []), (2, said(hello), [Reply("x", welcome(1, (ADDRESS,)))])])
    several = msgspec.structs.replace(welcome(1, (ADDRESS,)), data_parallel_size=3)
    play(source, [(2, RanksKnown((ADDRESS,), 3), []), (2, said(hello), [Reply("x", several)])])
    named = msgspec.structs.replace(hello, expects_engine_id=THEM.engine_id, expects_epoch="another")
    (refused,) = [c.message for c in source.handle(said(named), 3) if isinstance(c, Reply)]
    assert refused.reason == m.Reason.WRONG_EPOCH
