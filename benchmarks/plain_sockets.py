"""Bytes over one plain TCP connection: the limit of whatever goes over sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

__all__ = ["PlainSockets"]

BLOCK_BYTES = 4 << 20
"""With shorter ones it is slower."""
LIMIT_S = 60.0


class PlainSockets:
    """A connection to a process that sends or takes bytes, whatever they are. Use as a context manager."""

    name = "sockets"

    def __init__(self, host: str, prefix: Sequence[str] = ()) -> None:
        """The process listens on `host`; `prefix` is a command that runs it, as for `PeerProcess`."""
        command = [*prefix, sys.executable, __file__, host]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            port = int(self._process.stdout.readline())
            self._socket = _prepared(socket.create_connection((host, port), timeout=LIMIT_S))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> PlainSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._end()

    def run(self, direction: str, memory: memoryview) -> float:
        """Seconds until all of `memory` is filled, or has been sent and was taken."""
        began = time.perf_counter()
        self._socket.sendall(direction[0].encode() + len(memory).to_bytes(8))
        if direction == "read":
            _receive(self._socket, memory)
        else:
            _send(self._socket, memory)
            _receive(self._socket, memoryview(bytearray(1)))
        return time.perf_counter() - began

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _prepared(sock: socket.socket) -> socket.socket:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _send(sock: socket.socket, memory: memoryview) -> None:
    for first in range(0, len(memory), BLOCK_BYTES):
        sock.sendall(memory[first : first + BLOCK_BYTES])


def _receive(sock: socket.socket, memory: memoryview) -> bool:
    """Whether the other side is still there."""
    while len(memory):
        received = sock.recv_into(memory, min(len(memory), BLOCK_BYTES), socket.MSG_WAITALL)
        if not received:
            return False
        memory = memory[received:]
    return True


def main(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock = _prepared(server.accept()[0])
    command, memory = memoryview(bytearray(9)), np.ones(0, np.uint8)
    while _receive(sock, command):
        num_bytes = int.from_bytes(command[1:])
        if len(memory) != num_bytes:
            memory = np.ones(num_bytes, np.uint8)
        if command[:1] == b"r":
            _send(sock, memory.data)
        else:
            _receive(sock, memory.data)
            sock.sendall(b"!")


if __name__ == "__main__":
    main(sys.argv[1])
