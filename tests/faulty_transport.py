"""Transports that wrap another one: one injects faults into chosen tickets, one holds tickets back behind a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket, Transport
from kvferry.transport.registered_memory import view_of


class FaultKind(StrEnum):
    """What goes wrong with a ticket.

    DELAY: its bytes move `polls` polls late. DROP: nothing moves and it never ends, until its peer is disconnected.
    FAIL: its bytes move, yet it ends with an error. FLIP: one bit of what a READ brought is wrong, and it ends well.
    """

    DELAY = "delay"
    DROP = "drop"
    FAIL = "fail"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Fault:
    """Spoil the `post`-th ticket, counted from 0. `polls` is for DELAY; `bit`, modulo the ticket's size, for FLIP."""

    post: int
    kind: FaultKind
    polls: int = 0
    bit: int = 0


class ForwardingTransport:
    """Passes every call on to `inner`, except for those that a subclass has."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """A ticket of ours, what was asked for and what is to go wrong with it."""

    ticket: Ticket
    peer: str
    copies: Copies
    direction: Direction
    fault: Fault | None


class FaultyTransport(ForwardingTransport):
    """Injects `faults`. Its tickets are its own.

    A ticket that is delayed or dropped is not checked when it is posted: what is wrong with it shows up at its end.
    """

    def __init__(self, inner: Transport, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self._faults = {fault.post: fault for fault in faults}
        self._num_posts = 0
        self._num_polls = 0
        self._running: dict[Ticket, _Posted] = {}
        self._held: dict[Ticket, tuple[float, _Posted]] = {}
        self._ended: list[Completion] = []

    def spoil_next(self, kind: FaultKind, polls: int = 0, bit: int = 0) -> None:
        """Spoil the ticket that is posted next, too, whatever its number; see `Fault`."""
        self._faults[self._num_posts] = Fault(self._num_posts, kind, polls, bit)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)
        self._drop_held(lambda posted: posted.peer == peer, f"peer {peer!r} was disconnected")

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        fault = self._faults.get(self._num_posts)
        posted = _Posted(Ticket(self._num_posts + 1), peer, copies, direction, fault)
        if fault is not None and fault.kind in (FaultKind.DELAY, FaultKind.DROP):
            due = self._num_polls + fault.polls if fault.kind is FaultKind.DELAY else float("inf")
            self._held[posted.ticket] = (due, posted)
        else:
            self._running[self._inner.post(peer, copies, direction)] = posted
        self._num_posts += 1
        return posted.ticket

    def cancel(self, ticket: Ticket) -> None:
        """A dropped ticket stays open: losing interest does not end what hangs."""
        self._drop_held(lambda held: held.ticket == ticket and _is_delayed(held), "cancelled")
        for inner, posted in self._running.items():
            if posted.ticket == ticket:
                self._inner.cancel(inner)

    def poll(self) -> list[Completion]:
        self._num_polls += 1
        for due, posted in list(self._held.values()):
            if due <= self._num_polls:
                self._hand_on(posted)
        for completion in self._inner.poll():
            self._ended.append(_spoil(self._running.pop(completion.ticket), completion.error))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._drop_held(lambda posted: True, "this transport was closed")
        self._inner.close()

    def _hand_on(self, posted: _Posted) -> None:
        del self._held[posted.ticket]
        try:
            self._running[self._inner.post(posted.peer, posted.copies, posted.direction)] = posted
        except TransportError as error:
            self._ended.append(Completion(posted.ticket, str(error)))

    def _drop_held(self, where: Callable[[_Posted], bool], error: str) -> None:
        for _, posted in list(self._held.values()):
            if where(posted):
                del self._held[posted.ticket]
                self._ended.append(Completion(posted.ticket, error))


def _is_delayed(posted: _Posted) -> bool:
    return posted.fault is not None and posted.fault.kind is FaultKind.DELAY


def _spoil(posted: _Posted, error: str) -> Completion:
    fault = posted.fault
    if fault is not None and fault.kind is FaultKind.FAIL:
        error = error or "injected fault"
    elif fault is not None and fault.kind is FaultKind.FLIP and not error:
        _flip_bit(posted, fault.bit)
    return Completion(posted.ticket, error)


def _flip_bit(posted: _Posted, bit: int) -> None:
    copies = posted.copies
    if posted.direction is not Direction.READ or not copies.num_bytes:
        return
    byte, bit = divmod(bit % (copies.num_bytes * 8), 8)
    end = np.cumsum(copies.length)
    row = int(np.searchsorted(end, byte, side="right"))
    address = int(copies.target[row]) + byte - int(end[row] - copies.length[row])
    view_of(Memory(address, 1, -1))[0] ^= np.uint8(1 << bit)


class GatedTransport(ForwardingTransport):
    """Holds back what is posted while `is_shut`, which is asked at each post and by `poll`. Its tickets are its own.

    Another process can open and close the gate when it is a file: `GatedTransport(inner, path.exists)`.
    """

    def __init__(self, inner: Transport, is_shut: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._is_shut = is_shut
        self._numbers = count(1)
        self._waiting: dict[Ticket, tuple[str, Copies, Direction]] = {}
        self._running: dict[Ticket, Ticket] = {}
        self._ended: list[Completion] = []

    def disconnect(self, peer: str) -> None:
        self._drop(lambda ticket: self._waiting[ticket][0] == peer, f"peer {peer!r} was disconnected")
        self._inner.disconnect(peer)

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        ticket = Ticket(next(self._numbers))
        if self._is_shut():
            self._waiting[ticket] = (peer, copies, direction)
        else:
            self._running[self._inner.post(peer, copies, direction)] = ticket
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self._drop(lambda waiting: waiting == ticket, "cancelled")
        for inner, outer in self._running.items():
            if outer == ticket:
                self._inner.cancel(inner)

    def poll(self) -> list[Completion]:
        if self._waiting and not self._is_shut():
            for ticket in list(self._waiting):
                self._let_in(ticket)
        for completion in self._inner.poll():
            self._ended.append(Completion(self._running.pop(completion.ticket), completion.error))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._drop(lambda ticket: True, "this transport was closed")
        self._inner.close()

    def _let_in(self, ticket: Ticket) -> None:
        try:
            self._running[self._inner.post(*self._waiting.pop(ticket))] = ticket
        except TransportError as error:
            self._ended.append(Completion(ticket, str(error)))

    def _drop(self, where: Callable[[Ticket], bool], error: str) -> None:
        for ticket in [ticket for ticket in self._waiting if where(ticket)]:
            del self._waiting[ticket]
            self._ended.append(Completion(ticket, error))
