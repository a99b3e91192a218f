"""The sockets that HTTP servers listen on."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

import pytest
import uvloop

from kvferry.cli.server import listening
from kvferry.errors import ConfigurationError


def test_a_taken_port_and_a_foreign_address_have_hints_of_their_own():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match="choose another --port"),
    ):
        listening.listen("127.0.0.1", taken.getsockname()[1])
    for elsewhere in ("192.0.2.1", "2001:db8::1", "no.such.host.invalid", "x" * 70):
        with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1 always works"):
            listening.listen(elsewhere, 0)


def test_a_held_port_is_nobody_elses_and_can_be_listened_on():
    with listening.reserve("127.0.0.1", 0) as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with listening.listen("127.0.0.1", port) as bound:
            assert bound.getsockname() == held.getsockname()
            with pytest.raises(ConfigurationError, match="choose another --port"):
                listening.reserve("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "url_host", "client"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("::1", "[::1]", "::1"),
        ("[::1]", "[::1]", "::1"),
        ("::", "[::]", "::1"),
        ("::", "[::]", "127.0.0.1"),
    ],
)
def test_a_host_is_an_address_of_either_protocol_or_a_name(host: str, url_host: str, client: str):
    with listening.listen(host, 0) as bound:
        url = urlsplit(listening.url_of(bound))
        assert url.netloc == f"{url_host}:{url.port}"
        with socket.create_connection((client, url.port or 0), timeout=10), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_send_small_writes_at_once(new_event_loop, host: str):
    """uvicorn writes the head and the body of an answer apart. With Nagle's algorithm the body waits until the client
    acknowledges the head, which a kept-alive client does after 40 ms."""

    async def accepted_option() -> int:
        accepted = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                server_side = transport.get_extra_info("socket")
                accepted.set_result(server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with listening.listen(host, 0) as bound:
            server = await asyncio.get_running_loop().create_server(Protocol, sock=bound)
            _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
            option: int = await asyncio.wait_for(accepted, 10)
            writer.close()
            server.close()
        return option

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(accepted_option())
