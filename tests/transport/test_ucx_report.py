"""UCX's own report on its connections names what carries the bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.transport.nixl import remote_agents
from kvferry.transport.ucx.introspection import UcxIntrospection, carriers_in

BOTH = """
#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] seg 4294967295 am keepalive wireup
#                 lane[1]:  5:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
# +-----------+--------------------+---------------------------------+
"""
TWO_CARDS = """
#                 lane[0]:  1:rc_mlx5/mlx5_0:1.0 md[0]      -> md[0]/ib/sysdev[1] seg 8256 rma_bw#0 am am_bw#0 wireup
#                 lane[1]:  3:rc_mlx5/mlx5_1:1.0 md[2]      -> md[2]/ib/sysdev[2] seg 8256 rma_bw#1
#                 lane[2]:  1:rc_mlx5/mlx5_0:1.1 md[0]      -> md[0]/ib/sysdev[1] seg 8256 rma_bw#2
"""
MESSAGES = """
#                 lane[0]:  0:tcp/eth0.0 md[0]              -> md[0]/tcp/sysdev[255] seg 4294967295 am keepalive
#                 lane[1]:  6:cuda_ipc/cuda.0 md[5]         -> md[5]/cuda_ipc/sysdev[1] seg 4294967295 rkey_ptr
"""
ASK = """
import json
import numpy as np
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.base import Memory
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.selection.self_test import measure
from kvferry.transport.ucx.introspection import UcxIntrospection
transport = NixlTransport()
with PeerProcess("nixl", 1 << 20, 3) as peer:
    transport.connect("peer", peer.descriptor)
    found = measure(transport, "peer", peer.probe)
    carriers, report = transport.carriers("peer"), UcxIntrospection(transport._name)
    num_endpoints = len(report.endpoints())
    transport.disconnect("peer")
    print(json.dumps([found.error, carriers, report.version, report.carriers(1 << 20), num_endpoints]))
transport.close()
"""

# As a process does in which several ranks have an agent each.
BESIDE = """
import sys, threading
from kvferry.transport.nixl.transport import NixlTransport
transport, has_ended = NixlTransport(), threading.Event()
def make_and_close():
    for _ in range(150):
        NixlTransport().close()
    has_ended.set()
threading.Thread(target=make_and_close, daemon=True).start()
while not has_ended.is_set():
    transport._remote_agents._report.endpoints()
print("ended")
"""
MEETINGS = """
import json, os
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.selection.self_test import measure
transport, found = NixlTransport(), []
with PeerProcess("nixl", 1 << 20, 3) as peer:
    for _ in range(12):
        transport.connect("peer", peer.descriptor)
        assert measure(transport, "peer", peer.probe).error == ""
        transport.disconnect("peer")
        found.append([len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{peer.pid}/fd"))])
print(json.dumps(found))
transport.close()
"""

# The second agent reads from the first, which connects to it afterwards.
ANSWERED = """
import json
import numpy as np
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.transport.base import Memory
from kvferry.transport.nixl.transport import NixlTransport
both = [(NixlTransport(), np.zeros(4096, np.uint8)) for _ in range(2)]
for transport, memory in both:
    transport.register(Memory(memory.ctypes.data, memory.nbytes, -1))
found = []
for (ours, here), (theirs, there) in (both[::-1], both):
    ours.connect("peer", theirs.descriptor())
    source, target, length = (np.array([value], np.uint64) for value in (there.ctypes.data, here.ctypes.data, 4096))
    ours.post("peer", Copies(source, target, length, 1), Direction.READ)
    while not ours.poll():
        theirs.poll()
    found.append(ours.carriers("peer"))
print(json.dumps(found))
for transport, _ in both:
    transport.close()
"""

# What an outage of a network leaves behind is a connection over which nothing comes any more.
BREAKS = """
import contextlib, json, os, socket
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.selection.self_test import measure
def connected():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                each = socket.socket(fileno=os.dup(int(name)))
                each.getpeername()
                yield name, each
        except OSError:
            pass
transport, found = NixlTransport(), []
with PeerProcess("nixl", 1 << 20, 3) as peer:
    before = {name for name, _ in connected()}
    transport.connect("peer", peer.descriptor)
    assert measure(transport, "peer", peer.probe).error == ""
    for number in range(6):
        if number % 2:
            transport.disconnect("peer")
            transport.connect("peer", peer.descriptor)
        for name, each in connected():
            if name not in before:
                # The peer may have ended it meanwhile: its end of one connection lets UCX fail the others.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        error = measure(transport, "peer", peer.probe).error
        found.append([error, len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{peer.pid}/fd"))])
print(json.dumps(found))
transport.close()
"""


def told_by(script: str, **settings: str) -> Any:
    """What a process of its own says at its end, with these settings of UCX and no others."""
    pytest.importorskip("nixl_cu13")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | settings
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


def test_lanes_for_remote_memory_carry_the_bytes_and_else_those_for_messages() -> None:
    assert carriers_in(BOTH) == ("cma/memory",)
    assert carriers_in(TWO_CARDS) == ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
    assert carriers_in(MESSAGES) == ("tcp/eth0",)
    assert carriers_in("") == carriers_in("lane[0]: nonsense") == ()


def test_a_process_without_ucx_has_nothing_to_report(tmp_path: Path) -> None:
    report = UcxIntrospection("an agent", tmp_path / "maps")
    assert (report.version, report.endpoints(), report.carriers(4096)) == ("", frozenset(), ())


@pytest.mark.parametrize(
    ("settings", "family"), [({}, "cma"), ({"UCX_TLS": "tcp"}, "tcp"), ({"UCX_TLS": "^cma"}, "tcp")]
)
def test_the_loaded_ucx_says_what_carries_the_bytes(settings: dict[str, str], family: str) -> None:
    """A fallback to tcp is seen although nothing fails."""
    error, carriers, version, unknown, num_endpoints = told_by(ASK, **settings)
    assert error == ""
    assert {name.split("/")[0] for name in carriers} == {family}
    assert version.split(".")[0].isdecimal()
    assert unknown == []
    assert num_endpoints >= 1


def test_what_carries_the_bytes_is_known_of_a_connection_that_the_peer_has_opened() -> None:
    """UCX opens no other one to a peer that has connected before."""
    first, second = told_by(ANSWERED, UCX_TLS="tcp")
    assert first == second
    assert {name.split("/")[0] for name in first} == {"tcp"}


def test_a_connection_that_a_peer_has_opened_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our own agent's, nor that of a peer that was loaded before."""
    endpoints = iter([{1}, {1, 2}, {1, 2}, {1, 2, 3}, {1, 2, 3}])
    listing = SimpleNamespace(endpoints=lambda: frozenset(next(endpoints)), carriers=lambda each: (f"tcp/{each}",))
    monkeypatch.setattr(remote_agents, "UcxIntrospection", lambda name: listing)
    agents = remote_agents.RemoteAgents(SimpleNamespace(add_remote_agent=bytes.decode), (), "ours")
    for name in ("first", "second"):
        agents.load(name, name.encode(), busy=())
    assert (agents.carriers("first"), agents.carriers("second")) == (("tcp/2",), ("tcp/3",))


@pytest.mark.slow
def test_nothing_waits_for_the_interpreter_while_ucx_lists() -> None:
    """UCX holds a lock then for which others wait who hold that of Python. The whole process would stop."""
    pytest.importorskip("nixl_cu13")
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr.decode()


def test_meeting_a_peer_again_opens_nothing_more() -> None:
    """UCX ends a process that has no file descriptor left."""
    first, *_, last = told_by(MEETINGS)
    assert last == first


def test_a_connection_that_has_failed_is_replaced() -> None:
    """Also one to a peer that is met again; and the failed ones leave nothing open."""
    found = told_by(BREAKS, UCX_TLS="tcp")
    assert [error for error, *_ in found] == [""] * len(found)
    assert found[-1] == found[0]
