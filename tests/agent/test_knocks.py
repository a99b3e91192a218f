"""Nobody listens: only the host of a process that has ended says so."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.agent.control.liveness import Knocks
from kvferry.session.keys import PeerKey


@pytest.fixture
def knocks() -> Iterator[Knocks]:
    made = Knocks()
    yield made
    made.close()


def test_whoever_listens_is_there_though_it_never_answers(knocks):
    """As a process that was stopped: its kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3):
            knocks.start(PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1"))
            assert knocks.unanswered() == []
    assert not knocks.busy


def test_an_attempt_that_has_ended_keeps_no_file_open(knocks):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        before = len(os.listdir("/proc/self/fd"))
        for epoch in range(50):
            knocks.start(PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", f"e{epoch}"))
        assert knocks.unanswered() == []
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_attempt_that_goes_on_is_kept_until_it_is_forgotten(knocks):
    """A listener whose queue is full lets the next one wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as queued:
        before = len(os.listdir("/proc/self/fd"))
        address = listener.getsockname()
        for _ in range(4):
            waiting = queued.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(address)
        peer = PeerKey(f"tcp://127.0.0.1:{address[1]}", "p0", "e1")
        knocks.start(peer)
        assert knocks.unanswered() == []
        assert len(os.listdir("/proc/self/fd")) == before + 5
        knocks.forget(peer)
        assert len(os.listdir("/proc/self/fd")) == before + 4


def test_where_nobody_listens_the_process_has_ended(knocks):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1")
    knocks.start(peer)
    assert knocks.unanswered() == [peer]
    assert not knocks.busy
    assert knocks.unanswered() == []


@pytest.mark.parametrize("address", ["", "tcp://nowhere.example:1", "ipc:///tmp/x", "tcp://127.0.0.1:99999"])
def test_an_address_that_makes_no_sense_proves_nothing(knocks, address):
    knocks.start(PeerKey(address, "p0", "e1"))
    assert knocks.unanswered() == []


def test_a_process_without_file_descriptors_learns_nothing_and_may_ask_again(knocks):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = PeerKey(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "p0", "e1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        knocks.start(peer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert knocks.unanswered() == []
    knocks.start(peer)
    assert knocks.unanswered() == [peer]
