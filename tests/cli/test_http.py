"""What ends a server besides a signal."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

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


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_on_which_no_whole_head_comes_is_closed(sent, is_first, monkeypatch):
    monkeypatch.setattr(http, "IDLE_S", 0.1)
    end = asyncio.Event()
    with listening.listen("127.0.0.1", 0) as bound:
        running = asyncio.create_task(http.run(Starlette(), bound, [end.wait()], 1, http.Drain(0.0, list)))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        # A slow machine may come too late for the second part, and finds the connection closed.
        with contextlib.suppress(ConnectionError):
            if not is_first:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readline()
            writer.write(sent)
            await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        end.set()
        await asyncio.wait_for(running, DEADLINE_S)


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "begun",
    [HEAD, HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", HEAD + b"content-length: 0\r\n\r\n" + HEAD],
    ids=["head", "trailer", "second head"],
)
@pytest.mark.parametrize("is_one", [True, False], ids=["one header", "many headers"])
async def test_a_connection_on_which_a_head_or_a_trailer_does_not_end_is_closed(begun, is_one):
    end = asyncio.Event()
    with listening.listen("127.0.0.1", 0) as bound:
        running = asyncio.create_task(http.run(Starlette(), bound, [end.wait()], 1, http.Drain(0.0, list)))
        _, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(begun + b"a: ")
        part = (b"b" if is_one else b"b\r\na: ") * 4096
        with contextlib.suppress(ConnectionError):
            for _ in range(4096):
                writer.write(part)
                await asyncio.wait_for(writer.drain(), DEADLINE_S)
        assert writer.is_closing()
        end.set()
        await asyncio.wait_for(running, DEADLINE_S)


@pytest.mark.parametrize("size", [1, http.MAX_HEAD_BYTES - 100, 3 * http.MAX_HEAD_BYTES])
async def test_a_body_may_be_longer_than_a_head(size):
    """Also where it comes together with the head, and with the next."""
    end = asyncio.Event()
    with listening.listen("127.0.0.1", 0) as bound:
        running = asyncio.create_task(http.run(Starlette(), bound, [end.wait()], 1, http.Drain(0.0, list)))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        for _ in range(3):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + b"b" * size)
        writer.write(HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        answers = await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert answers.count(b"HTTP/1.1 404") == 4
        writer.close()
        end.set()
        await asyncio.wait_for(running, DEADLINE_S)


async def test_where_a_request_comes_from_is_what_the_socket_says(monkeypatch):
    """A registration without a token counts by that."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    seen, end = [], asyncio.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            seen.append(scope["client"][0])
            await PlainTextResponse("")(scope, receive, send)

    with listening.listen("127.0.0.1", 0) as bound:
        running = asyncio.create_task(http.run(app, bound, [end.wait()], 1, http.Drain(0.0, list)))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(HEAD + b"x-forwarded-for: 10.0.0.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        end.set()
        await asyncio.wait_for(running, DEADLINE_S)
    assert seen == ["127.0.0.1"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("name", [os.devnull, __file__, None])
def test_a_standard_input_that_nobody_holds_has_ended(name, new_loop, monkeypatch):
    async def main() -> None:
        with listening.listen("127.0.0.1", 0) as bound:
            running = http.run(Starlette(), bound, [http.stdin_closed()], 1, http.Drain(0.0, list))
            await asyncio.wait_for(running, DEADLINE_S)

    with open(name or os.devnull) as file, asyncio.Runner(loop_factory=new_loop) as runner:
        monkeypatch.setattr(sys, "stdin", file if name else None)
        runner.run(main())


class Transport(asyncio.Transport):
    """A connection to nobody."""


async def test_only_the_last_byte_of_a_head_ends_the_wait_for_it():
    answering = asyncio.Event()

    async def app(scope, receive, send):
        await answering.wait()

    protocol = http._Protocol(uvicorn.Config(app, lifespan="off", ws="none"), ServerState(), {})
    protocol.connection_made(Transport())
    timer = protocol.timeout_keep_alive_task
    for part in (b"GET / HTTP/1.1\r\n", b"host: x\r\n\r"):
        protocol.data_received(part)
        assert protocol.timeout_keep_alive_task is timer
        assert not timer.cancelled()
    protocol.data_received(b"\n")
    assert timer.cancelled()
    assert protocol.timeout_keep_alive_task is None
    (task,) = protocol.tasks
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
