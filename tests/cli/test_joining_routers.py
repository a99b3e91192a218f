"""An engine process joins its routers and leaves them at the end."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvferry import SharedToken
from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.cli.serve.command import JoinOptions
from kvferry.cli.serve.joining import joined
from kvferry.embedded.http import router_registration
from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.errors import ConfigurationError
from kvferry.http.registration import MEMBERS_PATH, SIGNATURE, Side

DEADLINE_S = 30.0


@pytest.fixture
def router():
    """A server that keeps what it is told: path, body, signature."""
    told = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            told.put((self.path, json.loads(body), self.headers.get(SIGNATURE, "")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words):
            """Nobody reads a test's log."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield "http://{}:{}".format(*server.server_address), told
    server.shutdown()
    thread.join()
    server.server_close()


def heard(told, num_come, *joining):
    """What routers hear before and after the end."""

    async def scenario():
        async with joined(*joining):
            return [await asyncio.to_thread(told.get, timeout=DEADLINE_S) for _ in range(num_come)]

    come = asyncio.run(scenario())
    return come, [told.get(timeout=DEADLINE_S) for _ in range(num_come)]


def test_it_joins_for_each_role_and_leaves(router):
    url, told = router
    token = SharedToken(b"0123456789abcdef0123456789abcdef")
    come, gone = heard(told, 2, JoinOptions([url], [Side.PREFILL, Side.DECODE]), "http://engine", token)
    assert {(path, body["url"]) for path, body, _ in come + gone} == {(MEMBERS_PATH, "http://engine")}
    assert [sorted(body["role"] for _, body, _ in told) for told in (come, gone)] == [["decode", "prefill"]] * 2
    assert [{body["leaving"] for _, body, _ in told} for told in (come, gone)] == [{False}, {True}]
    assert all(signature for _, _, signature in come + gone)


def test_another_url_may_be_told_and_without_a_token_nothing_is_signed(router):
    url, told = router
    ((_, body, signature),), _ = heard(told, 1, JoinOptions([url], [Side.DECODE], "http://outside:1"), "", NO_TOKEN)
    assert (body["url"], signature) == ("http://outside:1", "")


def test_an_error_of_ours_ends_no_announcements(monkeypatch, caplog):
    told = queue.Queue()

    async def fails(*_):
        told.put("asked")
        raise ZeroDivisionError

    async def scenario():
        registrar = Registrar(RegistrarConfig(("http://r",), "http://engine", (Side.DECODE,), b"", interval_s=0.01))
        running = asyncio.create_task(registrar.run())
        for _ in range(3):
            await asyncio.to_thread(told.get, timeout=DEADLINE_S)
        registrar.leave()
        await asyncio.wait_for(running, DEADLINE_S)

    monkeypatch.setattr(Registrar, "_tell", fails)
    asyncio.run(scenario())
    assert "an internal error ended an announcement" in caplog.text


def test_an_answer_that_is_no_text_ends_nothing(monkeypatch, caplog):
    """Whatever is between an engine and its router may answer, in whatever encoding."""
    told = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(502)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"erron\xe9e " * 100_000)
            told.put(self.path)

        def log_message(self, *words):
            """Nobody reads a test's log."""

    async def scenario(url):
        registrar = Registrar(RegistrarConfig((url,), "http://engine", (Side.DECODE,), b"", interval_s=0.01))
        running = asyncio.create_task(registrar.run())
        for _ in range(3):
            await asyncio.to_thread(told.get, timeout=DEADLINE_S)
        registrar.leave()
        await asyncio.wait_for(running, DEADLINE_S)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    # It is not read to its end.
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        asyncio.run(scenario("http://{}:{}".format(*server.server_address)))
        assert "it answered 502: erron\ufffde" in caplog.text
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nowhere_is_nothing_and_a_role_is_needed():
    assert heard(None, 0, JoinOptions(), "http://engine", NO_TOKEN) == ([], [])
    with pytest.raises(ConfigurationError, match="role"):
        JoinOptions(["http://router"])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (([], [Side.DECODE]), "needs --register; found: --role"),
        (([], [], "http://here"), "needs --register; found: --advertise-url"),
        ((["router:8000"], [Side.DECODE]), "invalid URL; found: router:8000"),
        ((["http://router"], [Side.DECODE], "here"), "invalid URL; found: here"),
    ],
)
def test_what_nobody_would_be_told_and_what_is_no_url_are_refused(told, words):
    with pytest.raises(ConfigurationError, match=words):
        JoinOptions(*told).check_role()


def test_engines_that_came_together_come_back_at_times_of_their_own(router, monkeypatch):
    url, told = router
    drawn = []
    monkeypatch.setattr(router_registration.random, "uniform", lambda low, high: drawn.append((low, high)) or 1e-6)

    async def scenario():
        registrar = Registrar(RegistrarConfig((url,), "http://127.0.0.1:1", (Side.PREFILL,), b"", interval_s=3600.0))
        running = asyncio.create_task(registrar.run())
        found = [await asyncio.to_thread(told.get, timeout=DEADLINE_S) for _ in range(2)]
        registrar.leave()
        await running
        return found

    assert [body["leaving"] for _, body, _ in asyncio.run(scenario())] == [False, False]
    # Nothing in between: only the first time is drawn.
    assert told.get(timeout=DEADLINE_S)[1]["leaving"]
    assert drawn == [(0.5, 1)]
