"""The client side of tcp: a few connections to each peer, among which its tickets are divided.

One connection is the work of one core on either side, and many networks give one no more than a part of what they can.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvferry.transport.base import Completion, Ticket
from kvferry.transport.tcp.lane import Lane, PeerAddress, Transfer

NUM_LANES: Final = 4
MIN_SHARE_BYTES: Final = 4 << 20
"""A ticket is divided into no shorter shares."""


@dataclass(slots=True)
class _Open:
    """A ticket of which `num_shares` have not ended."""

    num_shares: int
    error: str = ""
    is_cancelled: bool = False


class Lanes:
    """Makes the transfers of one peer and puts their completions into `ended`. Only the first lane keeps its connection
    while there are none. The others open theirs when they get work: while that one is there, and has work as well."""

    def __init__(self, address: PeerAddress, ended: SimpleQueue[Completion], stall_timeout_s: float) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._open: dict[Ticket, _Open] = {}
        first = Lane(address, self, stall_timeout_s)
        others = (Lane(address, self, stall_timeout_s, instead=first) for _ in range(NUM_LANES - 1))
        self._lanes = (first, *others)

    def submit(self, transfer: Transfer) -> None:
        """Begin a ticket. Raises RuntimeError when no thread can be started for it."""
        lanes = self._lanes if self._lanes[0].is_connected else self._lanes[:1]
        shares = _divided(transfer, len(lanes))
        with self._lock:
            self._open[transfer.ticket] = _Open(len(shares))
        for number, share in enumerate(shares):
            try:
                _give(share, lanes)
            except RuntimeError as error:
                if not number:
                    del self._open[transfer.ticket]
                    raise
                self.end(share.ticket, str(error))

    def cancel(self, ticket: Ticket) -> None:
        """Skip what has not been requested yet. Unknown and ended tickets are fine."""
        with self._lock:
            if ticket in self._open:
                self._open[ticket].is_cancelled = True

    def is_cancelled(self, ticket: Ticket) -> bool:
        """Whether a lane is to skip what is left of an open ticket: also when another share of it has failed."""
        return self._open[ticket].is_cancelled

    def end(self, ticket: Ticket, error: str) -> None:
        """A share has ended, and with the last one its ticket."""
        with self._lock:
            known = self._open[ticket]
            known.num_shares -= 1
            known.error = known.error or error
            known.is_cancelled |= bool(error)
            if known.num_shares:
                return
            del self._open[ticket]
        self._ended.put(Completion(ticket, known.error))

    def stop(self, reason: str) -> None:
        """End all tickets with this error; those on the wire once no thread uses their memory any more."""
        for lane in self._lanes:
            lane.stop(reason)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads of stopped lanes, for each of them that long."""
        for lane in reversed(self._lanes):
            lane.join(timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether no thread works, and so all tickets of stopped lanes have ended."""
        # The first one last: others may have given it work.
        return all(lane.is_over for lane in reversed(self._lanes))


def _give(share: Transfer, lanes: Sequence[Lane]) -> None:
    """To the lane with the least to do that has a thread, or can have one. Raises RuntimeError."""
    refused = RuntimeError()
    for lane in sorted(lanes, key=lambda lane: lane.pending_bytes):
        try:
            return lane.submit(share)
        except RuntimeError as error:
            refused = error
    raise refused


def _divided(transfer: Transfer, num_lanes: int) -> list[Transfer]:
    """Shares of about the same number of bytes, as many as there are lanes at most."""
    end = np.cumsum(transfer.length)
    num_bytes = int(end[-1]) if len(end) else 0
    num_shares = min(num_lanes, num_bytes // MIN_SHARE_BYTES)
    if num_shares < 2:
        return [transfer]
    inner = np.searchsorted(end, np.arange(1, num_shares) * (num_bytes // num_shares)) + 1
    edges = np.unique([0, *inner.tolist(), len(end)]).tolist()
    return [transfer.subset(slice(first, stop)) for first, stop in pairwise(edges)]
