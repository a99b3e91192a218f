"""Digests of one rank's bytes: made some time after they were asked for, unless they are dropped before that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.digests.bound_parts import Grid
from kvferry.plan.digests.extractor import Extract
from kvferry.session.commands import Digest
from kvferry.session.events import Digested
from kvferry.session.keys import WorkKey
from simulator.context import RunContext
from simulator.state.memory import RankMemory

QUICK_S = 0.01
SLOW_S = 8.0
VALUE_BYTES = 8


class Digester:
    """What an agent does for its sessions between other things. `then` is told the values."""

    def __init__(self, context: RunContext, memory: RankMemory, then: Callable[[Digested], None]) -> None:
        self._context, self._memory, self._then = context, memory, then
        self._wanted: dict[WorkKey, Digest] = {}

    def start(self, who: str, command: Digest) -> None:
        """Look at the bytes a little later; slow ones take longer than a lease that nobody renews."""
        scheduler, faults = self._context.scheduler, self._context.faults
        slow = scheduler.chance(faults.slow)
        if slow:
            self._context.log.fault("slow digest", who)
        self._wanted[command.key] = command
        scheduler.after(scheduler.between(0.0, SLOW_S if slow else QUICK_S), partial(self._finish, command))

    def drop(self, key: WorkKey) -> None:
        """Not wanted any more. Unknown ones are fine."""
        self._wanted.pop(key, None)

    def reads_for(self, key: WorkKey) -> bool:
        """Whether this digest will still look at bytes."""
        return key in self._wanted

    def _finish(self, command: Digest) -> None:
        if self._wanted.get(command.key) is command:
            del self._wanted[command.key]
            self._then(Digested(command.key, _values(self._memory, command.extracts)))


def _values(memory: RankMemory, extracts: Sequence[Extract]) -> tuple[bytes, ...]:
    values = [b""] * sum(len(extract.numbers) for extract in extracts)
    for extract in extracts:
        begins = extract.addresses(slice(None), slice(None)).astype(np.int64) - memory.map.base
        rows = memory.bytes[begins[:, :, np.newaxis] + _offsets(extract.grid)].reshape(len(begins), -1)
        for number, row in zip(extract.numbers, rows, strict=True):
            values[number] = blake2b(row.tobytes(), digest_size=VALUE_BYTES).digest()
    return tuple(values)


@lru_cache(maxsize=1024)
def _offsets(grid: Grid) -> NDArray[np.int64]:
    """Of every byte of an item from where it begins, in order."""
    offsets = np.zeros(1, np.int64)
    for extent, stride in zip((*grid.extents, grid.run_bytes), (*grid.strides, 1), strict=True):
        offsets = np.add.outer(offsets, np.arange(extent) * stride).ravel()
    return offsets
