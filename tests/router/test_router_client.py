"""Work for a client that may leave: before it, amid it, and a moment before its end."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.router.flow.client import Client


async def ignore(message) -> None:
    """What is sent is not looked at."""


def with_client(main):
    """Run `main(client, leave)`; the client leaves once the event is set."""

    async def whole():
        leave = asyncio.Event()

        async def receive():
            await leave.wait()
            return {"type": "http.disconnect"}

        await main(Client(receive, ignore), leave)
        leave.set()
        await asyncio.sleep(0)

    asyncio.run(whole())


async def left(client, leave) -> None:
    leave.set()
    while not client.has_left:
        await asyncio.sleep(0)


def test_nothing_is_begun_for_a_client_that_has_left():
    async def main(client, leave):
        begun = []

        async def work():
            begun.append(True)

        await left(client, leave)
        assert await client.unless_left(work, 0.0) is None
        assert begun == []

    with_client(main)


@pytest.mark.parametrize(("grace_s", "outcome"), [(0.0, None), (60.0, "done")])
def test_work_goes_on_for_a_moment_without_its_client(grace_s, outcome):
    async def main(client, leave):
        async def work():
            await left(client, leave)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return "done"

        assert await client.unless_left(work, grace_s) == outcome

    with_client(main)


def test_a_time_limit_of_the_work_is_not_the_client_leaving():
    async def main(client, leave):
        async def work():
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            await client.unless_left(work, 0.0)

    with_client(main)
