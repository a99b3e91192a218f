"""Where the processes of a fleet listen: on the address that they were given, IPv6 or IPv4, and nowhere else."""

from __future__ import annotations

import ipaddress
import json
import socket
import urllib.request

import psutil
import pytest
from conftest import DEADLINE_S, eventually, members
from test_main_job import prompt_of


def listening(pid: int) -> set[str]:
    """The addresses on which a process and its children listen, whoever of its libraries has asked for that."""
    parent = psutil.Process(pid)
    found = (one for each in (parent, *parent.children(recursive=True)) for one in each.net_connections("inet"))
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM}


def cache_of(url: str, body: dict) -> str:
    """How the cache of an answer came to the decode engine."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        assert json.load(response)["choices"]
        return response.headers["x-kvferry-cache"]


@pytest.mark.skipif(all(name == "lo" for _, name in socket.if_nameindex()), reason="no network but loopback here")
def test_without_a_token_nothing_listens_beyond_loopback(start_fleet):
    """Native libraries included: UCX would listen at the address of every network interface."""
    fleet = start_fleet(transport="auto")
    body = {"model": "tiny", "prompt": prompt_of(40), "max_tokens": 3}
    assert cache_of(fleet.url, body) == "received"
    for name, pid in fleet.pids.items():
        addresses = listening(pid)
        assert addresses, name
        assert all(ipaddress.ip_address(address).is_loopback for address in addresses), (name, addresses)


@pytest.mark.parametrize(("host", "transport"), [("::1", "tcp"), ("::", "nixl")])
def test_everything_works_over_ipv6(start, tiny_model, host, transport):
    """Registration, requests and the control channel; `tcp` too, while UCX has a loopback interface of its own."""
    _, router = start("router", "route", "--host", host, "--port", "0", "--accept-registrations")
    url = router["url"].replace("[::]", "[::1]")
    model = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", transport)
    where = ("--host", "::1", "--port", "0", "--transfer-host", "::1", "--register", url)
    for role in ("prefill", "decode"):
        engine, told = start(role, "serve", *where, "--role", role, "--engine-id", role, *model)
        assert told["url"].startswith("http://[::1]:")
        assert told["transfer_address"].startswith("tcp://[::1]:")
        assert listening(engine.pid) <= {"::1", "127.0.0.1"}
    body = {"model": "tiny", "prompt": prompt_of(40), "max_tokens": 3}
    eventually(lambda: sum(member["ready"] for member in members(url)) == 2, "both engines have joined")
    assert cache_of(url, body) == "received"
