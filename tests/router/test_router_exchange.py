"""The router's HTTP client on real sockets, on both event loops: connections that are kept, lost, refused, held up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

import pytest
import uvloop

from kvferry.router.upstream import connection_pool as pool_module
from kvferry.router.upstream.connection import HIGH_WATER_BYTES, Connection
from kvferry.router.upstream.connection_pool import Pool, origin_of
from kvferry.router.upstream.exchange import DEADLINE, FAILURES, Exchange, Outgoing, reason_of

DEADLINE_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
OPEN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@dataclass
class Server:
    """Answers each request with the next of `answers`; a `None` cuts the connection. Remembers what it was asked."""

    answers: list[bytes | None]
    url: str = ""
    asked: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    num_connections: int = 0
    ended: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.asked.append((number, head, await reader.readexactly(length)))
                answer = self.answers.pop(0)
                if answer is None:
                    writer.transport.abort()
                    break
                writer.write(answer)
        writer.close()
        self.ended.release()


def run(main, loop, *answers, connect_timeout_s=DEADLINE_S):
    """Run `main(server, pool)` on an event loop."""

    async def whole():
        server = Server(list(answers))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(Pool(connect_timeout_s)) as pool:
            await main(server, pool)
        listening.close()
        # Whatever is still open then ends with the loop.
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


def post(server, target="/x", headers=(), body=b"{}") -> Outgoing:
    return Outgoing("POST", server.url, target, list(headers), body)


async def told(pool, outgoing) -> bytes:
    exchange = await Exchange.open(pool, outgoing)
    try:
        return await exchange.whole(1 << 26)
    finally:
        exchange.close()


async def failure(pool, outgoing) -> str:
    try:
        await told(pool, outgoing)
    except FAILURES as error:
        return reason_of(error, DEADLINE)
    return ""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_is_what_was_to_be_sent(loop):
    async def main(server, pool):
        base = Outgoing("POST", server.url + "/behind", "/v1/x?a=%C3%A4", [(b"x-name", b"caf\xe9")], b'{"a": 1}')
        assert await told(pool, base) == b"ok"
        _, head, body = server.asked[0]
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /behind/v1/x?a=%C3%A4 HTTP/1.1"
        host = server.url.removeprefix("http://").encode()
        assert lines[1:-2] == [b"host: " + host, b"x-name: caf\xe9", b"content-length: 8"]
        assert body == b'{"a": 1}'

    run(main, loop, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_request_and_a_large_answer_arrive(loop):
    large = bytes(range(256)) * 20_000

    async def main(server, pool):
        assert await told(pool, post(server, body=large)) == large[::-1]
        assert server.asked[0][2] == large

    run(main, loop, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large) + large[::-1])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_is_kept_for_the_next_leg_and_not_for_a_probe(loop):
    async def main(server, pool):
        for _ in range(2):
            await told(pool, post(server))
        await told(pool, Outgoing("GET", server.url, "/ready", [], b""))
        assert [number for number, *_ in server.asked] == [1, 1, 2]
        assert b"content-length" not in server.asked[2][1]

    run(main, loop, OK, OK, OK)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("answer", [OK + b"more", OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n", 1)])
def test_a_connection_that_cannot_go_on_is_closed(loop, answer):
    async def main(server, pool):
        for _ in range(2):
            assert await told(pool, post(server)) == b"ok"
        assert [number for number, *_ in server.asked] == [1, 2]
        await server.ended.acquire()

    run(main, loop, answer, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_idle_connection_that_the_server_ends_is_not_used(loop):
    async def main(server, pool):
        exchange = await Exchange.open(pool, post(server))
        connection = exchange._connection
        assert await exchange.whole(10) == b"ok"
        connection.data_received(b"nobody asked for this")
        assert not connection.is_open
        assert await told(pool, post(server)) == b"ok"
        assert [number for number, *_ in server.asked] == [1, 2]

    run(main, loop, OK, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_idle_connections_are_closed_in_time(loop, monkeypatch):
    monkeypatch.setattr(pool_module, "KEPT_S", 0.01)

    async def main(server, pool):
        assert await told(pool, post(server)) == b"ok"
        await server.ended.acquire()

    run(main, loop, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_failures_have_names(loop):
    async def main(server, pool):
        assert await failure(pool, post(server)) == "reset"
        assert await failure(pool, post(server)) == "malformed"
        nobody = Outgoing("POST", "http://127.0.0.1:1", "/x", [], b"")
        assert await failure(pool, nobody) == "refused"
        unnamed = Outgoing("POST", "http://" + "a" * 70 + ".invalid:1", "/x", [], b"")
        assert await failure(pool, unnamed) == "refused"

    run(main, loop, None, b"no http at all\r\n\r\n")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_that_does_not_accept_is_too_slow(loop, monkeypatch):
    async def main(server, pool):
        async def never(*_, **__):
            await asyncio.Event().wait()

        monkeypatch.setattr(pool, "_loop", type("Loop", (), {"create_connection": never, "time": pool._loop.time})())
        assert await failure(pool, post(server)) == "connect_timeout"

    run(main, loop, connect_timeout_s=0.01)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_has_arrived_is_read_before_the_end_is_noticed(loop):
    async def main(server, pool):
        exchange = await Exchange.open(pool, post(server))
        exchange._connection.connection_lost(None)
        assert await exchange.piece() == b"ok"
        with pytest.raises(ConnectionResetError):
            await exchange.piece()
        exchange.close()

    run(main, loop, OPEN)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_exchange_that_is_given_up_closes_its_connection(loop):
    async def main(server, pool):
        opening = asyncio.create_task(Exchange.open(pool, post(server)))
        while not server.asked:
            await asyncio.sleep(0)
        opening.cancel()
        await server.ended.acquire()
        (await Exchange.open(pool, post(server))).close()
        await server.ended.acquire()

    run(main, loop, b"", OPEN)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_that_leaves_before_it_is_asked_is_reset(loop, monkeypatch):
    async def main(server, pool):
        connection = await pool.connect(origin_of(server.url))
        connection.close()
        monkeypatch.setattr(pool, "take", lambda origin: asyncio.sleep(0, connection))
        assert await failure(pool, post(server)) == "reset"
        await asyncio.sleep(0)
        assert await failure(pool, post(server)) == "reset"

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_was_held_up_is_kept_and_read_again(loop):
    large = b"z" * (4 * HIGH_WATER_BYTES)

    async def main(server, pool):
        exchange = await Exchange.open(pool, post(server))
        while exchange._reply.num_waiting_bytes <= HIGH_WATER_BYTES:
            await asyncio.sleep(0)
        assert await exchange.whole(1 << 26) == large
        assert await told(pool, post(server)) == b"ok"
        assert [number for number, *_ in server.asked] == [1, 1]

    run(main, loop, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large) + large, OK)


class Transport(asyncio.Transport):
    """Says what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def is_closing(self) -> bool:
        return "abort" in self.said

    def __getattribute__(self, name: str):
        if name in ("pause_reading", "resume_reading", "abort"):
            return lambda: self.said.append(name)
        return super().__getattribute__(name)

    def writelines(self, parts) -> None:
        self.said.append("write")


def test_an_engine_that_is_faster_than_its_client_waits():
    async def main():
        connection, transport = Connection(), Transport()
        connection.connection_made(transport)
        reply = connection.send(b"head", b"")
        connection.data_received(OPEN + b"%x\r\n" % (4 * HIGH_WATER_BYTES))
        for _ in range(2):
            connection.data_received(b"z" * HIGH_WATER_BYTES)
        assert transport.said == ["write", "pause_reading"]
        assert len(reply.take()) == 2 * HIGH_WATER_BYTES + 2
        waiting = asyncio.create_task(connection.more())
        await asyncio.sleep(0)
        assert transport.said == ["write", "pause_reading", "resume_reading"]
        connection.data_received(b"z")
        await waiting

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a", ("a", 80, False, b"a", "")),
        ("https://a.b/c", ("a.b", 443, True, b"a.b", "/c")),
        ("http://[::1]:81", ("::1", 81, False, b"[::1]:81", "")),
    ],
)
def test_where_an_instance_is(url, expected):
    found = origin_of(url)
    assert (found.host, found.port, found.is_secure, found.host_header, found.prefix) == expected


@pytest.mark.parametrize("loop", LOOPS)
def test_a_leg_that_is_cancelled_as_its_head_comes_leaves_no_connection(loop, monkeypatch):
    received = Connection.data_received

    async def main(server, pool):
        asking = asyncio.create_task(Exchange.open(pool, post(server)))

        def and_cancelled(connection, data):
            received(connection, data)
            asking.cancel()

        monkeypatch.setattr(Connection, "data_received", and_cancelled)
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert asking.cancelled()
        await server.ended.acquire()

    run(main, loop, OPEN)


@pytest.mark.parametrize("way", ["reset", "closed", "ours"])
@pytest.mark.parametrize("loop", LOOPS)
def test_only_an_end_in_order_ends_an_answer_without_a_length(loop, way):
    async def main(server, pool):
        go = asyncio.Event()

        async def half(reader, writer):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            await go.wait()
            if way == "reset":
                at_once = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.close()

        async with await asyncio.start_server(half, "127.0.0.1", 0) as listening:
            server.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
            exchange = await Exchange.open(pool, post(server))
            assert await exchange.piece() == b"half"
            assert not exchange.is_over
            if way == "ours":
                exchange.close()
            else:
                go.set()
            if way == "closed":
                assert await exchange.piece() == b""
                assert exchange.is_over
            else:
                with pytest.raises(ConnectionResetError):
                    await exchange.piece()
                assert not exchange.is_over
            go.set()

    run(main, loop)
