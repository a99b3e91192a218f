"""Admission as a law: never more than there is, strictly in order, nothing left at the end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool

from kvferry.connectors.jobs import GroupSize
from kvferry.embedded.engine.admission import Admission, Blocks, blocks_for, longest

GROUP = st.builds(
    GroupSize,
    block_tokens=st.integers(4, 64),
    blocks_per_sector=st.integers(1, 12),
    ring_tokens=st.sampled_from([0, 0, 5, 64, 500]),
)
GROUPS = st.lists(GROUP, min_size=1, max_size=3).map(tuple)


class Pool:
    """Upstream's pool, used as its allocators use it: a group draws a sector only when its free blocks do not do."""

    def __init__(self, groups: tuple[GroupSize, ...], num_sectors: int) -> None:
        self.pool = CachePool(num_sectors, len(groups))
        for i, group in enumerate(groups):
            self.pool.set_blocks_per_sector(i, group.blocks_per_sector)
        self.tables: dict[str, list[list[int]]] = {}

    def allocate(self, request_id: str, blocks: Blocks) -> None:
        """Upstream's `free_sectors.pop()` fails where there are none."""
        self.pool.try_to_free_sectors()
        tables = self.tables.setdefault(request_id, [[] for _ in blocks])
        for i, (count, table) in enumerate(zip(blocks, tables, strict=True)):
            while self.pool.count_free_blocks(i) < count - len(table):
                self.pool.allocate_sector(i)
            table += self.pool.get_free_blocks(i, count - len(table))

    def free(self, request_id: str) -> None:
        for i, table in enumerate(self.tables.pop(request_id, [])):
            self.pool.free_blocks(i, table)

    def num_held(self) -> Blocks:
        sizes = self.pool.blocks_per_sector
        return tuple(len({b // n for t in self.tables.values() for b in t[i]}) for i, n in enumerate(sizes))


@given(groups=GROUPS, num_sectors=st.integers(2, 60), data=st.data())
def test_who_is_admitted_gets_every_block_whoever_ends_when(
    groups: tuple[GroupSize, ...], num_sectors: int, data: st.DataObject
) -> None:
    """Requests grow block by block and end in any order, which leaves sectors with single blocks in them."""
    pool = Pool(groups, num_sectors)
    admission = Admission(groups, num_sectors, pool.num_held)
    most = longest(groups, num_sectors, 2_000)
    sizes = data.draw(st.lists(st.integers(1, most), max_size=25)) if most else []

    async def run() -> None:
        running: list[str] = []

        async def enter(i: int) -> None:
            await admission.acquire(str(i), blocks_for(groups, sizes[i]))
            running.append(str(i))

        tasks = [asyncio.create_task(enter(i)) for i in range(len(sizes))]
        for _ in sizes:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for part in (2, 1):
                for request_id in running:
                    pool.allocate(request_id, blocks_for(groups, -(-sizes[int(request_id)] // part)))
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pool.free(ended)
            admission.give_back(ended)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert not any(admission.granted)


@given(groups=GROUPS, num_sectors=st.integers(1, 400), max_tokens=st.integers(1, 10_000))
def test_the_longest_sequence_is_one_that_an_empty_pool_holds(
    groups: tuple[GroupSize, ...], num_sectors: int, max_tokens: int
) -> None:
    def sectors(num_tokens: int) -> int:
        blocks = blocks_for(groups, num_tokens)
        return sum(-(-count // group.blocks_per_sector) for count, group in zip(blocks, groups, strict=True))

    most = longest(groups, num_sectors, max_tokens)
    assert sectors(most) <= num_sectors
    assert most == max_tokens or sectors(most + 1) > num_sectors


async def test_short_requests_fill_the_pool_and_so_does_the_longest_one() -> None:
    """The shapes of a Gemma 3 with 18 layers and the cache that `kvferry serve` gives it."""
    groups = (GroupSize(16, 1, 512), GroupSize(16, 5, 0))
    pool = Pool(groups, 1229)
    admission = Admission(groups, 1229, pool.num_held)
    for i in range(30):
        await asyncio.wait_for(admission.acquire(str(i), blocks_for(groups, 620)), 10)
    late = asyncio.create_task(admission.acquire("late", blocks_for(groups, longest(groups, 1229, 131_072))))
    for i in range(30):
        await asyncio.sleep(0)
        assert not late.done()
        admission.give_back(str(i))
    await asyncio.wait_for(late, 10)


async def test_sectors_in_which_one_block_is_left_are_lost_to_other_groups() -> None:
    """The two blocks that are left would fill one sector of four, but lie in two: three more are not there."""
    groups = (GroupSize(4, 1, 12), GroupSize(4, 5, 0))
    pool = Pool(groups, 4)
    admission = Admission(groups, 4, pool.num_held)
    for i in range(10):
        await admission.acquire(str(i), (0, 1))
        pool.allocate(str(i), (0, 1))
    by_sector = {pool.tables[str(i)][1][0] // 5: str(i) for i in range(10)}
    for request_id in {str(i) for i in range(10)} - set(by_sector.values()):
        pool.free(request_id)
        admission.give_back(request_id)
    late = asyncio.create_task(admission.acquire("late", (3, 0)))
    await asyncio.sleep(0)
    assert (admission.granted, pool.num_held(), late.done()) == ((0, 2), (0, 2), False)
    left, _ = by_sector.values()
    pool.free(left)
    admission.give_back(left)
    await late
    pool.allocate("late", (3, 0))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=30),
    ended=st.permutations(list(range(30))),
)
def test_grants_keep_to_the_capacity_and_to_the_order(sizes: list[tuple[int, int]], ended: list[int]) -> None:
    async def run() -> None:
        groups = (GroupSize(16, 1, 0), GroupSize(16, 2, 0))
        admission, granted = Admission(groups, 9, lambda: (0, 0)), []

        async def ask(i: int) -> None:
            await admission.acquire(str(i), sizes[i])
            granted.append(i)

        tasks = [asyncio.create_task(ask(i)) for i in range(len(sizes))]
        for i in [i for i in ended if i < len(sizes)] * 2:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert admission.granted[0] + -(-admission.granted[1] // 2) <= 9
            if tasks[i].done():
                admission.give_back(str(i))
        for i in range(len(sizes)):
            await tasks[i]
            admission.give_back(str(i))
        assert granted == sorted(granted)
        assert admission.granted == (0, 0)
        assert admission.num_waiting == 0

    asyncio.run(run())


def one_group() -> Admission:
    """A pool of four blocks."""
    return Admission((GroupSize(16, 1, 0),), 4, lambda: (0,))


async def test_who_leaves_the_line_lets_the_next_one_in() -> None:
    admission = one_group()
    await admission.acquire("first", (3,))
    large = asyncio.create_task(admission.acquire("large", (4,)))
    small = asyncio.create_task(admission.acquire("small", (1,)))
    await asyncio.sleep(0)
    assert admission.num_waiting == 2
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await small
    assert admission.granted == (4,)


async def test_a_grant_that_nobody_waits_for_any_more_is_given_back() -> None:
    """The turn comes and the task is cancelled before it runs again."""
    admission = one_group()
    await admission.acquire("first", (4,))
    second = asyncio.create_task(admission.acquire("second", (4,)))
    await asyncio.sleep(0)
    admission.give_back("first")
    assert admission.granted == (4,)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert admission.granted == (0,)
