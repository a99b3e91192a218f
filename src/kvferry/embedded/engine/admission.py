"""Admission control: a request gets cache blocks for its whole length before it enters the engine.

The engine's thread ends when blocks that it does not schedule fill its pool and nothing can run. Held and reserved
blocks are such blocks, so a request is admitted only if it can run to its last token.

The cache groups draw sectors from one pool and cut them into blocks of their own sizes. A sector that holds one block
is lost to the other groups, so sums of blocks prove nothing. But a group draws a sector only when all blocks of those
that it holds are used: it never holds more than it holds now, or than all blocks granted to it fill, whichever is more.
A request is admitted when the pool has so many sectors for every group.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import add

from kvferry.connectors.jobs import GroupSize

Blocks = tuple[int, ...]
Sectors = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """The use of the cache at one time, in blocks per cache group.

    `capacity` is what a group could have if it had the pool alone, `granted` what the admitted requests may use at
    most, `allocated` what is in block tables now. `num_waiting` requests wait for room; the blocks of `num_leased`
    requests are, or will be, in the hands of a transfer.
    """

    capacity: Blocks
    granted: Blocks
    allocated: Blocks
    num_waiting: int
    num_leased: int


class Admission:
    """Grants blocks of every group at once, strictly in the order of asking. For one event loop.

    `num_held` says how many sectors of the pool each group holds: all that it has held since the call began, or more.
    """

    def __init__(self, groups: tuple[GroupSize, ...], num_sectors: int, num_held: Callable[[], Sectors]) -> None:
        self._groups, self._num_sectors, self._num_held = groups, num_sectors, num_held
        self._grants: dict[str, Blocks] = {}
        self._waiting: deque[tuple[str, Blocks, asyncio.Future[None]]] = deque()

    @property
    def capacity(self) -> Blocks:
        """Blocks that each group could have if it had the pool alone."""
        return tuple(self._num_sectors * group.blocks_per_sector for group in self._groups)

    async def acquire(self, request_id: str, blocks: Blocks) -> None:
        """Wait until there is room. The caller has made sure that the request fits an empty cache."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request_id, blocks, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            self.give_back(request_id)
            raise

    def give_back(self, request_id: str) -> None:
        """End a grant, or the waiting for one; unknown ids are fine."""
        self._grants.pop(request_id, None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
        self._grant()

    def refuse(self, request_id: str, error: Exception) -> None:
        """End the waiting of one request with an error."""
        for waiting_id, _, turn in tuple(self._waiting):
            if waiting_id == request_id and not turn.done():
                turn.set_exception(error)
        self.give_back(request_id)

    @property
    def granted(self) -> Blocks:
        """Blocks granted to all requests, per group."""
        return tuple(sum(grant[i] for grant in self._grants.values()) for i in range(len(self._groups)))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _grant(self) -> None:
        while self._waiting:
            request_id, blocks, turn = self._waiting[0]
            if not self._has_room(blocks):
                return
            self._waiting.popleft()
            if not turn.done():
                self._grants[request_id] = blocks
                turn.set_result(None)

    def _has_room(self, blocks: Blocks) -> bool:
        granted = self.granted
        filled = _sectors(self._groups, tuple(map(add, granted, blocks)))
        if sum(filled) > self._num_sectors:
            return False
        # A sector that is held has a granted block. What is being freed is counted as held a little longer: without
        # this the last request to end would leave the next one waiting for an end that does not come.
        held = map(min, self._num_held(), granted)
        return sum(map(max, filled, held)) <= self._num_sectors


def blocks_for(groups: tuple[GroupSize, ...], num_tokens: int) -> Blocks:
    """Blocks that a sequence of `num_tokens` tokens fills in each group."""
    kept = (min(num_tokens, group.ring_tokens or num_tokens) for group in groups)
    return tuple(-(-tokens // group.block_tokens) for tokens, group in zip(kept, groups, strict=True))


def longest(groups: tuple[GroupSize, ...], num_sectors: int, at_most: int) -> int:
    """The longest sequence, up to `at_most` tokens, that fits a pool of so many sectors."""

    def is_too_long(num_tokens: int) -> bool:
        return sum(_sectors(groups, blocks_for(groups, num_tokens))) > num_sectors

    return bisect_left(range(1, at_most + 1), True, key=is_too_long)


def _sectors(groups: tuple[GroupSize, ...], blocks: Blocks) -> Sectors:
    """Sectors that so many blocks of each group fill."""
    return tuple(-(-count // group.blocks_per_sector) for count, group in zip(blocks, groups, strict=True))
