"""A peer in a process of its own, for tests and benchmarks of transports.

`python -m kvferry.testing.transports.peer NAME SIZE_BYTES SEED HOST DEVICE NUMBER` registers memory of a device, or of
the host, filled with the probe pattern, prints one line of JSON that says how to reach it, and serves until its
standard input ends. A line `digest` on standard input is answered with the digest of the memory.
"""

from __future__ import annotations

import base64
import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from kvferry.errors import ConfigurationError, TransportError
from kvferry.staging.device.table import torch_name
from kvferry.testing.child_process import ChildProcess
from kvferry.transport.base import Memory, Transport
from kvferry.transport.descriptors import host_here
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registered_memory import View
from kvferry.transport.registry import OPENERS
from kvferry.transport.selection.probe import NUM_MARKS, Probe, allocation_bytes, fill_probe, pattern
from kvferry.transport.shm.transport import allocate_shared
from kvferry.transport.tcp.transport import TcpTransport

ANSWER_S = 60.0


def make_transport(name: str, host: str = "127.0.0.1") -> Transport:
    """A transport between processes by its name; one that listens does so on `host`.

    Raises TransportError when it is not available.
    """
    if name == "tcp":
        return TcpTransport(host, stall_timeout_s=2.0)
    if name in OPENERS:
        return OPENERS[name](host)
    raise ConfigurationError(f"no transport between processes is called {name!r}", expected=" or ".join(OPENERS))


def digest(view: View) -> str:
    """A digest of bytes, to compare memory of two processes."""
    return blake2b(view.data, digest_size=16).hexdigest()


class PeerProcess(ChildProcess):
    """The peer, as the process that has started it sees it."""

    def __init__(
        self,
        transport: str,
        size_bytes: int,
        seed: int,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        device: tuple[str, int] = (HOST, 0),
    ) -> None:
        """`prefix` is a command that runs another one, such as one that gives it namespaces of its own. `device` is the
        one whose memory it is, and its number."""
        words = [transport, *map(str, (size_bytes, seed, host, *device))]
        command = [*prefix, sys.executable, "-m", __name__, *words]
        super().__init__(command)
        try:
            said = self._answer()
        except BaseException:
            self.kill()
            raise
        self.host = str(said["host"])
        self.descriptor = base64.b64decode(said["descriptor"])
        self.probe = Probe(int(said["address"]), size_bytes, seed, NUM_MARKS)

    def digest(self) -> str:
        """The digest of its memory now."""
        self.write_line(b"digest")
        return str(self._answer()["digest"])

    def _answer(self) -> dict[str, Any]:
        """The next line that it says. Raises TransportError for what is no JSON: a library may write there as well."""
        line = self.read_line(ANSWER_S)
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise TransportError("the other process says what is no JSON", found=repr(line[:200])) from error
        return said

    def stop(self) -> None:
        """Make it hang: it exists but does nothing."""
        self.signal(signal.SIGSTOP)


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    name, size_bytes, seed, host = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3]
    device, number = arguments[4], int(arguments[5])
    memory, contents = _in_host(size_bytes, seed) if device == HOST else _on_device(size_bytes, seed, device, number)
    transport = make_transport(name, host)
    transport.register(memory)
    descriptor = base64.b64encode(transport.descriptor()).decode()
    _say({"descriptor": descriptor, "address": memory.address, "host": host_here()})
    interval_s = transport.progress_interval_s
    while True:
        while not select.select([sys.stdin], [], [], 1.0 if math.isinf(interval_s) else interval_s)[0]:
            transport.poll()
        if sys.stdin.readline().strip() != "digest":
            break
        _say({"digest": digest(contents())})
    transport.close()


def _in_host(size_bytes: int, seed: int) -> tuple[Memory, Callable[[], View]]:
    """The memory of a probe, and what is in it."""
    shared = allocate_shared(allocation_bytes(size_bytes), "kvferry-peer")
    view = np.frombuffer(shared.buffer, np.uint8)[:size_bytes]
    fill_probe(view, seed)
    return shared.memory, lambda: view


def _on_device(size_bytes: int, seed: int, device: str, number: int) -> tuple[Memory, Callable[[], View]]:
    """The same in memory of a device that torch knows."""
    import torch

    where = torch.device(torch_name(device), number)
    # UCX shares a device's memory only from threads that have selected it.
    torch.get_device_module(where).set_device(where)
    tensor = torch.empty(allocation_bytes(size_bytes), dtype=torch.uint8, device=where)
    tensor[:size_bytes].copy_(torch.from_numpy(pattern(size_bytes, seed)))
    torch.get_device_module(where).synchronize(where)
    memory = Memory(tensor.data_ptr(), len(tensor), -1, device, number)
    return memory, lambda: tensor[:size_bytes].cpu().numpy()


def _say(message: dict[str, object]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
