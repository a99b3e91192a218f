"""Copies on threads of this process: one slot is copied while others are transferred."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvferry.errors import FerryError, IllegalEventError
from kvferry.plan.programs.tiles import Tile
from kvferry.staging.mover import CLOSED, Moved
from kvferry.transport.registered_memory import View

# How long `close` waits for copies that are under way.
CLOSE_S = 3.0
GIVEN_UP = "the mover was closed, and the copy did not end"

Copy = Callable[[Sequence[Tile], View | None], Iterator[None]]
"""Copies the rows of tiles when iterated, of which some may lie in memory of a peer; yields where it may be stopped."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """The rows of a key, and memory of a peer that they may touch."""

    key: Hashable
    tiles: Sequence[Tile]
    peer_view: View | None


class ThreadMover:
    """A `Mover` with `num_threads` threads, each of which does one copy after another.

    `copy` is what they do. `notify` is called from such a thread whenever `poll` has something to report.
    """

    notifies = True
    reaches_peer_memory = False

    def __init__(self, copy: Copy, notify: Callable[[], None], num_threads: int = 1) -> None:
        self._copy = copy
        self._notify = notify
        self._open: set[Hashable] = set()
        # The condition guards the fields below.
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running: set[Hashable] = set()
        self._ended: list[Moved] = []
        self._is_closed = False
        self._given_up_at = inf
        self._threads = [
            threading.Thread(target=self._work, name="kvferry-mover", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def start(self, key: Hashable, tiles: Sequence[Tile], peer_view: View | None = None) -> None:
        """See `Mover`. Copies begin in the order of their starts."""
        if key in self._open:
            raise IllegalEventError("a copy is started twice", found=f"{key}", expected="one copy per key at a time")
        self._open.add(key)
        with self._changed:
            if self._is_closed:
                self._ended.append(Moved(key, CLOSED))
            else:
                self._jobs.append(_Job(key, tiles, peer_view))
                self._changed.notify()

    def poll(self) -> list[Moved]:
        """See `Mover`."""
        with self._changed:
            ended, self._ended = self._ended, []
        self._open.difference_update(moved.key for moved in ended)
        return ended

    def close(self) -> None:
        """See `Mover`. Copies that have not begun end at once, and one that is under way at its next step, after a few
        MiB at most. One that waits for a device that does not answer is given up; should it go on one day, blocks may
        be written after this. Only the first call waits for it."""
        with self._changed:
            self._is_closed = True
            self._ended += [Moved(job.key, CLOSED) for job in self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        # An agent closes its mover twice, and waits for both no longer than its own `close` takes.
        self._given_up_at = min(self._given_up_at, time.monotonic() + CLOSE_S)
        for thread in self._threads:
            thread.join(max(0.0, self._given_up_at - time.monotonic()))
        with self._changed:
            self._ended += [Moved(key, GIVEN_UP) for key in self._running]
            self._running.clear()

    def _work(self) -> None:
        while job := self._next():
            moved = Moved(job.key, self._carry_out(job))
            # The owner unmaps the view of a peer when it hears of the end: no reference to it may be left here.
            job = None
            with self._changed:
                if moved.key not in self._running:
                    return
                self._running.discard(moved.key)
                self._ended.append(moved)
            self._notify()

    def _next(self) -> _Job | None:
        """Wait for a job; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._is_closed:
                job = self._jobs.popleft()
                self._running.add(job.key)
                return job
            return None

    def _carry_out(self, job: _Job) -> str:
        """Copy the rows; returns the error, or an empty text."""
        try:
            for _ in self._copy(job.tiles, job.peer_view):
                if self._is_closed:
                    return CLOSED
        except FerryError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: the key must end whatever happens
            return f"the copy failed: {type(error).__name__}: {error}"
        return ""
