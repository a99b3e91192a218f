"""Admission as a law: never more than there is, strictly in order, nothing left at the end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.jobs import GroupSize
from kvferry.embedded.engine.admission import Admission, blocks_for, longest, quotas

GROUP = st.builds(
    GroupSize,
    block_tokens=st.integers(4, 64),
    blocks_per_sector=st.integers(1, 12),
    ring_tokens=st.sampled_from([0, 0, 5, 64, 500]),
)
GROUPS = st.lists(GROUP, min_size=1, max_size=3).map(tuple)


@given(groups=GROUPS, num_sectors=st.integers(1, 400), max_tokens=st.integers(1, 10_000))
def test_quotas_are_whole_sectors_and_all_of_the_pool(
    groups: tuple[GroupSize, ...], num_sectors: int, max_tokens: int
) -> None:
    shares = quotas(groups, num_sectors, max_tokens)
    sectors = [share / group.blocks_per_sector for share, group in zip(shares, groups, strict=True)]
    assert sum(sectors) == num_sectors
    assert all(share == int(share) >= 0 for share in sectors)


@given(groups=GROUPS, num_sectors=st.integers(1, 400), max_tokens=st.integers(1, 10_000))
def test_quotas_cost_the_longest_sequence_nothing(
    groups: tuple[GroupSize, ...], num_sectors: int, max_tokens: int
) -> None:
    """With its shares apart the pool holds as long a sequence as with its sectors in common."""
    longest_apart = longest(groups, quotas(groups, num_sectors, max_tokens), max_tokens)

    def sectors(num_tokens: int) -> int:
        blocks = blocks_for(groups, num_tokens)
        return sum(-(-count // group.blocks_per_sector) for count, group in zip(blocks, groups, strict=True))

    assert sectors(longest_apart) <= num_sectors
    assert longest_apart == max_tokens or sectors(longest_apart + 1) > num_sectors


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30),
    ended=st.permutations(list(range(30))),
)
def test_grants_keep_to_the_capacity_and_to_the_order(sizes: list[tuple[int, int]], ended: list[int]) -> None:
    async def run() -> None:
        admission, granted = Admission((5, 9)), []

        async def ask(i: int) -> None:
            await admission.acquire(str(i), sizes[i])
            granted.append(i)

        tasks = [asyncio.create_task(ask(i)) for i in range(len(sizes))]
        for i in [i for i in ended if i < len(sizes)] * 2:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert all(used <= room for used, room in zip(admission.granted, (5, 9), strict=True))
            if tasks[i].done():
                admission.give_back(str(i))
        for i in range(len(sizes)):
            await tasks[i]
            admission.give_back(str(i))
        assert granted == sorted(granted)
        assert admission.granted == (0, 0)
        assert admission.num_waiting == 0

    asyncio.run(run())


async def test_who_leaves_the_line_lets_the_next_one_in() -> None:
    admission = Admission((4,))
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
    admission = Admission((4,))
    await admission.acquire("first", (4,))
    second = asyncio.create_task(admission.acquire("second", (4,)))
    await asyncio.sleep(0)
    admission.give_back("first")
    assert admission.granted == (4,)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert admission.granted == (0,)
