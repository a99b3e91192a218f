"""The scenario matrix of docs/transports.md, as far as one machine can play it: real processes, real UCX.

Two hosts are two sets of namespaces here (network, processes, IPC, mounts) with a boot id each, joined by a pair of
virtual network cards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.transport.machine.process_limits import process_limits

pytestmark = pytest.mark.e2e

SCENARIO = Path(__file__).with_name("scenario.py")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ALL = ["shm", "cma", "nixl", "tcp"]
SLOW_WAY = "a slower transport than these engines could"

Outcome = dict[str, dict[str, object]]


def play(
    *names: str,
    prefix: Sequence[str] = (),
    host: str = "127.0.0.1",
    may_trace: bool = True,
    near: Sequence[str] = (),
    **settings: str,
):
    """Where the peer is, and what came of each transport. `prefix` and `near` are commands that run another one: the
    peer, and who asks it."""
    pytest.importorskip("nixl_cu13")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | settings
    wanted = json.dumps({"names": names or ALL, "prefix": prefix, "host": host, "may_trace": may_trace})
    command = [*near, sys.executable, str(SCENARIO), wanted]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return said["place"], said["rows"]


def families(rows: Outcome, name: str) -> set[str]:
    carriers = rows[name]["carriers"]
    assert isinstance(carriers, list)
    return {str(carrier).split("/")[0] for carrier in carriers}


def fallbacks(rows: Outcome) -> set[str]:
    return {name for name, row in rows.items() if SLOW_WAY in str(row["findings"])}


def may_trace() -> bool:
    return process_limits().may_trace


def test_one_host_with_everything() -> None:
    place, rows = play()
    assert place == "same host"
    assert [row["error"] for row in rows.values()] == [""] * 4
    assert families(rows, "nixl") == {"cma"}
    # By name tcp would be fine; where it is what `auto` was left with, it is a fallback.
    assert fallbacks(rows) == {"tcp"}


def test_one_host_tcp_only() -> None:
    _, rows = play("nixl", UCX_TLS="tcp")
    assert rows["nixl"]["error"] == ""
    assert families(rows, "nixl") == {"tcp"}
    assert "UCX_TLS=tcp is set" in str(rows["nixl"]["findings"])


def needs(command: list[str]) -> None:
    """Skip where this user may not do what the scenario needs."""
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]}")
    if done.returncode:
        pytest.skip(f"not permitted: {' '.join(command)}: {done.stderr.decode().strip()}")


@pytest.mark.skipif(not may_trace(), reason="only who has CAP_SYS_PTRACE can give it up")
def test_one_host_where_cma_is_forbidden() -> None:
    _, rows = play("cma", may_trace=False)
    assert "ptrace_scope" in str(rows["cma"]["error"])
    _, rows = play("nixl", may_trace=False)
    assert rows["nixl"]["error"] == ""
    assert families(rows, "nixl") == {"tcp"}
    assert fallbacks(rows) == {"nixl"}


APART = ["unshare", "--pid", "--fork", "--ipc", "--kill-child", "--mount-proc"]


def test_one_host_two_containers_without_shared_namespaces() -> None:
    needs(APART)
    place, rows = play(prefix=APART)
    assert place == "same host"
    assert "pid namespace" in str(rows["shm"]["error"])
    assert "pid namespace" in str(rows["cma"]["error"])
    assert (rows["nixl"]["error"], rows["tcp"]["error"]) == ("", "")
    assert families(rows, "nixl") == {"tcp"}
    assert fallbacks(rows) == {"nixl", "tcp"}


# Several people may run this on one machine.
NETWORK = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
NEAR, FAR = f"{NETWORK}.1", f"{NETWORK}.2"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"not permitted: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def other_host(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """The command that runs another one on the other host."""
    space = f"kvferry-{os.getpid()}"
    near, far = f"kva{os.getpid() % 100000}", f"kvb{os.getpid() % 100000}"
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("00000000-1111-2222-3333-444444444444\n")
    needs(["unshare", "--net"])
    ip("netns", "add", space)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", space)
        ip("addr", "add", f"{NEAR}/30", "dev", near)
        ip("link", "set", near, "up")
        for words in (
            ["addr", "add", f"{FAR}/30", "dev", far],
            ["link", "set", far, "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", space, *words)
        inside = f'mount --bind {boot_id} {BOOT_ID} && exec "$0" "$@"'
        yield lambda: ["ip", "netns", "exec", space, *APART, "--mount", "--uts", "sh", "-c", inside]
    finally:
        # The pair of cards goes with the namespace.
        subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)


def test_two_hosts_without_rdma(other_host: Callable[[], list[str]]) -> None:
    prefix = other_host()
    needs(prefix)
    place, rows = play(prefix=prefix, host=FAR)
    assert place == "other host"
    assert rows["shm"]["error"]
    assert rows["cma"]["error"]
    assert (rows["nixl"]["error"], rows["tcp"]["error"]) == ("", "")
    assert families(rows, "nixl") == {"tcp"}
    # Between hosts without RDMA, tcp is what there is.
    assert fallbacks(rows) == set()


# Of a local network that nobody else has.
NEAR_6, FAR_6 = f"fd6b:7666:{os.getpid() % 65536:x}::1", f"fd6b:7666:{os.getpid() % 65536:x}::2"


def wait_until_up(space: str) -> None:
    """UCX leaves out an interface whose carrier the kernel has not noticed yet, which may take it a second."""
    deadline = time.monotonic() + 30
    command = ["ip", "-n", space, "-json", "link", "show", "kv"]
    while (
        '"operstate":"UP"' not in subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    ):
        assert time.monotonic() < deadline, f"the link of {space} is not up"
        time.sleep(0.02)


@pytest.fixture
def hosts_with_ipv6() -> Iterator[tuple[list[str], list[str]]]:
    """For each of two hosts whose network has no other protocol, the command that runs another one there."""
    spaces = [f"kvferry-{os.getpid()}-{number}" for number in range(2)]
    needs(["unshare", "--net"])
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("-n", spaces[0], "link", "add", "kv", "type", "veth", "peer", "name", "kv", "netns", spaces[1])
        for space, address in zip(spaces, (NEAR_6, FAR_6), strict=True):
            ip("-n", space, "addr", "add", f"{address}/64", "dev", "kv", "nodad")
            ip("-n", space, "link", "set", "kv", "up")
            ip("-n", space, "link", "set", "lo", "up")
        for space in spaces:
            wait_until_up(space)
        near, far = (["ip", "netns", "exec", space] for space in spaces)
        yield near, [*far, *APART]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)


def test_two_hosts_with_ipv6_only(hosts_with_ipv6: tuple[list[str], list[str]]) -> None:
    """UCX finds its own way: it listens at the addresses of network interfaces, whatever their protocol."""
    near, prefix = hosts_with_ipv6
    needs(prefix)
    _, rows = play("nixl", "tcp", prefix=prefix, host=FAR_6, near=near)
    assert (rows["nixl"]["error"], rows["tcp"]["error"]) == ("", "")
    assert families(rows, "nixl") == {"tcp"}
