"""Hosts of a small network: threads in namespaces of their own (network, processes, IPC, mounts, host name), joined by
veth pairs.

Whatever such a thread starts, or connects to, is on its host, and ends with it. Needs root; see `WHY_NOT`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["WHY_NOT", "Host", "Network"]

Result = TypeVar("Result")

# CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWIPC, CLONE_NEWUTS and CLONE_NEWNS; Python has names for them from 3.12 on.
NAMESPACES = 0x40000000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x00020000
STOP_S = 10.0
# A hardware address that no host has.
NOBODY = "02:00:00:00:00:00"
LIBC = ctypes.CDLL(None, use_errno=True)


class Host:
    """`address` is its own in the network; nothing but the network and loopback is there."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        # One thread: namespaces are a thread's, and of what it starts.
        self._thread = ThreadPoolExecutor(1, name)
        try:
            self.network_fd, self.init = self.do(_leave_home)
        except BaseException:
            self._thread.shutdown()
            raise

    def do(self, work: Callable[[], Result]) -> Result:
        """Do something on this host."""
        return self._thread.submit(work).result()

    def run(self, *words: str, fds: tuple[int, ...] = ()) -> None:
        self.do(lambda: _run(*words, fds=fds))

    def close(self) -> None:
        """End every process of this host: the kernel does that when the first one ends, which it also does when this
        process dies. Whoever has started others directly has waited for their end before."""
        self.init.kill()
        self.init.communicate(timeout=STOP_S)
        self._thread.shutdown()
        os.close(self.network_fd)


class Network:
    """The first host is where the cables meet: it can unplug each of the others, and make its cable slow or narrow.

    `prefix` is what all addresses begin with: `fd77::` makes a network that knows no IPv4.
    """

    def __init__(self, *names: str, prefix: str = "10.77.0.") -> None:
        self.hosts: dict[str, Host] = {}
        try:
            for number, name in enumerate(names, 1):
                self.hosts[name] = Host(name, f"{prefix}{number}")
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        self._centre, *others = self.hosts.values()
        self._centre.run("ip", "link", "add", "bridge0", "type", "bridge")
        _bring_up(self._centre, "bridge0")
        for host in others:
            # Made at one end; the other end is moved over to its host.
            self._centre.run("ip", "link", "add", "name", host.name, "type", "veth", "peer", "name", "eth0")
            moved_to = f"/proc/self/fd/{host.network_fd}"
            self._centre.run("ip", "link", "set", "eth0", "netns", moved_to, fds=(host.network_fd,))
            self._centre.run("ip", "link", "set", "dev", host.name, "master", "bridge0", "up")
            _bring_up(host, "eth0")

    def join_home(self, device: str, address: str) -> None:
        """A cable to where this process is, which should be a network namespace of its own: `unshare --net`."""
        with open("/proc/self/ns/net") as home:
            fd = home.fileno()
            self._centre.run("ip", "link", "add", "name", "home", "type", "veth", "peer", "name", device)
            self._centre.run("ip", "link", "set", device, "netns", f"/proc/self/fd/{fd}", fds=(fd,))
        self._centre.run("ip", "link", "set", "dev", "home", "master", "bridge0", "up")
        _run(*_address(device, address))
        _run("ip", "link", "set", device, "up")

    def unplug(self, name: str) -> None:
        """The host says nothing any more, and nobody is told."""
        self._centre.run("ip", "link", "set", "dev", name, "down")

    def plug_in(self, name: str) -> None:
        self._centre.run("ip", "link", "set", "dev", name, "up")

    def lose(self, source: str, target: str) -> None:
        """What `source` sends to `target` gets lost on its way; what comes back does not."""
        address = self.hosts[target].address
        self.hosts[source].run(
            *("ip", "neighbor", "replace", address, "lladdr", NOBODY, "nud", "permanent", "dev", "eth0")
        )

    def find(self, source: str, target: str) -> None:
        """The end of `lose`."""
        self.hosts[source].run("ip", "neighbor", "delete", self.hosts[target].address, "dev", "eth0")

    def drop_longer_than(self, num_bytes: int, name: str) -> None:
        """Longer packets for this host are dropped, and nobody is told: a black hole, as behind a tunnel."""
        for host in list(self.hosts.values())[1:]:
            # Else the kernel passes on many packets as one, whatever their length.
            host.run("ip", "link", "set", "dev", "eth0", "gso_max_segs", "1")
        self._centre.run("ip", "link", "set", "dev", name, "mtu", str(num_bytes))

    def slow_down(self, name: str, rate: str) -> None:
        """So fast is the cable to this host, such as `10mbit`; an empty rate is as fast as can be."""
        if rate:
            limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
            self._centre.run("tc", "qdisc", "replace", "dev", name, "root", *limit)
        else:
            self._centre.run("tc", "qdisc", "delete", "dev", name, "root")

    def move(self, name: str, address: str) -> None:
        """Give a host another address, the only one that it then has."""
        host = self.hosts[name]
        host.run("ip", "address", "flush", "dev", "eth0")
        host.address = address
        host.run(*_address("eth0", address))

    def close(self) -> None:
        """The network ends with its hosts. Safe to call twice."""
        while self.hosts:
            self.hosts.popitem()[1].close()


def _bring_up(host: Host, device: str) -> None:
    host.run("ip", "link", "set", "lo", "up")
    host.run(*_address(device, host.address))
    host.run("ip", "link", "set", device, "up")


def _address(device: str, address: str) -> tuple[str, ...]:
    # An address of IPv6 can be used at once only if nobody asks first whether somebody else has it.
    size, more = ("64", ("nodad",)) if ":" in address else ("24", ())
    return ("ip", "address", "add", f"{address}/{size}", "dev", device, *more)


def _leave_home() -> tuple[int, subprocess.Popen[bytes]]:
    """Go into new namespaces for good; the network, and the first process of the new host, which waits until its input
    is closed."""
    if LIBC.unshare(NAMESPACES):
        raise OSError(ctypes.get_errno(), "unshare")
    # While /proc still shows this thread. Processes of other hosts do not know each other's ids.
    network_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    init = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        _run("mount", "--make-rprivate", "/")
        # Memory that processes of one host share is not shared with those of another.
        _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        _run("mount", "-t", "proc", "proc", "/proc")
    except BaseException:
        init.kill()
        init.communicate(timeout=STOP_S)
        os.close(network_fd)
        raise
    return network_fd, init


def _run(*words: str, fds: tuple[int, ...] = ()) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, pass_fds=fds)
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
