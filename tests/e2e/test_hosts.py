"""The hosts of the tests: what one has, the others do not see, and nothing of them is left."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from conftest import eventually
from hosts import WHY_NOT, Host, Network

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network("first", "second")
    yield network
    network.close()


def told(host: Host, script: str) -> list[str]:
    """The lines that a shell script writes on a host."""
    words = ["sh", "-c", script]
    done = host.do(lambda: subprocess.run(words, capture_output=True, text=True, timeout=60, check=True))
    return done.stdout.split("\n")[:-1]


def test_each_host_has_its_own_processes_memory_and_network(network):
    kinds = ("pid", "ipc", "mnt", "net", "uts")
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    script = "; ".join(f"readlink /proc/self/ns/{kind}" for kind in kinds)
    found = [here, *(told(host, script) for host in network.hosts.values())]
    assert all(len(set(column)) == 3 for column in zip(*found, strict=True))
    first, second = network.hosts.values()
    told(first, "touch /dev/shm/mine")
    assert told(second, "ls /dev/shm") == []
    # Its first process, a shell, and whoever lists them.
    assert len(told(second, "ls -d /proc/[0-9]*")) <= 3


def test_an_unplugged_host_is_silent(network):
    first, second = network.hosts.values()

    def reaches() -> bool:
        try:
            second.do(lambda: socket.create_connection(listener.getsockname(), 1.0)).close()
        except OSError:
            return False
        return True

    with first.do(lambda: socket.create_server((first.address, 0))) as listener:
        # A network that has just been made may lose the first packets.
        eventually(reaches, "the host answers")
        network.unplug("second")
        assert not reaches()
        network.plug_in("second")
        eventually(reaches, "the host answers again")


def test_nothing_outlives_its_host():
    """Not even what has left its session and its parent."""
    network = Network("first", "second")
    seconds = str(86_400 + os.getpid())
    told(network.hosts["second"], f"setsid sleep {seconds} >/dev/null 2>&1 &")
    eventually(lambda: ["sleep", seconds] in commands(), "it has begun")
    network.close()
    assert ["sleep", seconds] not in commands()


def commands() -> list[list[str]]:
    """The command lines of all processes, those of the hosts included."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found
