"""What a transport is: a dozen lines of contract that every one of them keeps (`kvferry.testing.transports.contract`).

A transport belongs to one thread, the agent's. Nothing here blocks for longer than it takes to hand work over;
what takes time goes on inside `poll`. What a peer does wrong never raises from `poll`: it ends that peer's tickets
with an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.plan.programs.copies import Copies, Direction

__all__ = ["Completion", "Direction", "Memory", "Ticket", "Transport"]


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of this process's memory that peers may reach once it is registered.

    `address` and `size_bytes` locate it. `shared_fd` is a file descriptor of the same memory when the pages are
    shared (a memfd, offset 0), -1 when they are private. `device` is `cpu` for host memory, else the device whose
    memory it is, and `device_id` which one of them.
    """

    address: int
    size_bytes: int
    shared_fd: int
    device: str = "cpu"
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A posted transfer: unique within its transport and never reused."""

    number: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a ticket: no byte of it moves any more. `error` is empty when every byte arrived."""

    ticket: Ticket
    error: str


class Transport(Protocol):
    """Moves rows of bytes between registered memory of two processes.

    Local handles never travel: what a peer needs is in the opaque `descriptor`, made after the last `register`.
    """

    @property
    def name(self) -> str:
        """How users call it: `memory`, `shm`, `cma`, `tcp`, `nixl`."""
        ...

    @property
    def progress_interval_s(self) -> float:
        """How often `poll` must run although nothing is posted here; `inf` when it need not."""
        ...

    def register(self, memory: Memory) -> None:
        """Make memory reachable for copies, on both sides of a copy. Raises TransportError if it cannot be."""
        ...

    def unregister(self, memory: Memory) -> None:
        """Take it back. Tickets that touch it must have ended."""
        ...

    def descriptor(self) -> bytes:
        """What a peer needs to reach the registered memory; at most 1 MiB, safe to send to an authenticated peer.

        Raises TransportError when peers cannot reach it, though this side may still reach theirs.
        """
        ...

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Get ready to copy from and to a peer's memory. Raises TransportError with the reason if that cannot work."""
        ...

    def carriers(self, peer: str) -> tuple[str, ...]:
        """What really moves the bytes to and from a connected peer, in the words of whoever does: `cma`, `tcp/eth0`.

        Known for sure only after a copy; empty while it is not.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open tickets end with an error. Unknown peers are fine."""
        ...

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Start copying; zero rows are fine. The addresses of the far side are those of the peer's own process.

        Raises TransportError when the peer is not connected or a row leaves the registered memory on either side.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Lose interest. The ticket stays open until `poll` reports its end: only then can its memory be reused."""
        ...

    def poll(self) -> list[Completion]:
        """Make progress and return the tickets that ended since the last call, each exactly once."""
        ...

    def close(self) -> None:
        """Release everything. Safe to call twice."""
        ...
