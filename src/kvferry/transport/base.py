"""The contract of a transport. `kvferry.testing.transports.contract` checks it.

One thread uses a transport, the agent's. No method blocks on a peer: work that takes time is done by `poll`, or by
threads of the transport. A fault of a peer never raises from `poll`: it ends that peer's tickets with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvferry.plan.programs.copies import Copies, Direction

__all__ = ["Completion", "Direction", "Memory", "NotifyingTransport", "RevocableTransport", "Ticket", "Transport"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this process that peers can reach once it is registered.

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
    """The end of a ticket: this process moves none of its bytes any more. `error` is empty when every byte has arrived.
    Of a write that has failed, what was sent before may still arrive at a peer that was stopped."""

    ticket: Ticket
    error: str


class Transport(Protocol):
    """Moves rows of bytes between registered memory of two processes.

    A peer gets an opaque `descriptor`, made after the last `register`; handles of this process are never sent.
    """

    @property
    def name(self) -> str:
        """The name for users: `shm`, `cma`, `tcp`, `nixl`."""
        ...

    @property
    def copies_once(self) -> bool:
        """Whether bytes are copied once, from source to target, and the peer takes no part in it."""
        ...

    @property
    def progress_interval_s(self) -> float:
        """How often `poll` must run while no ticket is open; `inf` when it need not."""
        ...

    def register(self, memory: Memory) -> None:
        """Allow copies from and to this memory, by this process and by peers. Raises TransportError if it cannot be."""
        ...

    def unregister(self, memory: Memory) -> None:
        """End that. Tickets that touch the memory must have ended."""
        ...

    def descriptor(self) -> bytes:
        """What a peer needs to reach the registered memory; at most 1 MiB, safe to send to an authenticated peer.

        Raises TransportError when peers cannot reach it; this process may still be able to reach peers.
        """
        ...

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Prepare copies from and to a peer's memory. Raises TransportError with the reason if that is impossible."""
        ...

    def carriers(self, peer: str) -> tuple[str, ...]:
        """What really moves the bytes to and from a connected peer, by its library's name for it: `cma`, `tcp/eth0`.

        Certain only after a copy; empty before.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """End the connection; open tickets of the peer end with an error. Unknown peers are fine."""
        ...

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Start copying; zero rows are fine. Remote addresses are those of the peer's own process.

        Raises TransportError when the peer is not connected or a row leaves the registered memory on either side.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ask for an early end. The ticket stays open until `poll` reports it: only then can its memory be reused."""
        ...

    def poll(self) -> list[Completion]:
        """Make progress and return the tickets that ended since the last call, each exactly once."""
        ...

    def moved(self, peer: str) -> int:
        """A number that grows while bytes of open tickets move to or from a connected peer: tickets of one peer wait
        for one another, so it does not tell them apart. 0 where nothing is known."""
        ...

    def close(self) -> None:
        """Release everything. Safe to call twice."""
        ...


@runtime_checkable
class NotifyingTransport(Transport, Protocol):
    """A transport whose own threads move the bytes, and tell when a ticket has ended: it need not be polled before."""

    def notify_with(self, notify: Callable[[], None]) -> None:
        """Have `notify` called, on any thread, whenever `poll` has a ticket to report. Called before the first
        `connect`."""
        ...


@runtime_checkable
class RevocableTransport(Transport, Protocol):
    """A transport whose own process carries out what its peers ask for, and so can refuse one of them for good."""

    def descriptor_for(self, peer: str, descriptor: bytes) -> bytes:
        """One of `descriptor`'s answers with access that is this peer's own: the same each time, until it is
        revoked."""
        ...

    def revoke(self, peer: str) -> None:
        """End what a peer may do by the descriptors that were made for it. Nothing more of what it has asked for comes
        into registered memory, or out of it, once this returns. Peers without a descriptor of their own are fine."""
        ...
