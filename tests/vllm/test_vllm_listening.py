"""Where a real vLLM server listens with our connector, and how its HTTP server sends small writes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import ipaddress
import os
import socket

import psutil
import pytest
from servers import PLAIN, Server

# Linux has no name for it in Python: a copy of another process's file descriptor.
PIDFD_GETFD = 438


def processes(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def accepted_by(server: Server, client: socket.socket) -> socket.socket:
    """The server's end of a connection of ours, taken out of its process."""
    for process in processes(server):
        for each in process.net_connections("tcp"):
            if each.raddr and each.raddr[:2] == client.getsockname()[:2] and each.laddr.port == server.port:
                pidfd = os.pidfd_open(process.pid)
                try:
                    taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, each.fd, 0)
                finally:
                    os.close(pidfd)
                if taken < 0:
                    pytest.skip(f"the kernel does not lend descriptors: {os.strerror(ctypes.get_errno())}")
                return socket.socket(fileno=taken)
    raise AssertionError("the server has not accepted the connection")


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_vllm_with_our_connector_listens_on_loopback_only(pair, spec):
    """UCX would listen at the address of every network interface."""
    for server in pair.servers:
        found = [one for process in processes(server) for one in process.net_connections("inet")]
        addresses = {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
        assert addresses
        assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_vllm_sends_small_writes_at_once(pair, spec):
    """Its event loop turns off Nagle's algorithm; else answers on kept-alive connections would take 40 ms more."""
    server = pair.decode
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
        with accepted_by(server, connection.sock) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
