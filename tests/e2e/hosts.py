"""Hosts of a small network: threads in namespaces of their own (network, IPC, mounts, host name), joined by veth pairs.

Whatever such a thread starts, or connects to, is on its host. Needs root; see `WHY_NOT`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["WHY_NOT", "Host", "Network"]

Result = TypeVar("Result")

# CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS and CLONE_NEWNS; Python has names for them from 3.12 on.
NAMESPACES = 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000
LIBC = ctypes.CDLL(None, use_errno=True)


class Host:
    """`address` is its own in the network; nothing but the network and loopback is there."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        # One thread: namespaces are a thread's, and of what it starts.
        self._thread = ThreadPoolExecutor(1, name)
        self.tid = self.do(_leave_home)

    def do(self, work: Callable[[], Result]) -> Result:
        """Do something on this host."""
        return self._thread.submit(work).result()

    def run(self, *words: str) -> None:
        self.do(lambda: _run(*words))

    def close(self) -> None:
        self._thread.shutdown()


class Network:
    """The first host is where the cables meet: it can unplug each of the others."""

    def __init__(self, *names: str) -> None:
        self.hosts = {name: Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)}
        self._centre, *others = self.hosts.values()
        self._centre.run("ip", "link", "add", "bridge0", "type", "bridge")
        _bring_up(self._centre, "bridge0")
        for host in others:
            # Made at one end; the other end is moved over to its host.
            self._centre.run("ip", "link", "add", "name", host.name, "type", "veth", "peer", "name", "eth0")
            self._centre.run("ip", "link", "set", "eth0", "netns", str(host.tid))
            self._centre.run("ip", "link", "set", "dev", host.name, "master", "bridge0", "up")
            _bring_up(host, "eth0")

    def unplug(self, name: str) -> None:
        """The host says nothing any more, and nobody is told."""
        self._centre.run("ip", "link", "set", "dev", name, "down")

    def plug_in(self, name: str) -> None:
        self._centre.run("ip", "link", "set", "dev", name, "up")

    def close(self) -> None:
        """The network ends with its threads, and with whatever they have started."""
        for host in self.hosts.values():
            host.close()


def _bring_up(host: Host, device: str) -> None:
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", device)
    host.run("ip", "link", "set", device, "up")


def _leave_home() -> int:
    """Go into new namespaces for good; the thread's id."""
    if LIBC.unshare(NAMESPACES):
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount", "--make-rprivate", "/")
    # Memory that processes of one host share is not shared with those of another.
    _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    return threading.get_native_id()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if os.geteuid():
        return "hosts in namespaces need root"
    missing = [name for name in ("ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"hosts in namespaces need {' and '.join(missing)}"
    try:
        network = Network("probe0", "probe1")
    except (OSError, subprocess.SubprocessError) as error:
        return f"no namespaces here: {error}"
    network.close()
    return ""


WHY_NOT = _why_not()
