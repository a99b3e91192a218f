"""Connections between our processes notice a host that says nothing any more: options of real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvloop
import zmq

from kvferry.agent.control.sockets import OPTIONS
from kvferry.cli.route.command import RouteOptions
from kvferry.cli.route.server import route
from kvferry.cli.server import listening
from kvferry.cli.server.listening import listen
from kvferry.errors import ConfigurationError
from kvferry.router.upstream.http_client import HttpClient, HttpRequest
from kvferry.system import IDLE_S, INTERVAL_S, NUM_PROBES, USER_TIMEOUT_MS
from kvferry.transport.tcp.connection import Connection

WANTED = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): IDLE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): INTERVAL_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): NUM_PROBES,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): USER_TIMEOUT_MS,
}


def options_of(sock) -> dict:
    return {option: sock.getsockopt(*option) for option in WANTED}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_ends_of_a_connection_to_an_engine(loop):
    async def main(server):
        url = "http://{}:{}".format(*server.getsockname())
        async with contextlib.aclosing(HttpClient(20.0)) as http:
            asking = asyncio.create_task(http.send(HttpRequest("POST", url, "/x", [], b"")))
            loop = asyncio.get_running_loop()
            server.setblocking(False)
            accepted, _ = await loop.sock_accept(server)
            with accepted:
                assert options_of(accepted) == WANTED
                await loop.sock_recv(accepted, 1000)
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
                response = await asking
                connection = response._response.connection
                assert options_of(connection.transport.get_extra_info("socket")) == WANTED
                response.close()

    with listen("127.0.0.1", 0) as server, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main(server))


def test_a_connection_of_the_tcp_transport_gives_up_what_is_not_delivered_by_its_own_limit():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        Connection(sock, 7.0)
        limit = {(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 7000}
        assert options_of(sock) == WANTED | limit


def test_the_control_channel():
    names = (zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT, zmq.TCP_MAXRT)
    assert [OPTIONS[name] for name in names] == [1, IDLE_S, INTERVAL_S, NUM_PROBES, USER_TIMEOUT_MS]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for name, value in OPTIONS.items():
            dealer.setsockopt(name, value)
        dealer.close(linger=0)


def test_the_system_gives_no_client_up_before_its_server_does():
    with listen("127.0.0.1", 0, 120.0) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            limit = {(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 120_000 + USER_TIMEOUT_MS}
            assert options_of(accepted) == WANTED | limit


def test_a_router_is_such_a_server(monkeypatch):
    told = []

    def listens(*args):
        told.append(args)
        raise ConfigurationError("that is all")

    monkeypatch.setattr(listening, "listen", listens)
    with pytest.raises(ConfigurationError, match="that is all"):
        route(RouteOptions(decode=["http://127.0.0.1:1"], host="127.0.0.1", port=0, stall_timeout=77.0))
    assert told == [("127.0.0.1", 0, 77.0)]
