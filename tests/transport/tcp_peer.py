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
from kvferry.transport.tcp.connection import Challenge, proof_of
from kvferry.transport.tcp.server import Server
from kvferry.transport.tcp.transport import TcpDescriptor, TcpTransport


def known(transport: Transport) -> TcpDescriptor:
    return msgspec.msgpack.decode(transport.descriptor(), type=TcpDescriptor)


def frame(payload: bytes, columns: bytes = b"") -> bytes:
    return struct.pack(">4sI", b"KVF1", len(payload)) + payload + columns


PROOF, KEY_ID = bytes(32), b"?" * 16
"""Stand for the right ones, which `signed` puts there."""


def request(proof: bytes, direction: str, num_rows: int) -> bytes:
    rows = {"direction": direction, "num_rows": num_rows}
    return msgspec.msgpack.encode({"type": "request-3", "key_id": KEY_ID, "proof": proof} | rows)


def signed(data: bytes, descriptor: TcpDescriptor, challenge: Challenge) -> bytes:
    return data.replace(PROOF, proof_of(descriptor.key, challenge)).replace(KEY_ID, descriptor.key_id)


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
