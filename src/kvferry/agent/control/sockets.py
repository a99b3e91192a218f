"""The ZeroMQ sockets of the control channel: how they are set up, and what can be read from them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Final

import zmq

from kvferry.agent.control.poller import Poller
from kvferry.system import IDLE_S, INTERVAL_S, NUM_PROBES, USER_TIMEOUT_MS

MAX_FRAMES_PER_RECEIVE = 256
# Decoding takes time: after this many bytes of one socket, transports and heartbeats are served.
MAX_BYTES_PER_RECEIVE = 4 << 20
# High-water mark of a peer's messages in either direction. Beyond it ZeroMQ slows the peer down, or drops messages.
MAX_QUEUED = 256
# A connection that does not finish its handshake is closed after this.
HANDSHAKE_MS = 5_000
# ZeroMQ's own heartbeats: a peer whose host has vanished is forgotten after these.
PING_MS, PONG_MS = 10_000, 30_000

OPTIONS: Final = {
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.HEARTBEAT_IVL: PING_MS,
    zmq.HEARTBEAT_TIMEOUT: PONG_MS,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: IDLE_S,
    zmq.TCP_KEEPALIVE_INTVL: INTERVAL_S,
    zmq.TCP_KEEPALIVE_CNT: NUM_PROBES,
    zmq.TCP_MAXRT: USER_TIMEOUT_MS,
    zmq.SNDHWM: MAX_QUEUED,
    zmq.RCVHWM: MAX_QUEUED,
}
# Of a monitor: the number of an event, and for most a descriptor or an error.
MONITOR_EVENT: Final = struct.Struct("=Hi")
NUMBERS: Final = itertools.count()


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], poller: Poller, kind: int, max_bytes: int
) -> zmq.Socket[bytes]:
    """A socket that the poller watches, for messages of at most so many bytes. Raises ZMQError and OSError."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    try:
        for option, value in (*OPTIONS.items(), (zmq.MAXMSGSIZE, max_bytes)):
            socket.setsockopt(option, value)
        poller.register(socket)
    except (zmq.ZMQError, OSError):
        socket.close()
        raise
    return socket


def send_now(socket: zmq.Socket[bytes], poller: Poller, parts: list[bytes]) -> bool:
    """False when the queue is full, or the peer has disconnected."""
    poller.note_used(socket)
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The messages that have arrived, up to a limit; the rest stays queued, which slows its sender down."""
    num_bytes = 0
    for _ in range(MAX_FRAMES_PER_RECEIVE):
        if num_bytes > MAX_BYTES_PER_RECEIVE:
            return
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        num_bytes += sum(map(len, parts))
        yield parts


def monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """What `monitored` reads: these events of the socket's connections. Whoever asks closes it."""
    # ZeroMQ closes sockets later than we do: their names are in use until then.
    name = f"inproc://connections-{next(NUMBERS)}"
    socket.monitor(name, events)
    reading: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    reading.setsockopt(zmq.LINGER, 0)
    # Without a limit, because ZeroMQ's own thread would otherwise wait until events are read.
    reading.setsockopt(zmq.RCVHWM, 0)
    reading.connect(name)
    return reading


def monitored(reading: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """All events that are there: the number of each, and its descriptor or error."""
    while reading.poll(0):
        yield MONITOR_EVENT.unpack(reading.recv_multipart()[0])
