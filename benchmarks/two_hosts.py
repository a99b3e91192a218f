"""Two hosts on one machine: network namespaces at the ends of a veth pair. This process goes on as the near one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

__all__ = ["FAR", "FAR_HOST", "NEAR", "enter_hosts", "limit_connections"]

NEAR, FAR = "10.77.0.1", "10.77.0.2"
OWN_NETWORK = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
FAR_HOST = ("ip", "netns", "exec", "far", "unshare", "--ipc", "--pid", "--fork", "--kill-child")
"""A command that runs another one on the far host."""
CABLE = f"""
ip link set lo up
mount -t tmpfs tmpfs /run && ip netns add far
ip link add eth0 type veth peer name eth0 netns far
ip address add {NEAR}/24 dev eth0 && ip link set eth0 up
ip -n far link set lo up
ip -n far address add {FAR}/24 dev eth0 && ip -n far link set eth0 up
"""
# Sixteen classes by the port of the side that connects: as where links are bundled, two connections can share one.
NUM_CLASSES = 16
PORT_BITS = 0x001E


def enter_hosts() -> None:
    """Go on as the first of two hosts, which end with this process."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        raise SystemExit("hosts in network namespaces need root, and the programs ip, unshare and mount")
    if os.environ.get("BETWEEN_HOSTS") != "1":
        words = [*OWN_NETWORK, "env", "BETWEEN_HOSTS=1", sys.executable, *sys.argv]
        os.execvp(words[0], words)
    run(["sh", "-ec", CABLE])


def limit_connections(mbits: int) -> None:
    """Each class gets so much, in either direction."""
    for inside, port in ((["ip", "netns", "exec", "far"], "dport"), ([], "sport")):
        tc = [*inside, "tc"]
        run([*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb"])
        for number in range(NUM_CLASSES):
            name = f"1:{number + 1:x}"
            rate = ["htb", "rate", f"{mbits}mbit", "burst", "1m", "cburst", "1m", "quantum", "60000"]
            run([*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", name, *rate])
            match = ["u32", "match", "ip", port, str(number << 1), f"{PORT_BITS:#x}"]
            run([*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match, "flowid", name])


def run(words: list[str]) -> None:
    subprocess.run(words, check=True, timeout=60)
