"""A transport whose tickets wait at a gate: for tests that need something to happen while a read is under way.

As long as the gate is shut, nothing that is posted moves. Another process can open and close it when it is a file:
`GatedTransport(inner, path.exists)`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket, Transport

Waiting = tuple[str, Copies, Direction]


class GatedTransport:
    """Passes everything on to `inner`; its tickets are its own. `is_shut` is asked at each post, and then by `poll`."""

    def __init__(self, inner: Transport, is_shut: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_shut = is_shut
        self._numbers = count(1)
        self._waiting: dict[Ticket, Waiting] = {}
        self._running: dict[Ticket, Ticket] = {}
        self._ended: list[Completion] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def progress_interval_s(self) -> float:
        return self._inner.progress_interval_s

    def register(self, memory: Memory) -> None:
        """Raises what the inner transport raises, as all that follow do."""
        self._inner.register(memory)

    def unregister(self, memory: Memory) -> None:
        self._inner.unregister(memory)

    def descriptor(self) -> bytes:
        return self._inner.descriptor()

    def connect(self, peer: str, descriptor: bytes) -> None:
        self._inner.connect(peer, descriptor)

    def carriers(self, peer: str) -> tuple[str, ...]:
        return self._inner.carriers(peer)

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
        for inner, ours in self._running.items():
            if ours == ticket:
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
