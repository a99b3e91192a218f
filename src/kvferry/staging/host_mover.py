"""Gathers and scatters in host memory, on a thread of its own: one slot is copied while others are transferred."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvferry.errors import FerryError, IllegalEventError
from kvferry.plan.programs.tiles import Tile
from kvferry.staging.mover import CLOSED, Moved
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions, View, view_of
from kvferry.transport.rowcopy.gather_scatter import copy_tiles


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """The rows of a key, and memory of a peer that they may touch."""

    key: Hashable
    tiles: Sequence[Tile]
    peer_view: View | None


def host_regions(memories: Sequence[Memory]) -> Regions:
    """Memories of this process, with views of them. Raises TransportError when one cannot exist or two overlap."""
    extents = [(memory.address, memory.size_bytes) for memory in memories]
    Regions.of(extents)  # Raises before any memory is touched.
    return Regions.of(extents, map(view_of, memories))


class HostMover:
    """A `Mover` for memory that this process can read: one thread, one copy after another.

    `regions` are all memories that rows may touch; they must stay until `close`. `notify` is called from that
    thread whenever `poll` has something to report.
    """

    notifies = True
    reaches_peer_memory = True

    def __init__(self, regions: Regions, notify: Callable[[], None]) -> None:
        self._regions = regions
        self._notify = notify
        self._open: set[Hashable] = set()
        # The condition guards the fields below.
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._ended: list[Moved] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kvferry-mover", daemon=True)
        self._thread.start()

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
        """See `Mover`. A copy that is under way stops at its next step, a few MiB at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while job := self._next():
            moved = Moved(job.key, self._copy(job))
            # The owner unmaps the view of a peer when it hears of the end: no reference to it may be left here.
            job = None
            with self._changed:
                self._ended.append(moved)
            self._notify()

    def _next(self) -> _Job | None:
        """Wait for a job; None after `close`, which ends those that wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._is_closed:
                return self._jobs.popleft()
            self._ended += [Moved(job.key, CLOSED) for job in self._jobs]
            self._jobs.clear()
            return None

    def _copy(self, job: _Job) -> str:
        """Copy the rows; returns the error, or an empty text."""
        try:
            regions = self._regions if job.peer_view is None else self._regions.with_view(job.peer_view)
            for _ in copy_tiles(regions, job.tiles):
                if self._is_closed:
                    return CLOSED
        except FerryError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: the key must end whatever happens
            return f"the copy failed: {type(error).__name__}: {error}"
        return ""
