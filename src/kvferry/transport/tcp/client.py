"""The client side of tcp: a few connections to each peer, among which its tickets are divided.

One connection is the work of one core on either side, and many networks give one no more than a part of what they can.
Each has a thread while there is something to move. It takes the next share of a ticket when it is done with the last:
one that cannot be opened, or is slow, leaves its work to the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from kvferry.errors import FerryError, TransportError
from kvferry.system import os_error_text
from kvferry.transport.base import Completion, Ticket
from kvferry.transport.tcp.lane import Lane, PeerAddress, Transfer

NUM_LANES: Final = 4
MIN_SHARE_BYTES: Final = 4 << 20
"""A ticket is divided into no shorter shares."""
# Longer than between two requests of a busy pair. Without one the next ticket starts a thread, which takes 0.1 ms.
KEEP_THREAD_S = 2.0
# A peer that had no room for a second connection is asked over the first one alone for so long.
RETRY_S = 10.0


@dataclass(slots=True)
class _Open:
    """A ticket of which `num_shares` have not ended."""

    num_shares: int
    error: str = ""
    is_cancelled: bool = False


class PeerClient:
    """Makes the transfers of one peer and hands their completions to `report`, on any thread.

    The first lane opens its connection at the first transfer and keeps it. The others open theirs once that one is
    there and there is more to do than it does, and keep none without work.

    When a connection fails in a transfer, all waiting ones end with its reason; the next one opens a new connection.
    """

    def __init__(self, address: PeerAddress, report: Callable[[Completion], None], stall_timeout_s: float) -> None:
        self._address = address
        self._report = report
        self._lanes = tuple(Lane(address, stall_timeout_s) for _ in range(NUM_LANES))
        # Guards what follows, and says that some of it has changed.
        self._changed = threading.Condition()
        self._open: dict[Ticket, _Open] = {}
        self._waiting: deque[Transfer] = deque()
        self._working: dict[Lane, bool] = {}
        self._threads: dict[Lane, threading.Thread] = {}
        self._alone_until = 0.0
        self._stopped = ""

    def submit(self, transfer: Transfer) -> None:
        """Begin a ticket. Raises RuntimeError when no thread can be started for it."""
        with self._changed:
            is_alone = not self._lanes[0].is_connected or time.monotonic() < self._alone_until
            shares = _divided(transfer, 1 if is_alone else NUM_LANES)
            num_busy = sum(self._working.values())
            wanted = 1 if is_alone else min(NUM_LANES, num_busy + len(self._waiting) + len(shares))
            self._start(wanted)
            self._open[transfer.ticket] = _Open(len(shares))
            self._waiting.extend(shares)
            self._changed.notify(len(shares))

    def cancel(self, ticket: Ticket) -> None:
        """Skip what has not been requested yet. Unknown and ended tickets are fine."""
        with self._changed:
            if ticket in self._open:
                self._open[ticket].is_cancelled = True

    def stop(self, reason: str) -> None:
        """End all tickets with this error; those on the wire once no thread uses their memory any more."""
        with self._changed:
            self._stopped = self._stopped or reason
            for lane in self._lanes:
                lane.stop(self._stopped)
                if lane not in self._working:
                    lane.disconnect()
            self._end_waiting(self._stopped)
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads of a stopped client, for each of them that long."""
        for thread in list(self._threads.values()):
            thread.join(timeout_s)

    @property
    def num_moved(self) -> int:
        """Bytes, over all connections."""
        return sum(lane.num_moved for lane in self._lanes)

    @property
    def is_over(self) -> bool:
        """Whether no thread works, and so all tickets of a stopped client have ended."""
        return not self._working

    def _start(self, num_lanes: int) -> None:
        """Have so many threads, or as many as there can be. Raises RuntimeError when there is none."""
        for lane in self._lanes[:num_lanes]:
            if lane in self._working:
                continue
            thread = threading.Thread(target=self._work, args=(lane,), name="kvferry-tcp-lane", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._working:
                    raise
                return
            self._threads[lane], self._working[lane] = thread, False

    def _work(self, lane: Lane) -> None:
        try:
            if lane is not self._lanes[0]:
                lane.connect()
            while (transfer := self._next(lane)) is not None:
                self._end(transfer.ticket, self._moved(lane, transfer))
        except Exception as error:  # noqa: BLE001 - the top of a thread: tickets must not wait for it
            with self._changed:
                self._leave(lane)
                self._alone_until = time.monotonic() + RETRY_S
                if not self._working:
                    self._end_waiting(self._stopped or str(error) or type(error).__name__)

    def _next(self, lane: Lane) -> Transfer | None:
        """What is to be moved. None, and the thread is to end, when there has been nothing for a while, or the
        client is stopped."""
        with self._changed:
            self._working[lane] = False
            self._changed.wait_for(lambda: self._waiting or self._stopped, KEEP_THREAD_S)
            if self._stopped or not self._waiting:
                self._leave(lane)
                return None
            self._working[lane] = True
            return self._waiting.popleft()

    def _leave(self, lane: Lane) -> None:
        del self._working[lane]
        if self._stopped or lane is not self._lanes[0]:
            lane.disconnect()

    def _moved(self, lane: Lane, transfer: Transfer) -> str:
        """The error of a share, or nothing."""
        try:
            return lane.move(transfer, lambda: self._over(transfer.ticket))
        except TransportError as error:
            return str(error)  # A refusal. The connection is still usable.
        except (OSError, FerryError) as error:
            reason = self._stopped or f"connection to {self._address.host}:{self._address.port}: {os_error_text(error)}"
        except Exception as error:  # noqa: BLE001 - the ticket must end whatever happens
            reason = f"{type(error).__name__}: {error}"
        lane.disconnect()
        with self._changed:
            self._end_waiting(reason)
        return reason

    def _over(self, ticket: Ticket) -> str:
        """Why what is left of an open ticket is not to be moved, or nothing: also when another share has failed."""
        return self._stopped or ("cancelled" if self._open[ticket].is_cancelled else "")

    def _end_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for transfer in waiting:
            self._end(transfer.ticket, reason)

    def _end(self, ticket: Ticket, error: str) -> None:
        """A share has ended, and with the last one its ticket."""
        with self._changed:
            known = self._open[ticket]
            known.num_shares -= 1
            known.error = known.error or error
            known.is_cancelled |= bool(error)
            if known.num_shares:
                return
            del self._open[ticket]
        self._report(Completion(ticket, known.error))


def _divided(transfer: Transfer, num_lanes: int) -> list[Transfer]:
    """Shares of about the same number of bytes, as many as there are lanes at most."""
    end = np.cumsum(transfer.length)
    num_bytes = int(end[-1]) if len(end) else 0
    num_shares = min(num_lanes, num_bytes // MIN_SHARE_BYTES)
    if num_shares < 2:
        return [transfer]
    inner = np.searchsorted(end, np.arange(1, num_shares, dtype=np.uint64) * np.uint64(num_bytes // num_shares)) + 1
    edges = np.unique([0, *inner.tolist(), len(end)]).tolist()
    return [transfer.subset(slice(first, stop)) for first, stop in pairwise(edges)]
