"""What ends a server besides a signal."""

import asyncio
import os
import signal

import pytest
from starlette.applications import Starlette

from kvferry.cli.server import http, listening

DEADLINE_S = 30.0


async def test_a_server_ends_when_what_it_depends_on_has_ended():
    """So a process whose transfer agent has died does not stay up unable to do its job."""
    ended = asyncio.Event()
    with listening.listen("127.0.0.1", 0) as bound:
        running = asyncio.create_task(http.run(Starlette(), bound, [ended.wait()], 1, http.Drain(0.0, list)))
        _, writer = await asyncio.open_connection(*bound.getsockname())
        writer.close()
        await writer.wait_closed()
        assert not running.done()
        ended.set()
        await asyncio.wait_for(running, DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_comes_as_soon_as_a_server_says_it_is_ready_ends_it_well(number):
    def announce() -> None:
        os.kill(os.getpid(), number)

    with listening.listen("127.0.0.1", 0) as bound:
        running = http.run(Starlette(), bound, [], 1, http.Drain(1.0, list, notice_s=0.0), announce)
        await asyncio.wait_for(running, DEADLINE_S)
