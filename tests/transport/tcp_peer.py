"""What a peer over tcp says and hears, byte by byte, and what its server knows."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

import msgspec
import numpy as np

from kvferry.testing.transports.world import World
from kvferry.transport.base import Transport
from kvferry.transport.tcp.connection import Challenge
from kvferry.transport.tcp.server import Server
from kvferry.transport.tcp.transport import TcpDescriptor, TcpTransport


def known(transport: Transport) -> TcpDescriptor:
    return msgspec.msgpack.decode(transport.descriptor(), type=TcpDescriptor)


def frame(payload: bytes, columns: bytes = b"") -> bytes:
    return struct.pack(">4sI", b"KVF1", len(payload)) + payload + columns


PROOF = bytes(32)
"""Stands for the right one of the connection that it is sent over."""


def request(proof: bytes, direction: str, num_rows: int) -> bytes:
    return msgspec.msgpack.encode({"type": "request-2", "proof": proof, "direction": direction, "num_rows": num_rows})


def challenged(sock: socket.socket) -> Challenge:
    (size,) = struct.unpack(">4xI", sock.recv(8, socket.MSG_WAITALL))
    return msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL), type=Challenge)


def rejected(world: World) -> int:
    transport = world.far.transport
    assert isinstance(transport, TcpTransport)
    return transport._server.num_rejected


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def columns(*rows: tuple[int, int]) -> bytes:
    return np.array(rows, "<u8").T.tobytes()


def server_of(world: World) -> Server:
    transport = world.far.transport
    assert isinstance(transport, TcpTransport)
    return transport._server


def serves_nobody(serving: Server) -> bool:
    """Whether no connection has a thread. One that has just lost it is closed, or rests, under the server's lock."""
    with serving._lock:
        return not serving._served
