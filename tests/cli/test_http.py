"""What ends a server besides a signal."""

import asyncio
import socket

import pytest
from starlette.applications import Starlette

from kvferry.cli import http
from kvferry.errors import ConfigurationError

DEADLINE_S = 30.0


def test_a_server_ends_when_what_it_depends_on_has_ended():
    """So a process whose transfer agent has died does not stay up unable to do its job."""

    async def serve():
        ended = asyncio.Event()
        with http.listen("127.0.0.1", 0) as bound:
            running = asyncio.create_task(http.run(Starlette(), bound, [ended.wait()], 1, http.Drain(0.0, list)))
            _, writer = await asyncio.open_connection(*bound.getsockname())
            writer.close()
            await writer.wait_closed()
            assert not running.done()
            ended.set()
            await asyncio.wait_for(running, DEADLINE_S)

    asyncio.run(serve())


def test_a_taken_port_and_a_foreign_address_have_hints_of_their_own():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match="choose another --port"),
    ):
        http.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1 always works"):
        http.listen("192.0.2.1", 0)


def test_a_held_port_is_nobody_elses_and_can_be_listened_on():
    with http.hold("127.0.0.1", 0) as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with http.listen("127.0.0.1", port) as bound:
            assert bound.getsockname() == held.getsockname()
            with pytest.raises(ConfigurationError, match="choose another --port"):
                http.hold("127.0.0.1", port)
