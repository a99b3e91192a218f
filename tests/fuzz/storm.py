"""A storm of frames and connections on one rank's control channel, while a real peer goes on fetching from it.

`make fuzz FRAMES=1000000` runs it at length: once on a rank without a token, whose decoder and sessions see all of it,
and once on one with a token, for strangers.
"""

import argparse
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import zmq
from engines import oracle
from frame_maker import FrameMaker
from import_path import import_path
from rank_process import NUM_TOKENS, TARGET, TARGET_TABLES, Rank

from kvferry import SharedToken, read_token
from kvferry.agent.control.curve import secure_connecting
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import Fetched
from kvferry.session.events import FetchRequest
from kvferry.wire.messages import Reference

DEADLINE_S = 60.0
GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01"
HELD_CONNECTIONS = 50
# What a sender is, by turns: it reads the answers or it never does.
NUM_SENDERS = 6
RESET = struct.pack("ii", 1, 0)


@dataclass
class Outcome:
    """What was sent and what became of the rank meanwhile."""

    frames: int = 0
    connections: int = 0
    transfers: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_transfer_s: float = 0.0
    rss_before: int = 0
    rss_most: int = 0
    fds_before: int = 0
    fds_after: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    alive: bool = False
    seconds: float = 0.0


class Victim:
    """The rank's process and the pipe to it."""

    def __init__(self, token_file: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), token_file]
        environment = os.environ | {"PYTHONPATH": import_path(Path(__file__).parents[1])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._lock = threading.Lock()
        self.address = json.loads(self._process.stdout.readline())["address"]
        self.usage = psutil.Process(self._process.pid)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def ask(self, word: str) -> dict:
        with self._lock:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self):
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Peer(threading.Thread):
    """Fetches again and again, and compares every byte."""

    def __init__(self, victim: Victim, outcome: Outcome, token_file: str) -> None:
        super().__init__(daemon=True)
        self._victim, self._outcome = victim, outcome
        self._rank = Rank("d0", TARGET, token_file)
        self._stopping = threading.Event()
        self._expected: dict[int, bytes] = {}

    def run(self):
        try:
            self._fetch_on()
        except Exception as error:  # noqa: BLE001 - a thread's end must not look like success
            self._outcome.failures.append(repr(error))

    def _fetch_on(self):
        number = 0
        while not self._stopping.wait(0.05):
            number += 1
            self._rank.poison()
            began = time.monotonic()
            reference = Reference(**self._victim.ask("lease"))
            wanted = FetchRequest(
                f"q{number}", reference, (self._victim.address,), TARGET_TABLES, (TokenRange(0, NUM_TOKENS),)
            )
            self._rank.agent.fetch(wanted)
            self._check(self._rank.notices.get(timeout=DEADLINE_S))
            taken_s = time.monotonic() - began
            self._outcome.slowest_transfer_s = max(self._outcome.slowest_transfer_s, taken_s)

    def _check(self, notice):
        if not isinstance(notice, Fetched):
            self._outcome.failures.append(str(notice))
            self._rank.notices.get(timeout=DEADLINE_S)  # its blocks are free again
            return
        found = {start: bytes(buffer) for start, buffer in self._rank.memory.buffers.items()}
        if not self._expected:
            _check_all(self._rank.memory)
            self._expected = found
        if found != self._expected:
            self._outcome.failures.append("wrong bytes")
        self._outcome.transfers += 1

    def close(self):
        self._stopping.set()
        self.join(DEADLINE_S)
        self._rank.close()


def _check_all(memory: oracle.Memory) -> None:
    """Every element is right and nothing else was touched."""
    written = {start: np.zeros(len(buffer), np.uint8) for start, buffer in memory.buffers.items()}
    tokens = TokenRange(0, NUM_TOKENS)
    for placement in memory.layout.placements:
        for _, _, address in oracle.element_addresses(memory.layout, placement, TARGET_TABLES, tokens):
            start = memory.layout.regions[placement.region].address
            written[start][address - start : address - start + 4] = 1
    oracle.expect(memory, TARGET_TABLES, [tokens], written)


class Sender:
    """Sends frames over ZeroMQ: as a stranger, or as somebody who holds the token and has gone mad.

    Every other one never reads an answer.
    """

    def __init__(self, context: zmq.Context, victim: Victim, number: int, token: SharedToken) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        self._reads = number % 2 == 0
        if not self._reads:
            self._socket.setsockopt(zmq.RCVHWM, 1)
        if token:
            secure_connecting(self._socket, token)
        self._socket.connect(victim.address)

    def send(self, parts: list[bytes]):
        self._socket.send_multipart(parts)
        while self._reads and self._socket.poll(0):
            self._socket.recv_multipart()

    def leave(self):
        self._socket.close()


class Intruders:
    """Connections that are no ZeroMQ at all, or nearly."""

    def __init__(self, victim: Victim, maker: FrameMaker) -> None:
        self._place, self._maker, self._held = victim.place, maker, []

    def one(self):
        """Connect, say something and go; some stay and say nothing more."""
        connection = socket.create_connection(self._place, timeout=DEADLINE_S)
        # Gone without a trace, or the system would run out of ports.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        with suppress(ConnectionError, BlockingIOError):
            connection.setblocking(False)
            connection.send(self._words())
        self._held.append(connection)
        while len(self._held) > self._maker.random.choice((HELD_CONNECTIONS, HELD_CONNECTIONS, 0)):
            self._held.pop(0).close()

    def _words(self) -> bytes:
        random = self._maker.random
        mechanism = random.choice((b"NULL", b"CURVE", b"PLAIN", random.randbytes(4))).ljust(20, b"\x00")
        greeting = GREETING + mechanism + bytes(32)
        match random.randint(0, 5):
            case 0:
                return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            case 1:
                return random.randbytes(random.randint(0, 2000))
            case 2:
                return greeting[: random.randint(0, len(greeting))]
            case 3:
                return greeting + random.choice((b"\x02", b"\x06", b"\x00")) + b"\xff" * 8 + random.randbytes(64)
            case 4:
                return greeting + b"\x04\xc8\x05HELLO\x01\x00" + random.randbytes(192)
            case _:
                ready = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
                damaged = bytearray(greeting + ready + b"\x00\x05hello")
                damaged[random.randrange(len(damaged))] ^= 1 << random.randint(0, 7)
                return bytes(damaged)

    def leave(self):
        for connection in self._held:
            connection.close()


def storm(num_frames: int, seed: int, token_file: str, say=lambda text: None) -> Outcome:
    """Send so many frames, one in twenty as a connection of its own; returns what became of the rank."""
    outcome, began = Outcome(), time.monotonic()
    victim, context = Victim(token_file), zmq.Context()
    peer = Peer(victim, outcome, token_file)
    peer.start()
    try:
        _wait(lambda: outcome.transfers or outcome.failures)
        outcome.fds_before = victim.usage.num_fds()
        _blow(num_frames, FrameMaker(seed), (victim, context, outcome, token_file), say)
        before = outcome.transfers
        _wait(lambda: outcome.transfers > before + 1 or outcome.failures)
    finally:
        peer.close()
        context.destroy(linger=0)
    _wait(lambda: victim.usage.num_fds() <= outcome.fds_before, DEADLINE_S / 4)
    outcome.fds_after = victim.usage.num_fds()
    state = victim.ask("state")
    outcome.alive, outcome.counts = state["alive"], state["counts"]
    outcome.seconds = time.monotonic() - began
    victim.close()
    return outcome


def _blow(num_frames: int, maker: FrameMaker, scene: tuple[Victim, zmq.Context, Outcome, str], say) -> None:
    victim, context, outcome, token_file = scene
    token = read_token(token_file)
    senders = [Sender(context, victim, number, token) for number in range(NUM_SENDERS)]
    intruders = Intruders(victim, maker)
    with ExitStack() as undo:
        for each in (*senders, intruders):
            undo.callback(each.leave)
        _send(num_frames, maker, (victim, outcome, senders, intruders), say)


def _send(num_frames: int, maker: FrameMaker, scene: tuple, say) -> None:
    victim, outcome, senders, intruders = scene
    for number in range(1, num_frames + 1):
        if number % 20 == 0:
            intruders.one()
            outcome.connections += 1
        else:
            senders[number % NUM_SENDERS].send(maker.parts())
        outcome.frames = number
        if number % max(1, num_frames // 100) == 0:
            rss = victim.usage.memory_info().rss
            # The first tenth fills what is filled once: queues, early claims, the allocator's own.
            outcome.rss_before = outcome.rss_before if number > num_frames // 10 else rss
            outcome.rss_most = max(outcome.rss_most, rss)
            say(f"{number:,} of {num_frames:,} frames, {outcome.transfers} transfers, {rss >> 20} MiB")


def _wait(condition, seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def verdict(outcome: Outcome) -> list[str]:
    """What is wrong; empty when the rank has weathered it."""
    wrong = outcome.failures[:3]
    if not outcome.alive:
        wrong.append("the agent's thread has ended")
    if outcome.transfers < 2:
        wrong.append("the peer was not served")
    if outcome.fds_after > outcome.fds_before:
        wrong.append(f"{outcome.fds_after - outcome.fds_before} file descriptors are still open")
    if outcome.rss_most - outcome.rss_before > MAX_GROWTH_BYTES:
        wrong.append(f"memory has grown by {(outcome.rss_most - outcome.rss_before) >> 20} MiB")
    return wrong


MAX_GROWTH_BYTES = 64 << 20


def make_token(folder: Path) -> str:
    path = folder / "kvferry.token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def say(text: str) -> None:
        print(f"\r{text}   ", end="", file=sys.stderr, flush=True)

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for token_file in ("", make_token(Path(folder))):
            outcome = storm(options.frames // 2, options.seed, token_file, say)
            say("\n")
            wrong = verdict(outcome)
            failed = failed or bool(wrong)
            outcome.failures = outcome.failures[:3]
            print(json.dumps({"token": bool(token_file), "wrong": wrong, **vars(outcome)}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
