"""Digests of registered memory, read where it lies: in slices, so that the agent's thread has time for its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.plan.description.layout import Region
from kvferry.plan.digests.bound_parts import Grid
from kvferry.plan.digests.extractor import Extract
from kvferry.session.events import Digested
from kvferry.session.keys import WorkKey
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import View, view_of

# One step gathers about this much, and hashes it while it is in the L2 cache.
STEP_BYTES = 1 << 20

_RUN_TYPES: dict[int, np.dtype[np.generic]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class HostBytes:
    """The memory that this rank has registered, by address.

    It is seen as one array from the first byte to the last, gaps included: one numpy expression then reads rows of many
    regions. A layout keeps every address inside a region; `unreadable` says which region is not registered memory.
    """

    def __init__(self, memories: Sequence[Memory], regions: Sequence[Region]) -> None:
        extents = [(memory.address, memory.address + memory.size_bytes) for memory in memories]
        outside = [region for region in regions if not lies_in(region, extents)]
        self.unreadable = f"a region is not registered memory: {outside[0]}" if outside else ""
        self._base = min((start for start, _ in extents), default=0)
        stop = max((stop for _, stop in extents), default=0)
        self._view = view_of(Memory(self._base, stop - self._base, -1))

    def read(self, extract: Extract, states: slice, items: slice) -> View:
        """The bytes of some items of some states: (states, bytes), in the order that every layout agrees on."""
        address = extract.addresses(states, items)
        begins = (address - np.uint64(self._base)).astype(np.int64)
        found = np.ascontiguousarray(self._windows(extract.grid)[begins])
        return found.reshape(len(address), -1).view(np.uint8)

    def _windows(self, grid: Grid) -> NDArray[np.generic]:
        """The item that would begin at every byte. Numbers are copied twice as fast as other bytes of the same size."""
        shape = self._view.size - grid.reach_bytes + 1, *grid.extents
        dtype = _RUN_TYPES.get(grid.run_bytes, np.dtype((np.void, grid.run_bytes)))
        return np.ndarray(shape, dtype, self._view, 0, (1, *grid.strides))


def lies_in(region: Region, extents: Sequence[tuple[int, int]]) -> bool:
    """Whether a region lies in one of these pieces of memory, given as where each begins and ends."""
    return any(start <= region.address and region.address + region.size_bytes <= stop for start, stop in extents)


@dataclass(slots=True, eq=False)
class _Job:
    """A digest under way. `values` fill up while `work` goes on, which yields how many bytes it has digested."""

    key: WorkKey
    values: list[bytes]
    work: Iterator[int]


class Digester:
    """Takes turns between digests, so that a long one does not hold up a short one. Belongs to one thread."""

    def __init__(self, memory: HostBytes) -> None:
        self._memory = memory
        self._jobs: deque[_Job] = deque()
        self._refused: list[Digested] = []

    @property
    def busy(self) -> bool:
        """Whether there is something to do for `run`."""
        return bool(self._jobs or self._refused)

    def start(self, key: WorkKey, extracts: Sequence[Extract]) -> None:
        """Begin a digest; its values, or why there are none, come out of `run`."""
        if self._memory.unreadable:
            self._refused.append(Digested(key, (), self._memory.unreadable))
            return
        values = [b""] * sum(len(extract.numbers) for extract in extracts)
        self._jobs.append(_Job(key, values, self._digest(extracts, values)))

    def drop(self, key: WorkKey) -> None:
        """Cancel a digest. Unknown ones are fine."""
        self._jobs = deque(job for job in self._jobs if job.key != key)

    def run(self, max_bytes: int) -> list[Digested]:
        """Digest about `max_bytes` at most; returns those that are done."""
        done, self._refused = self._refused, []
        while self._jobs and max_bytes > 0:
            job = self._jobs.popleft()
            for num_bytes in job.work:
                max_bytes -= num_bytes
                if max_bytes <= 0:
                    self._jobs.append(job)
                    break
            else:
                done.append(Digested(job.key, tuple(job.values)))
        return done

    def _digest(self, extracts: Sequence[Extract], values: list[bytes]) -> Iterator[int]:
        for extract in extracts:
            items = max(1, STEP_BYTES // extract.grid.num_bytes)
            states = max(1, items // extract.items_per_state)
            for first in range(0, len(extract.numbers), states):
                slab = slice(first, first + states)
                hashes = [xxhash.xxh3_64() for _ in extract.numbers[slab]]
                yield from self._hash(extract, slab, items, hashes)
                for number, state_hash in zip(extract.numbers[slab], hashes, strict=True):
                    values[number] = state_hash.digest()

    def _hash(self, extract: Extract, states: slice, items: int, hashes: Sequence[xxhash.xxh3_64]) -> Iterator[int]:
        """Hash all items of some states, `items` at a time of each."""
        for first in range(0, extract.items_per_state, items):
            rows = self._memory.read(extract, states, slice(first, first + items))
            for state_hash, row in zip(hashes, rows, strict=True):
                state_hash.update(row)
            yield rows.size
