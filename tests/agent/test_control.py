"""The control channel between two parties: who gets in, who does not, and what it costs whom."""

import contextlib
import itertools
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
import zmq

from kvferry import SharedToken
from kvferry.agent.control import channel as channel_module
from kvferry.agent.control import source_connections
from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.control.curve import secure_connecting
from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.agent.control.sockets import MAX_FRAMES_PER_RECEIVE, MAX_QUEUED, OPTIONS
from kvferry.errors import ConfigurationError
from kvferry.session.keys import PeerKey
from kvferry.wire.codec import MAX_REQUEST_BYTES

OURS, THEIRS = SharedToken(secrets.token_bytes(32)), SharedToken(secrets.token_bytes(32))
DEADLINE_S = 20.0


@pytest.fixture
def channel():
    """Make channels on this host; all are closed at the end."""
    with ExitStack() as undo:

        def make(token=NO_TOKEN, **options):
            made = ControlChannel("127.0.0.1", 0, token, **options)
            undo.callback(made.close)
            return made

        yield make


@pytest.fixture
def stranger():
    """A bare ZeroMQ socket that none of our rules hold for."""
    context, made = zmq.Context(), []

    def make(kind=zmq.DEALER):
        made.append(context.socket(kind))
        return made[-1]

    yield make
    context.destroy(linger=0)


def key(channel) -> PeerKey:
    return PeerKey(channel.address, "p0", "e1")


def frames(channel, *others, until=lambda arrivals: arrivals, seconds=DEADLINE_S):
    """What arrives at a channel while all of them run, until there is enough of it."""
    arrivals, deadline = [], time.monotonic() + seconds
    while not until(arrivals) and time.monotonic() < deadline:
        arrivals += channel.receive(0.01)
        for other in others:
            other.receive(0.0)
    return arrivals


def counted(channel, *others, reasons=("stranger",)):
    """How often somebody was not let in for one of these reasons, once somebody was."""
    number, deadline = 0, time.monotonic() + DEADLINE_S
    while not number and time.monotonic() < deadline:
        assert channel.receive(0.01) == []
        for other in others:
            assert other.receive(0.0) == []
        counts = channel.take_counts()
        number += sum(counts["connections_refused", reason] for reason in reasons)
    return number


@pytest.mark.parametrize("token", [NO_TOKEN, OURS], ids=["no token", "token"])
def test_two_channels_that_know_the_same_token_converse(channel, token):
    listener, connector = channel(token), channel(token)
    assert connector.send(key(listener), b"question")
    (asked,) = frames(listener, connector)
    assert (asked.source, asked.frame) == ((), b"question")
    assert listener.reply(asked.routing_id, b"answer")
    (answered,) = frames(connector, listener)
    assert (answered.source, answered.frame) == ((key(listener),), b"answer")


@pytest.mark.parametrize("pair", [(OURS, THEIRS), (OURS, NO_TOKEN), (NO_TOKEN, OURS)], ids=["other", "none", "extra"])
def test_who_does_not_know_the_token_is_counted_and_not_heard(channel, pair):
    listener, connector = channel(pair[0]), channel(pair[1])
    connector.send(key(listener), b"question")
    # Where only one side has a token, it depends on who notices first.
    assert counted(listener, connector, reasons=("stranger", "unfinished")) >= 1


@pytest.fixture
def impatient(monkeypatch):
    """Whoever refuses for a short time is taken to go on."""
    monkeypatch.setattr(source_connections, "REFUSED_S", 0.3)


def refusing(connector, peer, *others, seconds=DEADLINE_S):
    """Whom the connector takes for somebody who lets nobody in, once there is one, while it asks again and again."""
    found, deadline = [], time.monotonic() + seconds
    while not found and time.monotonic() < deadline:
        connector.send(peer, b"question")
        for each in (connector, *others):
            assert each.receive(0.01) == []
        found = connector.refused_by()
    return found


@pytest.mark.parametrize("pair", [(OURS, THEIRS), (OURS, NO_TOKEN), (NO_TOKEN, OURS)], ids=["other", "none", "extra"])
def test_who_is_not_let_in_hears_of_it_each_time(channel, pair, impatient):
    listener, connector = channel(pair[0]), channel(pair[1])
    for _ in range(2):
        assert refusing(connector, key(listener), listener) == [key(listener)]
        assert connector.refused_by() == []
        # Nobody is connected to any more, and nothing is kept of it.
        assert not connector._sources._by_socket
        assert not connector._sources._refused_since


def test_whoever_is_refused_for_a_moment_is_heard_after_it(channel):
    """A proxy has no agent behind it yet."""
    listener, connector = channel(OURS), channel(OURS)
    wire = Wire(listener.address)
    peer = PeerKey(wire.address, "p0", "e1")
    for _ in range(3):
        assert connector.send(peer, b"question")
        wire.refuse()
        while connector._sources._by_socket:
            assert connector.receive(0.01) == []
    assert connector.send(peer, b"question")
    wire.open()
    heard, deadline = [], time.monotonic() + DEADLINE_S
    while not heard and time.monotonic() < deadline:
        wire.pass_on()
        assert connector.receive(0.0) == []
        heard += listener.receive(0.005)
    assert [arrival.frame for arrival in heard] == [b"question"]
    assert connector.refused_by() == []
    assert not connector._sources._refused_since
    wire.close()


OLD, NEW = OURS.secret, THEIRS.secret
BEFORE, FIRST, SECOND, AFTER = SharedToken(OLD), SharedToken(OLD, (NEW,)), SharedToken(NEW, (OLD,)), SharedToken(NEW)
STEPS = [BEFORE, FIRST, SECOND, AFTER]
NEIGHBOURS = [(one, other) for one, other in itertools.product(range(4), repeat=2) if abs(one - other) <= 1]


@pytest.mark.parametrize(("listening", "connecting"), NEIGHBOURS)
def test_a_fleet_goes_from_one_token_to_another_and_everybody_converses(channel, listening, connecting):
    """Each step, an engine accepts what those of the step before and after use."""
    listener, connector = channel(STEPS[listening]), channel(STEPS[connecting])
    for _ in range(2):
        assert connector.send(key(listener), b"question")
    asked = frames(listener, connector, until=lambda heard: len(heard) == 2)
    assert [each.frame for each in asked] == [b"question"] * 2
    assert listener.reply(asked[0].routing_id, b"answer")
    assert [each.frame for each in frames(connector, listener)] == [b"answer"]
    assert connector.refused_by() == []


@pytest.mark.parametrize(("listening", "connecting"), [(AFTER, BEFORE), (BEFORE, AFTER), (SECOND, BEFORE)])
def test_who_has_left_a_token_does_not_meet_who_uses_it(channel, listening, connecting, impatient):
    listener, connector = channel(listening), channel(connecting)
    assert refusing(connector, key(listener), listener) == [key(listener)]


def test_all_accepted_tokens_are_tried_before_somebody_is_a_stranger(channel, impatient):
    three = SharedToken(OLD, (NEW, secrets.token_bytes(32)))
    listener, connector = channel(SharedToken(secrets.token_bytes(32))), channel(three)
    assert refusing(connector, key(listener), listener) == [key(listener)]
    # Each time, all three.
    refused, deadline = 0, time.monotonic() + DEADLINE_S
    while refused < 6 and time.monotonic() < deadline:
        listener.receive(0.01)
        refused += listener.take_counts()["connections_refused", "stranger"]
    assert refused % 3 == 0


def test_who_is_forgotten_is_nobody_who_has_refused(channel, impatient):
    listener, connector = channel(OURS), channel(THEIRS)
    deadline = time.monotonic() + DEADLINE_S
    while not connector._sources._refused_by and time.monotonic() < deadline:
        connector.send(key(listener), b"question")
        assert (connector.receive(0.01), listener.receive(0.0)) == ([], [])
    connector.forget(key(listener))
    assert connector.refused_by() == []
    connector.send(key(listener), b"question")
    while not connector._sources._refused_since and time.monotonic() < deadline:
        assert (connector.receive(0.01), listener.receive(0.0)) == ([], [])
    connector.forget(key(listener))
    assert not connector._sources._refused_since


ANSWERS = {"nothing": b"", "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n", "noise": bytes(range(64))}


def asked(channel, server) -> tuple[ControlChannel, PeerKey]:
    """A connector that has asked, and whom."""
    connector, peer = channel(OURS), PeerKey("tcp://{}:{}".format(*server.getsockname()), "p0", "e1")
    # Nothing is sent where the other side has ended the handshake by then.
    connector.send(peer, b"question")
    return connector, peer


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_another_program_at_a_peers_address_is_told_from_an_agent(channel, answer, impatient):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answering():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as met:
                        met.sendall(answer)

        threading.Thread(target=answering, daemon=True).start()
        connector, peer = asked(channel, server)
        assert refusing(connector, peer) == [peer]


def test_whoever_ends_a_handshake_late_may_be_busy(channel, monkeypatch, impatient):
    """A handshake ends by its time limit, of which both sides have the same. What is read late may have been late."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connector, peer = asked(channel, server)
        monkeypatch.setattr(source_connections, "AT_ONCE_S", 0.0)
        for _ in range(3):
            server.accept()[0].close()
            began = connector._sources._by_peer[peer].began
            while connector._sources._by_peer[peer].began == began:
                assert connector.receive(0.01) == []
        assert connector.refused_by() == []
        assert connector._sources._by_peer[peer].frames == [b"question"]


def test_whoever_says_nothing_is_not_taken_for_a_stranger(channel, monkeypatch, impatient):
    """Also when the time of a handshake is over."""
    monkeypatch.setitem(OPTIONS, zmq.HANDSHAKE_IVL, 100)
    monkeypatch.setattr(source_connections, "AT_ONCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connector, peer = asked(channel, server)
        assert refusing(connector, peer, seconds=1.0) == []
        # It has begun again and again.
        for _ in range(3):
            server.accept()[0].close()


def test_beyond_a_number_connections_are_not_watched(channel, monkeypatch):
    """A monitor takes two sockets more."""
    monkeypatch.setattr(source_connections, "MAX_WATCHED", 1)
    one, two, *others = channel(OURS), channel(SharedToken(NEW, (OLD,))), channel(OURS), channel(OURS)
    for other in others:
        assert one.send(key(other), b"question")
    assert len(one._sources._by_socket) == 3
    # With several tokens it has to wait: the right one could not be found.
    assert [two.send(key(other), b"question") for other in others] == [True, False]
    frames(two, *others, until=lambda _: len(two._sources._by_socket) == 1)
    assert two.send(key(others[1]), b"question")


def test_a_handshake_that_hangs_keeps_nobody_from_being_watched(channel, monkeypatch):
    monkeypatch.setattr(source_connections, "MAX_WATCHED", 1)
    connector, listener = channel(SharedToken(NEW, (OLD,))), channel(OURS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connector.send(PeerKey("tcp://{}:{}".format(*server.getsockname()), "p0", "e1"), b"question")
        assert not connector.send(key(listener), b"question")
        monkeypatch.setattr(source_connections, "AT_ONCE_S", 0.0)
        assert connector.send(key(listener), b"question")
        monkeypatch.undo()
        sources = connector._sources
        assert [one.peer for one in sources._by_peer.values() if one.monitor] == [key(listener)]
        assert [arrival.frame for arrival in frames(listener, connector)] == [b"question"]


def test_an_attempt_that_has_succeeded_since_counts_more_than_one_that_was_ended(channel):
    """Our thread may look late: ZeroMQ has connected once more by then."""
    listener, connector = channel(OURS), channel(OURS)
    wire = Wire(listener.address)
    peer = PeerKey(wire.address, "p0", "e1")
    assert connector.send(peer, b"question")
    wire.refuse()
    wire.open()
    heard, deadline = [], time.monotonic() + DEADLINE_S
    while not heard and time.monotonic() < deadline:
        wire.pass_on()
        heard += listener.receive(0.005)
    assert listener.reply(heard[0].routing_id, b"answer")
    answered = []
    while not answered and time.monotonic() < deadline:
        wire.pass_on()
        answered = connector.receive(0.005)
    assert [arrival.frame for arrival in answered] == [b"answer"]
    assert not connector._sources._refused_since
    wire.close()


def test_two_ends_with_a_busy_time_between_them_are_no_refusal(channel):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connector, peer = asked(channel, server)
        sources = connector._sources
        for late_s in (0.0, source_connections.AT_ONCE_S, 0.0):
            connector.send(peer, b"question")
            attempt = sources._by_peer[peer]
            attempt.began -= late_s
            server.accept()[0].close()
            while sources._by_peer.get(peer) is attempt:
                assert connector.receive(0.01) == []
            # Time passes.
            sources._refused_since = {
                each: since - source_connections.REFUSED_S for each, since in sources._refused_since.items()
            }
        assert connector.refused_by() == []


def test_where_nobody_listens_nobody_is_taken_for_a_stranger(channel):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        connector, peer = asked(channel, server)
        assert refusing(connector, peer, seconds=0.5) == []


def test_a_connection_is_watched_no_longer_than_its_handshake_takes(channel):
    listener, connector = channel(OURS), channel(OURS)
    met(connector, listener)
    assert len(connector._sources._by_socket) == 1
    assert connector._sources._by_peer[key(listener)].frames == []


def test_no_more_is_kept_for_another_attempt_than_a_queue_holds(channel):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connector, peer = asked(channel, server)
        for _ in range(2 * MAX_QUEUED):
            connector.send(peer, b"question")
        assert len(connector._sources._by_peer[peer].frames) == MAX_QUEUED


def test_there_are_sockets_for_all_sources_and_their_monitors(channel, monkeypatch):
    for module in (channel_module, source_connections):
        monkeypatch.setattr(module, "MAX_SOURCES", 40)
        monkeypatch.setattr(module, "MAX_WATCHED", 40)
    connector = channel()
    assert all(connector.send(PeerKey(f"tcp://127.9.9.{host}:9", "p0", "e1"), b"hello") for host in range(1, 41))


def test_knowing_the_listeners_key_alone_is_not_enough(channel, stranger):
    """Who has learned it otherwise than from the token still has to show the key that follows from the token."""
    listener, intruder = channel(OURS), stranger()
    secure_connecting(intruder, OURS)
    public, secret = zmq.curve_keypair()
    intruder.setsockopt(zmq.CURVE_PUBLICKEY, public)
    intruder.setsockopt(zmq.CURVE_SECRETKEY, secret)
    intruder.connect(listener.address)
    intruder.send(b"question")
    assert counted(listener) >= 1


def test_a_listener_that_does_not_know_the_token_is_told_nothing(channel, stranger):
    """Somebody who has taken over an engine's port sees a handshake and no message."""
    impostor, connector = stranger(zmq.ROUTER), channel(OURS)
    _, secret = zmq.curve_keypair()
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, secret)
    impostor.bind("tcp://127.0.0.1:*")
    monitor = impostor.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    connector.send(PeerKey(impostor.getsockopt_string(zmq.LAST_ENDPOINT), "p0", "e1"), b"question")
    assert monitor.poll(DEADLINE_S * 1000)
    assert not impostor.poll(0)
    impostor.disable_monitor()
    monitor.close()


class Wire:
    """Between a connector and a listener: passes bytes on and keeps what went to the listener."""

    def __init__(self, target: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = target.removeprefix("tcp://").split(":")
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = b""

    def open(self):
        """Take one connection and make the one behind it."""
        self._near, _ = self._listener.accept()
        self._far = socket.create_connection((self._target[0], int(self._target[1])))
        for end in (self._near, self._far):
            end.setblocking(False)

    def pass_on(self):
        for source, sink in ((self._near, self._far), (self._far, self._near)):
            try:
                data = source.recv(1 << 16)
            except BlockingIOError:
                continue
            sink.sendall(data)
            self.recorded += data if source is self._near else b""

    def inject(self, data: bytes):
        self._far.sendall(data)

    def refuse(self):
        """Take one connection and end it."""
        self._listener.accept()[0].close()

    def close(self):
        for end in (self._near, self._far, self._listener):
            end.close()


@pytest.fixture
def recorded(channel):
    """A conversation of two questions over a wire that has kept it: the listener, the connector and the wire."""
    listener, connector = channel(OURS), channel(OURS)
    wire = Wire(listener.address)
    connector.send(PeerKey(wire.address, "p0", "e1"), b"claim, said once")
    wire.open()
    heard, deadline = [], time.monotonic() + DEADLINE_S
    while not heard and time.monotonic() < deadline:
        wire.pass_on()
        connector.receive(0.0)
        heard += listener.receive(0.005)
    assert [arrival.frame for arrival in heard] == [b"claim, said once"]
    yield listener, connector, wire
    wire.close()


def test_nothing_is_readable_on_the_wire(recorded):
    _, _, wire = recorded
    assert wire.recorded
    assert b"claim, said once" not in wire.recorded


def test_a_conversation_that_is_played_again_is_not_heard(recorded):
    listener, _, wire = recorded
    with socket.create_connection(wire._far.getpeername()) as again:
        again.sendall(wire.recorded)
        assert counted(listener) >= 1


def test_a_message_that_is_repeated_inside_its_connection_is_not_heard(recorded):
    """The last frame on the wire is the message: MESSAGE commands begin with their name."""
    listener, connector, wire = recorded
    begin = wire.recorded.rindex(b"\x07MESSAGE") - 2
    wire.inject(wire.recorded[begin:])
    assert frames(listener, connector, seconds=0.5) == []


@pytest.mark.parametrize("flipped", range(0, 60, 7))
def test_a_message_with_a_wrong_bit_is_not_heard(recorded, flipped):
    listener, connector, wire = recorded
    begin = wire.recorded.rindex(b"\x07MESSAGE") - 2
    message = bytearray(wire.recorded[begin:])
    message[min(10 + flipped, len(message) - 1)] ^= 1
    wire.inject(bytes(message))
    assert frames(listener, connector, seconds=0.1) == []


def test_beyond_the_limit_nobody_gets_in_until_somebody_leaves(channel):
    listener, connector = channel(OURS, max_connections=4), channel(OURS)
    place = listener.address.removeprefix("tcp://").split(":")
    crowd = [socket.create_connection((place[0], int(place[1]))) for _ in range(4)]
    frames(listener, until=lambda _: listener.num_connections >= 4)
    assert listener.num_connections == 4
    assert listener.take_counts()["connections_refused", "full"] == 1
    connector.send(key(listener), b"question")
    assert frames(listener, connector, seconds=0.5) == []
    for each in crowd:
        each.close()
    assert [arrival.frame for arrival in frames(listener, connector)] == [b"question"]


@pytest.mark.slow
def test_who_connects_and_says_nothing_does_not_stay(channel):
    listener = channel(OURS)
    place = listener.address.removeprefix("tcp://").split(":")
    with socket.create_connection((place[0], int(place[1]))):
        assert counted(listener, reasons=("unfinished",)) == 1
        frames(listener, until=lambda _: listener.num_connections == 0)
        assert listener.num_connections == 0


def test_a_peer_that_does_not_read_gets_no_more_than_its_queue_and_holds_up_nobody(channel, stranger):
    listener, quick, slow = channel(), channel(), stranger()
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.connect(listener.address)
    slow.send(b"slow")
    (asked,) = frames(listener)
    large = bytes(1 << 20)
    taken = sum(listener.reply(asked.routing_id, large) for _ in range(4 * MAX_QUEUED))
    assert taken < 2 * MAX_QUEUED
    assert quick.send(key(listener), b"quick")
    (asked,) = frames(listener, quick)
    assert listener.reply(asked.routing_id, b"answer")
    assert frames(quick, listener)[0].frame == b"answer"


def test_an_answer_to_somebody_who_is_gone_is_not_sent(channel):
    assert channel().reply("00deadbeef", b"answer") is False


def test_a_request_that_is_too_large_ends_its_connection_only(channel, stranger):
    listener, other, glutton = channel(), channel(), stranger()
    glutton.connect(listener.address)
    glutton.send(bytes(MAX_REQUEST_BYTES + 1))
    other.send(key(listener), b"question")
    assert [arrival.frame for arrival in frames(listener, other)] == [b"question"]


@pytest.mark.parametrize("address", ["10.0.0.1:80", "[::ffff:10.0.0.1]:80", "0.0.0.0:80", "example.org:80", "[:80"])
def test_without_a_token_nothing_but_this_host_is_connected_to(channel, address):
    assert channel().send(PeerKey(f"tcp://{address}", "p0", "e1"), b"question") is False


def test_the_older_and_the_newer_protocol_of_this_host_are_connected_to(channel):
    for address in ("127.0.0.1", "127.8.9.1", "[::1]"):
        assert channel().send(PeerKey(f"tcp://{address}:9", "p0", "e1"), b"question") is True


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "8.8.8.8"])
def test_without_a_token_there_is_no_listening_beyond_this_host(host):
    with pytest.raises(ConfigurationError, match=r"may listen on this host only.*--token-file"):
        ControlChannel(host, 0)


def test_no_more_sources_than_allowed_are_connected_to(channel, monkeypatch):
    monkeypatch.setattr(source_connections, "MAX_SOURCES", 1)
    one, *others = channel(), channel(), channel()
    assert [one.send(key(other), b"hello") for other in others] == [True, False]
    one.forget(key(others[0]))
    assert one.send(key(others[1]), b"hello")


def test_a_source_that_the_system_does_not_watch_is_not_kept(channel, monkeypatch):
    one, other = channel(), channel()

    def refused(*_):
        raise OSError("too many are watched")

    with monkeypatch.context() as patch:
        patch.setattr(one._poller, "register", refused)
        assert not one.send(key(other), b"hello")
    assert one.send(key(other), b"hello")
    assert frames(other, one)


def heard_at_once(one, number):
    """Frames that are there or on their way: at most twice nothing is found, which is when nothing comes any more."""
    found, empty = 0, 0
    while found < number and empty < 2:
        arrived = len(one.receive(3.0))
        found, empty = found + arrived, empty + (not arrived)
    return found


def met(one, other) -> str:
    """Two that have conversed; what the second one calls the first."""
    assert one.send(key(other), b"hello")
    (arrived,) = frames(other, one)
    assert other.reply(arrived.routing_id, b"welcome")
    assert frames(one, other)
    return arrived.routing_id


def test_what_comes_while_something_is_sent_is_heard(channel):
    """To send takes the news from the descriptor that says when there is something to read."""
    one, other = channel(), channel()
    routing_id = met(one, other)
    (descriptor,) = (socket.getsockopt(zmq.FD) for socket in one._sources._by_socket)
    for _ in range(20):
        # What was read is asked once more by itself.
        assert one.receive(0.0) == []
        assert other.reply(routing_id, b"answer")
        assert select.select([descriptor], [], [], DEADLINE_S)[0]
        # When something is sent, ZeroMQ looks for news only if it has not done so for a millisecond.
        time.sleep(0.005)
        assert one.send(key(other), b"more")
        assert heard_at_once(one, 1) == 1
        frames(other)


def test_what_is_left_of_many_frames_is_heard(channel):
    one, other = channel(), channel()
    routing_id = met(one, other)
    for _ in range(5):
        sent = sum(other.reply(routing_id, b"answer") for _ in range(MAX_FRAMES_PER_RECEIVE + 100))
        assert heard_at_once(one, sent) == sent


def test_peers_need_an_address(channel):
    with pytest.raises(ConfigurationError, match="peers need a concrete address"):
        ControlChannel("0.0.0.0", 0, OURS)


@pytest.mark.parametrize("host", ["fe80::1%lo", "::ffff:127.0.0.1"])
def test_an_address_that_other_engines_would_not_take_is_refused_at_the_start(host):
    with pytest.raises(ConfigurationError, match="peers cannot use this form"):
        ControlChannel(host, 0, OURS)


def test_a_host_without_an_address_is_named():
    with pytest.raises(ConfigurationError, match="no such host at all"):
        ControlChannel("no such host at all", 0, OURS)


def test_names_of_this_host_are_fine():
    found = ControlChannel("localhost", 0)
    assert found.address.startswith("tcp://127.0.0.1:")
    found.close()


def test_without_the_librarys_encryption_a_token_is_an_error(channel, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    with pytest.raises(ConfigurationError, match="has no encryption"):
        channel(OURS)


DROPPED = """
import gc
from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.control.shared_token import SharedToken

for token in (SharedToken(), SharedToken(bytes(range(32)))):
    channel = ControlChannel("127.0.0.1", 0, token)
    # As in an engine that refers to its agent, which refers to the engine.
    channel.engine = channel
    del channel
    gc.collect()
print("collected")
"""


def test_a_channel_that_nobody_closes_ends_with_its_owner():
    """ZeroMQ's context would wait for its sockets, for ever, on whichever thread the collector runs."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
