"""Work for a client that may leave: before it, amid it, and a moment before its end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvferry.router.flow.client import Client


async def ignore(message) -> None:
    """What is sent is not looked at."""


@contextlib.asynccontextmanager
async def connected():
    """A client, and the event that makes it leave."""
    leave = asyncio.Event()

    async def receive():
        await leave.wait()
        return {"type": "http.disconnect"}

    yield Client(receive, ignore), leave
    leave.set()
    await asyncio.sleep(0)


async def left(client, leave) -> None:
    leave.set()
    while not client.has_left:
        await asyncio.sleep(0)


async def test_nothing_is_begun_for_a_client_that_has_left():
    async with connected() as (client, leave):
        begun = []

        async def work():
            begun.append(True)

        await left(client, leave)
        assert await client.unless_left(work, 0.0) is None
        assert begun == []


@pytest.mark.parametrize(("grace_s", "outcome"), [(0.0, None), (60.0, "done")])
async def test_work_goes_on_for_a_moment_without_its_client(grace_s, outcome):
    async with connected() as (client, leave):

        async def work():
            await left(client, leave)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return "done"

        assert await client.unless_left(work, grace_s) == outcome


async def test_a_time_limit_of_the_work_is_not_the_client_leaving():
    async with connected() as (client, _leave):

        async def work():
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            await client.unless_left(work, 0.0)
