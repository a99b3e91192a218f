"""Requests to engines on real sockets, on both event loops: connections that are kept, lost, refused, held up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field, replace

import pytest
import uvloop

from kvferry.router.upstream import http_client
from kvferry.router.upstream.failures import DEADLINE, FAILURES, reason_of
from kvferry.router.upstream.http_client import MAX_HEADER_BYTES, HttpClient, HttpRequest

DEADLINE_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
OPEN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@dataclass
class Server:
    """Answers each request with the next of `answers`; a `None` cuts the connection. Remembers what it was asked."""

    answers: list[bytes | None]
    url: str = ""
    asked: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    num_connections: int = 0
    ended: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        self.writers.append(writer)
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
    """Run `main(server, http)` on an event loop."""

    async def whole():
        server = Server(list(answers))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        try:
            async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(HttpClient(connect_timeout_s)) as http:
                await main(server, http)
        finally:
            listening.close()
            for writer in server.writers:
                writer.transport.abort()
        # Whatever is still open then ends with the loop.
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


def post(server, target="/x", headers=(), body=b"{}") -> HttpRequest:
    return HttpRequest("POST", server.url, target, list(headers), body)


async def told(http, request) -> bytes:
    response = await http.send(request)
    try:
        return await response.whole(1 << 26)
    finally:
        response.close()


async def failure(http, request) -> str:
    try:
        await told(http, request)
    except FAILURES as error:
        return reason_of(error, DEADLINE)
    return ""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_is_what_was_to_be_sent(loop):
    async def main(server, http):
        base = HttpRequest(
            "POST", server.url + "/behind", "/v1/x?a=%C3%A4", [(b"x-name", "caf\xe9".encode())], b'{"a": 1}'
        )
        assert await told(http, base) == b"ok"
        _, head, body = server.asked[0]
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /behind/v1/x?a=%C3%A4 HTTP/1.1"
        host = server.url.removeprefix("http://").encode()
        sent = [b"host: " + host, "x-name: caf\xe9".encode(), b"content-length: 8"]
        assert sorted(line.lower() for line in lines[1:-2]) == sorted(sent)
        assert body == b'{"a": 1}'

    run(main, loop, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_request_and_a_large_answer_arrive(loop):
    large = bytes(range(256)) * 20_000

    async def main(server, http):
        assert await told(http, post(server, body=large)) == large[::-1]
        assert server.asked[0][2] == large

    run(main, loop, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large) + large[::-1])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_is_kept_for_the_next_request_and_not_for_a_probe(loop):
    async def main(server, http):
        for _ in range(2):
            await told(http, post(server))
        await told(http, HttpRequest("GET", server.url, "/ready", [], b""))
        assert [number for number, *_ in server.asked] == [1, 1, 2]
        assert b"content-length" not in server.asked[2][1].lower()

    run(main, loop, OK, OK, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cookie_of_one_client_is_not_shown_for_another(loop):
    async def main(server, http):
        # Cookies of plain addresses are not kept anyway.
        server.url = server.url.replace("127.0.0.1", "localhost")
        for _ in range(2):
            assert await told(http, post(server)) == b"ok"
        assert b"cookie" not in server.asked[1][1].lower()

    run(main, loop, OK.replace(b"OK\r\n", b"OK\r\nSet-Cookie: a=b; Path=/\r\n"), OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_redirection_is_an_answer(loop):
    async def main(server, http):
        response = await http.send(post(server))
        assert (response.status, await response.whole(100)) == (307, b"")
        response.close()
        assert len(server.asked) == 1

    run(main, loop, b"HTTP/1.1 307 X\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n", OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_response_that_was_closed_while_it_was_read_is_not_kept_in_memory(loop):
    async def main(server, http):
        response = await http.send(post(server))
        assert await response.piece() == b"ok"
        reading = asyncio.create_task(response.piece())
        await asyncio.sleep(0)
        response.close()
        with pytest.raises(ConnectionResetError):
            await reading
        there = weakref.ref(response)
        del response, reading
        # Until the next turn the loop itself has the task.
        await asyncio.sleep(0)
        gc.collect()
        assert there() is None

    run(main, loop, OPEN)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_cannot_go_on_is_closed(loop):
    async def main(server, http):
        for _ in range(2):
            assert await told(http, post(server)) == b"ok"
        assert [number for number, *_ in server.asked] == [1, 2]
        await server.ended.acquire()

    run(main, loop, OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n", 1), OK)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("unasked", [b"nobody asked for this", OK.replace(b"ok", b"no")])
def test_what_comes_on_an_idle_connection_answers_no_later_request(loop, unasked):
    async def main(server, http):
        assert await told(http, post(server)) == b"ok"
        server.writers[0].write(unasked)
        for _ in range(100):
            await asyncio.sleep(0)
        with contextlib.suppress(*FAILURES):
            assert await told(http, post(server)) == b"ok"
        assert await told(http, post(server)) == b"ok"
        assert server.asked[-1][0] > 1

    run(main, loop, OK, OK, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_failures_have_names(loop):
    async def main(server, http):
        assert await failure(http, post(server)) == "reset"
        assert await failure(http, post(server)) == "malformed"
        nobody = HttpRequest("POST", "http://127.0.0.1:1", "/x", [], b"")
        assert await failure(http, nobody) == "refused"
        unnamed = HttpRequest("POST", "http://" + "a" * 70 + ".invalid:1", "/x", [], b"")
        assert await failure(http, unnamed) == "refused"

    run(main, loop, None, b"no http at all\r\n\r\n")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_response_that_is_given_up_closes_its_connection(loop):
    async def main(server, http):
        opening = asyncio.create_task(http.send(post(server)))
        while not server.asked:
            await asyncio.sleep(0)
        opening.cancel()
        await server.ended.acquire()
        (await http.send(post(server))).close()
        await server.ended.acquire()

    run(main, loop, b"", OPEN)


@pytest.mark.parametrize("way", ["reset", "closed", "ours"])
@pytest.mark.parametrize("loop", LOOPS)
def test_only_an_end_in_order_ends_an_answer_without_a_length(loop, way):
    async def main(server, http):
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
            response = await http.send(post(server))
            assert await response.piece() == b"half"
            assert not response.is_over
            if way == "ours":
                response.close()
            else:
                go.set()
            if way == "closed":
                assert await response.piece() == b""
                assert response.is_over
            else:
                with pytest.raises(FAILURES) as caught:
                    await response.piece()
                assert reason_of(caught.value, DEADLINE) == "reset"
                assert not response.is_over
            response.close()
            go.set()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_idle_connections_are_closed_in_time(loop, monkeypatch):
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.01)

    async def main(server, http):
        assert await told(http, post(server)) == b"ok"
        await server.ended.acquire()

    run(main, loop, OK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_that_does_not_accept_is_too_slow(loop):
    async def main(server, http):
        with socket.socket() as full, contextlib.ExitStack() as waiting:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(3):
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(full.getsockname())
            server.url = "http://{}:{}".format(*full.getsockname())
            assert await failure(http, post(server)) == "connect_timeout"

    run(main, loop, connect_timeout_s=0.05)


@pytest.mark.parametrize("loop", LOOPS)
def test_names_for_which_nobody_answers_hold_up_neither_others_nor_the_end(loop, monkeypatch):
    asked, answered, look_up = [], threading.Event(), socket.getaddrinfo

    def getaddrinfo(host, *more, **named):
        if not host.endswith(".test"):
            return look_up(host, *more, **named)
        asked.append(host)
        answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "nobody answers")

    async def main(server, http):
        # More than an event loop has threads for, and each asked for by two.
        names = [f"http://{number}.test" for number in range(50)]
        waiting = [asyncio.create_task(failure(http, HttpRequest("GET", name, "/", [], b""))) for name in names * 2]
        while len(asked) < len(names):
            await asyncio.sleep(0)
        near = replace(post(server), base=server.url.replace("127.0.0.1", "localhost"))
        assert await told(http, near) == b"ok"
        assert await asyncio.to_thread(len, asked) == len(names)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        run(main, loop, OK)
    finally:
        answered.set()


@pytest.mark.parametrize("loop", LOOPS)
def test_who_leaves_a_lookup_does_not_end_it_for_others(loop, monkeypatch):
    answered = threading.Event()

    def getaddrinfo(*_, **__):
        answered.wait()
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async def main(server, http):
        request = HttpRequest("GET", "http://one.test", "/", [], b"")
        first, second = (asyncio.create_task(failure(http, request)) for _ in range(2))
        while not http._names._under_way:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        answered.set()
        assert await second == "refused"
        assert http._names._under_way == {}

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        run(main, loop)
    finally:
        answered.set()


ENDS = """
import asyncio, contextlib, socket, threading
from kvferry.router.upstream.name_lookup import NameLookup

asked = threading.Event()
socket.getaddrinfo = lambda *_, **__: asked.set() or threading.Event().wait()

async def main():
    names = NameLookup()
    lookup = asyncio.create_task(names.resolve("nobody.answers.test"))
    while not asked.is_set():
        await asyncio.sleep(0)
    await names.close()
    with contextlib.suppress(asyncio.CancelledError):
        await lookup

asyncio.run(main())
print("ended")
"""


def test_a_router_does_not_wait_for_lookups_when_it_ends():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr.decode()


@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_that_is_faster_than_its_client_waits(loop):
    large = b"z" * (64 << 20)

    async def main(server, http):
        response = await http.send(post(server))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert server.writers[0].transport.get_write_buffer_size() > len(large) // 2
        assert len(await response.whole(1 << 27)) == len(large)

    run(main, loop, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large) + large)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + OK, b"ok"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Late: 1\r\n\r\n", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (HEAD + b"X-Long: " + b"x" * 20_000 + b"\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        # Nobody asks for another encoding, but nothing is decoded either.
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    ],
)
def test_an_answer_is_what_was_sent(loop, answer, body):
    async def main(server, http):
        response = await http.send(post(server))
        assert await response.whole(100) == body
        assert response.is_over
        assert b"X-Late" not in dict(response.headers)
        assert await told(http, post(server)) == b"ok"
        assert [number for number, *_ in server.asked] == [1, 1]

    run(main, loop, answer, OK)


def test_headers_pass_as_they_are():
    async def main(server, http):
        response = await http.send(post(server))
        assert response.headers[:3] == [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"X-Name", b"caf\xe9")]
        response.close()

    answer = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Name: caf\xe9\r\n"
    run(main, LOOPS[0], answer + b"Content-Length: 0\r\n\r\n")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("rest", [b"Content-Length: 5\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"])
def test_half_an_answer_is_never_whole(loop, rest):
    async def main(server, http):
        response = await http.send(post(server))
        assert await response.piece() == b"half"
        server.writers[0].close()
        with pytest.raises(FAILURES) as caught:
            await response.piece()
        assert reason_of(caught.value, DEADLINE) == "reset"
        assert not response.is_over
        response.close()

    run(main, loop, HEAD + rest)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X-Long: " + b"x" * (2 * MAX_HEADER_BYTES) + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(1000)) + b"\r\n",
    ],
)
def test_what_is_no_http_is_refused(loop, answer):
    async def main(server, http):
        assert await failure(http, post(server)) == "malformed"

    run(main, loop, answer)
