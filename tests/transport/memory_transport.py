"""Transport between engines of one process: a copy in memory."""

from __future__ import annotations

import threading
from uuid import uuid4

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.posting import Posting
from kvferry.transport.registered_memory import Registry
from kvferry.transport.rowcopy.copy_queue import CopyQueue


class MemoryFabric:
    """What connects the memory transports of one process. Each of them may belong to a thread of its own."""

    def __init__(self) -> None:
        # Held while a slice is copied: memory cannot be taken back in the middle of it.
        self.lock = threading.RLock()
        self.members: dict[bytes, MemoryTransport] = {}

    def withdraw(self, owner: bytes, error: str) -> None:
        """End all tickets that touch memory of `owner`, wherever they were posted. Call with the lock held."""
        for member in self.members.values():
            member.forget(owner, error)


class MemoryTransport:
    """Copies between the registered memory of two engines of one process, in `poll`, 16 MiB at a time."""

    name = "memory"
    copies_once = True
    progress_interval_s = float("inf")

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._token = uuid4().bytes
        self._registry = Registry()
        self._peers: dict[str, bytes] = {}
        self._queue = CopyQueue()
        with fabric.lock:
            fabric.members[self._token] = self

    def register(self, memory: Memory) -> None:
        """Raises TransportError when the memory overlaps registered memory."""
        with self._fabric.lock:
            self._registry.add(memory)

    def unregister(self, memory: Memory) -> None:
        """Tickets of peers that touch it end with an error. Raises TransportError when it is not registered."""
        with self._fabric.lock:
            self._registry.remove(memory)
            self._fabric.withdraw(self._token, "the peer unregistered memory")

    def descriptor(self) -> bytes:
        return self._token

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError when the descriptor is not that of a living transport of this fabric."""
        self.disconnect(peer)
        with self._fabric.lock:
            if bytes(descriptor) not in self._fabric.members:
                raise TransportError(
                    f"peer {peer!r} is not in this process",
                    found=f"a descriptor of {len(descriptor)} bytes that no transport of this fabric made",
                    hint="use shm on one host and tcp or nixl between hosts",
                )
            self._peers[peer] = bytes(descriptor)

    def carriers(self, peer: str) -> tuple[str, ...]:
        return (self.name,)

    def disconnect(self, peer: str) -> None:
        with self._fabric.lock:
            self._peers.pop(peer, None)
            self._queue.drop(lambda job: job.peer == peer, f"peer {peer!r} was disconnected")

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected, has closed, or a row leaves registered memory."""
        with self._fabric.lock:
            remote = self._fabric.members.get(self._peers.get(peer, b""))
            if remote is None:
                raise TransportError(f"peer {peer!r} is not connected")
            local, there = self._registry.regions, remote._registry.regions
            return self._queue.add(Posting(peer, local, there, copies, direction))

    def cancel(self, ticket: Ticket) -> None:
        with self._fabric.lock:
            self._queue.drop(lambda job: job.ticket == ticket, "cancelled")

    def poll(self) -> list[Completion]:
        with self._fabric.lock:
            return self._queue.run()

    def moved(self, peer: str) -> int:
        return self._queue.num_moved

    def close(self) -> None:
        with self._fabric.lock:
            self._queue.drop(lambda job: True, "this transport was closed")
            self._fabric.withdraw(self._token, "the peer closed its transport")
            self._fabric.members.pop(self._token, None)
            self._registry.clear()
            self._peers.clear()

    def forget(self, owner: bytes, error: str) -> None:
        """The fabric says that memory of `owner` is gone. Called with the fabric's lock held."""
        peers = {peer for peer, token in self._peers.items() if token == owner}
        self._queue.drop(lambda job: job.peer in peers, error)
