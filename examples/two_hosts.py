"""Prefill on one host, decode on another: the cache crosses a network, and both prove that they know a shared secret.

    sudo python examples/two_hosts.py

The two hosts are made on this machine: network namespaces, joined by a cable (a veth pair), with processes and shared
memory of their own. The first has a prefill engine and the router, the second the decode engine. Between hosts engines
say where they can be reached (`--transfer-host`), and share a token file: whoever does not know the token is refused
before it can ask for anything. Of the transports only those that work between hosts are left: NIXL and sockets.

Needs Linux, root, `ip` and `unshare`, and `pip install 'kvferry[engine,nixl]'`. The namespaces end with the example.
On real hosts the same commands run on each, without the prefix that enters the namespace, and with a copy of the file.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry.testing.output_check import compare
from kvferry.testing.servers import running

MODEL_NAME = "example"
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
# Both options end everything inside with the process that made it.
OWN_PROCESSES = ("unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTER_SECOND = ("ip", "netns", "exec", "second", *OWN_PROCESSES)
# Hosts do not share memory.
OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
CABLE = f"""
ip link set lo up
mount -t tmpfs tmpfs /run && ip netns add second
ip link add eth0 type veth peer name eth0 netns second
ip address add {FIRST}/24 dev eth0 && ip link set eth0 up
ip -n second link set lo up
ip -n second address add {SECOND}/24 dev eth0 && ip -n second link set eth0 up
"""


def main() -> int:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        raise SystemExit(
            "this example makes hosts in network namespaces: it needs root, and the programs ip and unshare"
        )
    if sys.argv[1:] != ["inside"]:
        # This process becomes the first host's first one: with it everything else ends, whatever happens.
        words = [*OWN_PROCESSES, "--net", *OWN_MEMORY, sys.executable, __file__, "inside"]
        os.execvp(words[0], words)
    subprocess.run(["sh", "-ec", CABLE], check=True, timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "kvferry.token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32))
        return run(str(token_file))


def run(token_file: str) -> int:
    prefill, decode = serve("prefill", FIRST, token_file), serve("decode", SECOND, token_file)
    print(f"starting a prefill engine and a router on {FIRST}, a decode engine on {SECOND}")
    with (
        running(prefill) as (prefill_url,),
        running(decode, prefix=(*ENTER_SECOND, *OWN_MEMORY)) as (decode_url,),
        running(("route", "--port", "0", "--prefill", prefill_url, "--decode", decode_url)) as (router_url,),
    ):
        found = compare(router_url, decode_url, MODEL_NAME)
        print(found)
    print(f"sent over the cable from the first host: {bytes_sent():,} bytes")
    return 0 if found.passed else 1


def bytes_sent() -> int:
    # Not from /sys, which still shows the network of the machine around us.
    words = ("ip", "-json", "-statistics", "link", "show", "eth0")
    (cable,) = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=60).stdout)
    return int(cable["stats64"]["tx"]["bytes"])


def serve(engine_id: str, host: str, token_file: str) -> tuple[str, ...]:
    """One engine that other hosts can reach: its API at `--host`, transfers at `--transfer-host`."""
    addresses = ("--host", host, "--port", "0", "--transfer-host", host, "--token-file", token_file)
    return ("serve", "--engine-id", engine_id, "--served-name", MODEL_NAME, "--failure-policy", "fail", *addresses)


if __name__ == "__main__":
    raise SystemExit(main())
