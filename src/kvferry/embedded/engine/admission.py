"""Admission control: a request gets cache blocks for its whole length before it enters the engine.

The engine's thread ends when blocks that it does not schedule fill its pool and nothing can run. Held and reserved
blocks are such blocks, so a request is admitted only if it can run to its last token.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.connectors.jobs import GroupSize

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """The use of the cache at one time, in blocks per cache group.

    `granted` is what the admitted requests may use at most, `allocated` what is in block tables now. `num_waiting`
    requests wait for room; the blocks of `num_leased` requests are, or will be, in the hands of a transfer.
    """

    capacity: Blocks
    granted: Blocks
    allocated: Blocks
    num_waiting: int
    num_leased: int


class Admission:
    """Grants blocks of every group at once, strictly in the order of asking. For one event loop."""

    def __init__(self, capacity: Blocks) -> None:
        self.capacity = capacity
        self._grants: dict[str, Blocks] = {}
        self._waiting: deque[tuple[str, Blocks, asyncio.Future[None]]] = deque()

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
        return tuple(sum(grant[i] for grant in self._grants.values()) for i in range(len(self.capacity)))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _grant(self) -> None:
        while self._waiting:
            request_id, blocks, turn = self._waiting[0]
            room = zip(self.capacity, self.granted, blocks, strict=True)
            if any(granted + wanted > capacity for capacity, granted, wanted in room):
                return
            self._waiting.popleft()
            if not turn.done():
                self._grants[request_id] = blocks
                turn.set_result(None)


def blocks_for(groups: tuple[GroupSize, ...], num_tokens: int) -> Blocks:
    """Blocks that a sequence of `num_tokens` tokens fills in each group."""
    kept = (min(num_tokens, group.ring_tokens or num_tokens) for group in groups)
    return tuple(-(-tokens // group.block_tokens) for tokens, group in zip(kept, groups, strict=True))


def longest(groups: tuple[GroupSize, ...], capacity: Blocks, at_most: int) -> int:
    """The longest sequence, up to `at_most` tokens, that fits the capacity of every group."""

    def fits(num_tokens: int) -> bool:
        wanted = blocks_for(groups, num_tokens)
        return all(blocks <= room for blocks, room in zip(wanted, capacity, strict=True))

    return _most(fits, at_most)


def quotas(groups: tuple[GroupSize, ...], num_sectors: int, max_tokens: int) -> Blocks:
    """A fixed share of the pool for each group, in blocks.

    The groups draw sectors from one pool and cut them into blocks of their own sizes; a sector that holds one block
    is lost to the others. With a share per group, rounded to whole sectors, that cannot starve anyone: a group never
    holds more sectors than its share has. The shares are those of the longest sequence that the pool can hold.
    """
    most = _most(lambda num_tokens: sum(_sectors(groups, num_tokens)) <= num_sectors, max_tokens)
    wanted = _sectors(groups, most)
    spare = num_sectors - sum(wanted)
    shares = [sectors + spare * sectors // max(1, sum(wanted)) for sectors in wanted]
    shares[shares.index(max(shares))] += num_sectors - sum(shares)
    return tuple(share * group.blocks_per_sector for share, group in zip(shares, groups, strict=True))


def _sectors(groups: tuple[GroupSize, ...], num_tokens: int) -> list[int]:
    blocks = blocks_for(groups, num_tokens)
    return [-(-count // group.blocks_per_sector) for count, group in zip(blocks, groups, strict=True)]


def _most(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest number up to `at_most` that fits, as all below it do."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))
