"""Engines behind https: whose certificate is believed, and whose is not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest
import trustme
import uvloop

from kvferry.router.upstream.failures import FAILURES, REFUSED, reason_of
from kvferry.router.upstream.http_client import HttpClient, HttpRequest

DEADLINE_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def believed(authority, tmp_path, monkeypatch):
    """What a user does who has an authority of their own."""
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


def run(main, loop, authority, name):
    """`main(http, url)` with a server that has a certificate for `name`."""
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(OK)
        writer.close()

    async def whole():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(name).configure_cert(context)
        listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(HttpClient(DEADLINE_S)) as http:
            await main(http, url)
        listening.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())
    return len(connections)


async def ask(http, url):
    exchange = await http.send(HttpRequest("POST", url, "/v1/completions", [], b""))
    try:
        return await exchange.whole(100)
    finally:
        exchange.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_an_authority_in_ssl_cert_file_is_believed_and_its_connections_are_kept(loop, authority, believed):
    async def main(http, url):
        assert await ask(http, url) == b"ok"
        assert await ask(http, url) == b"ok"

    assert run(main, loop, authority, "127.0.0.1") == 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["127.0.0.1", "elsewhere.example"])
def test_who_cannot_prove_to_be_the_instance_is_no_instance(loop, name, request):
    authority = trustme.CA()
    if name == "elsewhere.example":
        # Its authority is believed, but the certificate is about somebody else.
        authority = request.getfixturevalue("authority")
        request.getfixturevalue("believed")

    async def main(http, url):
        with pytest.raises(FAILURES) as caught:
            await ask(http, url)
        assert reason_of(caught.value, "deadline") == REFUSED
        assert "certificate" in str(caught.value)

    assert run(main, loop, authority, name) == 0
