"""Connections of `kvferry bench` that nobody uses are closed before a server closes them."""

import asyncio
import contextlib

import pytest

from kvferry.bench.accuracy.client import Server
from kvferry.bench.load import target
from kvferry.bench.load.generator import run_load
from kvferry.bench.load.target import Target
from kvferry.bench.load.workload import Lengths, Synthetic, synthetic

# Less than aiohttp's own limit for idle connections.
DEADLINE_S = 10.0
BODY = b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'


async def send_load(url):
    one = Lengths(1, 1)
    await run_load(Target(url, "m"), synthetic(Synthetic(2, one, one), (0.0, 0.0)), 0, 60.0, lambda record: None)


async def ask_for_answers(url):
    await Server(url, "m", at_once=2).answers(("a", "b"), 1, lambda: None)


@pytest.mark.parametrize("ask", [send_load, ask_for_answers])
def test_an_idle_connection_is_closed_while_others_are_used(ask, monkeypatch):
    monkeypatch.setattr(target, "KEEP_ALIVE_S", 0.01)
    closed, writers, is_in_time = asyncio.Event(), [], []

    async def serve(reader, writer):
        with contextlib.closing(writer):
            await reader.readuntil(b"}")
            writers.append(writer)
            # The second answer comes when the client has closed the connection of the first.
            if writer is not writers[0]:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closed.wait(), DEADLINE_S)
                is_in_time.append(closed.is_set())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
            if writer is writers[0]:
                await reader.read()
                closed.set()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await ask("http://{}:{}".format(*server.sockets[0].getsockname()))
        assert is_in_time == [True]

    asyncio.run(main())
