"""What signals mean to a server. They are sent to this very process, whose handlers are those of the server."""

import asyncio
import contextlib
import json
import os
import signal

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from kvferry.cli.server import http, listening
from kvferry.cli.server.open_requests import OpenRequests

DEADLINE_S = 30.0


class Server:
    """A running server with one request that ends when the test lets it."""

    def __init__(self, bound, limit_s, notice_s=0.0):
        self.url = listening.url_of(bound)
        self.told, self.arrived, self.may_answer, self.idle = (asyncio.Event() for _ in range(4))
        streams = (Route(path, self.stream) for path in ("/stream", "/v1/messages"))
        app = Starlette(routes=[Route("/", self.answer), *streams])
        drain = http.Drain(limit_s, self.told.set, self.idle.wait, notice_s)
        self.running = asyncio.create_task(http.run(app, bound, [], 1, drain))

    async def answer(self, request):
        self.arrived.set()
        await self.may_answer.wait()
        return PlainTextResponse("done")

    async def stream(self, request):
        async def pieces():
            yield b'data: {"n": 1}\n\n'
            self.arrived.set()
            await self.may_answer.wait()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def ended(self):
        await asyncio.wait_for(self.running, DEADLINE_S)


@contextlib.asynccontextmanager
async def open_request(limit_s=DEADLINE_S, path=""):
    with listening.listen("127.0.0.1", 0) as bound:
        server = Server(bound, limit_s)
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.get(server.url + path))
            await asyncio.wait_for(server.arrived.wait(), DEADLINE_S)
            yield server, asking


def terminate(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


FOREVER_S = 1e6


async def test_a_server_that_nobody_asks_needs_no_time_to_be_noticed(capsys):
    with listening.listen("127.0.0.1", 0) as bound:
        server = Server(bound, FOREVER_S, notice_s=FOREVER_S)
        server.idle.set()
        # By then the server has made the signals its own.
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        terminate()
        await server.ended()
        writer.close()
        assert await reader.read() == b""
    assert "to notice" not in capsys.readouterr().err


async def test_who_has_asked_lately_gets_time_to_notice(capsys):
    with listening.listen("127.0.0.1", 0) as bound:
        server = Server(bound, FOREVER_S, notice_s=FOREVER_S)
        server.may_answer.set()
        server.idle.set()
        async with aiohttp.ClientSession() as session, session.get(server.url) as answer:
            assert answer.status == 200
        terminate()
        await asyncio.wait_for(server.told.wait(), DEADLINE_S)
        terminate()
        await server.ended()
    assert "1e+06 s for routers to notice, then for open requests" in capsys.readouterr().err


async def test_sigterm_lets_what_is_open_end():
    async with open_request() as (server, asking):
        terminate()
        await asyncio.wait_for(server.told.wait(), DEADLINE_S)
        assert not server.running.done()
        server.may_answer.set()
        assert (await asking).status == 200
        assert not server.running.done()
        server.idle.set()
        await server.ended()


async def test_a_request_that_comes_during_it_is_answered_too():
    async with open_request() as (server, asking):
        terminate()
        await asyncio.wait_for(server.told.wait(), DEADLINE_S)
        server.idle.set()
        async with aiohttp.ClientSession() as session:
            late = asyncio.create_task(session.get(server.url))
            server.may_answer.set()
            assert [(await each).status for each in (asking, late)] == [200, 200]
        await server.ended()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(second, capsys):
    async with open_request() as (server, asking):
        server.idle.set()
        terminate()
        await asyncio.wait_for(server.told.wait(), DEADLINE_S)
        terminate(second)
        await server.ended()
        assert (await asking).status == 503
    assert "nothing is open" not in capsys.readouterr().err.replace("when nothing is open", "")


async def test_an_interrupt_does_not_drain():
    async with open_request() as (server, asking):
        terminate(signal.SIGINT)
        await server.ended()
        assert (await asking).status == 503


async def test_a_stream_that_is_broken_off_says_so(caplog):
    async with open_request(path="/stream") as (server, asking):
        terminate(signal.SIGINT)
        await server.ended()
        answer = await asking
        assert answer.status == 200
        piece, last, rest = (await answer.text()).split("\n\n")
        assert (piece, rest) == ('data: {"n": 1}', "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_ended"
    assert not caplog.records


async def test_a_stream_of_messages_that_is_broken_off_says_so_to_anthropics_clients():
    async with open_request(path="/v1/messages") as (server, asking):
        terminate(signal.SIGINT)
        await server.ended()
        _, last, _ = (await (await asking).text()).split("\n\n")
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["type"] == "error"


@pytest.mark.parametrize(
    ("pieces", "is_told"),
    [
        ([], True),
        ([b'data: {"n"'], False),
        ([b'data: {"n"', b": 1}\n\n"], True),
        ([b'data: {"n": 1}\n', b"\n"], True),
        ([b'data: {"n": 1}\r\n', b"\r\n"], True),
        ([b"data: {}\n\ndata"], False),
    ],
)
async def test_what_is_cut_in_the_middle_of_an_event_gets_no_other(pieces, is_told):
    async def stream(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.Event().wait()

    sent = []

    async def send(message):
        sent.append(message)

    requests = OpenRequests(stream)
    asking = asyncio.create_task(requests({"type": "http", "path": "/v1/completions"}, None, send))
    while len(sent) < 1 + len(pieces):
        await asyncio.sleep(0)
    requests.break_off()
    await asking
    told = [json.loads(one["body"].removeprefix(b"data: ")) for one in sent[1 + len(pieces) :]]
    assert [one["error"]["code"] for one in told] == ["server_ended"] * is_told
    assert (requests.num_open, requests.none_open.is_set()) == (0, True)


@pytest.mark.parametrize("limit_s", [0.0, 0.1])
async def test_draining_takes_no_longer_than_its_time(limit_s):
    async with open_request(limit_s) as (server, asking):
        terminate()
        await server.ended()
        assert server.told.is_set()
        assert (await asking).status == 503
