"""Nobody listens: only the host of a process that has ended says so."""

import errno
import itertools
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.session.keys import PeerKey


@pytest.fixture
def liveness() -> Iterator[LivenessProbes]:
    """Whenever it looks at its clock, a second has passed."""
    seconds = itertools.count()
    made = LivenessProbes(lambda: next(seconds))
    yield made
    made.close()


def test_whoever_listens_is_there_though_it_never_answers(liveness):
    """As a process that was stopped: its kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3):
            liveness.start(PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1"))
            assert liveness.refused_peers() == []
    assert not liveness.busy


def test_an_attempt_that_has_ended_keeps_no_file_open(liveness):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        before = len(os.listdir("/proc/self/fd"))
        for epoch in range(50):
            liveness.start(PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", f"e{epoch}"))
        assert liveness.refused_peers() == []
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_attempt_that_goes_on_is_kept_until_it_is_forgotten(liveness):
    """A listener whose queue is full lets the next one wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as queued:
        before = len(os.listdir("/proc/self/fd"))
        address = listener.getsockname()
        for _ in range(4):
            waiting = queued.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(address)
        peer = PeerKey(f"tcp://127.0.0.1:{address[1]}", "p0", "e1")
        liveness.start(peer)
        assert liveness.refused_peers() == []
        assert len(os.listdir("/proc/self/fd")) == before + 5
        liveness.forget(peer)
        assert len(os.listdir("/proc/self/fd")) == before + 4


def test_a_host_that_leaves_three_probes_unanswered_is_silent(liveness):
    """Here a listener whose queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as queued:
        address = listener.getsockname()
        for _ in range(4):
            waiting = queued.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(address)
        peer = PeerKey(f"tcp://127.0.0.1:{address[1]}", "p0", "e1")
        for _ in range(3):
            liveness.start(peer)
            assert liveness.silent_peers() == []
        liveness.start(peer)
        assert liveness.busy
        assert liveness.silent_peers() == [peer]
        liveness.start(peer)
        assert liveness.silent_peers() == [], "it is counted anew"
        for _ in range(2):
            liveness.forget(peer)
            liveness.start(peer)
            liveness.start(peer)
        assert liveness.silent_peers() == []


def test_a_host_that_this_one_cannot_reach_is_silent_too(liveness):
    peer = PeerKey("tcp://255.255.255.255:1", "p0", "e1")
    for _ in range(4):
        liveness.start(peer)
    assert liveness.silent_peers() == [peer]


def test_a_young_probe_goes_on_whoever_else_asks():
    made = LivenessProbes(lambda: 7.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as queued:
        queued.callback(made.close)
        address = listener.getsockname()
        for _ in range(4):
            waiting = queued.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(address)
        for _ in range(9):
            made.start(PeerKey(f"tcp://127.0.0.1:{address[1]}", "p0", "e1"))
        assert made.silent_peers() == []


def test_an_error_of_this_host_says_nothing_about_the_other(liveness, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EADDRNOTAVAIL)
    for _ in range(9):
        liveness.start(PeerKey("tcp://127.0.0.1:1", "p0", "e1"))
    assert liveness.silent_peers() == []


def test_whoever_has_answered_is_not_silent(liveness):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(9):
            liveness.start(PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1"))
    assert liveness.silent_peers() == []


def test_where_nobody_listens_the_process_has_ended(liveness):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1")
    liveness.start(peer)
    assert liveness.refused_peers() == [peer]
    assert not liveness.busy
    assert liveness.refused_peers() == []


@pytest.mark.parametrize(
    "address", ["", "tcp://nowhere.example:1", "ipc:///tmp/x", "tcp://127.0.0.1:99999", "tcp://[fe80::1%nosuch]:5"]
)
def test_an_address_that_makes_no_sense_proves_nothing(liveness, address):
    liveness.start(PeerKey(address, "p0", "e1"))
    assert liveness.refused_peers() == []


def test_a_process_without_file_descriptors_learns_nothing_and_may_ask_again(liveness):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        liveness.start(peer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert liveness.refused_peers() == []
    liveness.start(peer)
    assert liveness.refused_peers() == [peer]


FORKS = """
import os, sys, time
from kvferry.agent.control.channel import ControlChannel
from kvferry.transport.tcp.transport import TcpTransport
channel, moving = ControlChannel("127.0.0.1", 0), TcpTransport("127.0.0.1")
heard, says = os.pipe()
if not os.fork():
    os.close(1)
    os.write(says, b"there")
    sys.stdin.read()
    os._exit(0)
os.read(heard, 5)
print(channel.address, moving._server.address[1], flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_keep_a_dead_source_alive(liveness):
    """It inherits what its parent listens on. This end of its standard input ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        address, port = engine.stdout.readline().split()
        peer = PeerKey(address, "p0", "e1")
        liveness.start(peer)
        assert liveness.refused_peers() == []
        engine.kill()
        engine.wait()
        liveness.start(peer)
        assert liveness.refused_peers() == [peer]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)))
