"""A Ray cluster in this network namespace, whose nodes have addresses of their own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import psutil

DEADLINE_S = 240.0
HEADERS = {"content-type": "application/json", "x-kvferry-report": "true"}
ADDRESS = "10.78.0."
# Of a node's memory, the least that Ray takes for its objects: we give it none.
OBJECT_BYTES = 80 << 20
PORT = 8000
# In milliseconds: when a node is lost.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise replicas say every ten seconds what they have to do.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


class RayCluster:
    """The first node has the resource `head`, and HTTP at `url`; this process is the cluster's driver.

    `folder` is where Ray's files lie: its sockets too, whose paths may not be long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{PORT}"
        self.nodes: dict[str, Any] = {}
        self._num_nodes = 0
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))

    def __enter__(self) -> Self:
        home = self.folder / "home"
        home.mkdir()
        with ExitStack() as undo:
            undo.enter_context(patch.dict(os.environ, VARIABLES, HOME=str(home), RAY_TMPDIR=str(self.folder)))
            # It reads its variables when it is imported.
            import ray
            from ray import serve
            from ray.cluster_utils import Cluster

            self.cluster = Cluster()
            undo.callback(self.cluster.shutdown)
            self._add({"head": 1}, {}, include_dashboard=False, _system_config=QUICK)
            ray.init(address=self.cluster.address, log_to_driver=False)
            undo.callback(ray.shutdown)
            serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
            undo.callback(serve.shutdown)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def add_node(self, *resources: str, variables: Mapping[str, str] | None = None) -> str:
        """One with these resources, one of each; its address."""
        return self._add(dict.fromkeys(resources, 1), variables or {})

    def kill_node(self, address: str) -> None:
        self.cluster.remove_node(self.nodes.pop(address), allow_graceful=False)

    def members(self) -> list[dict]:
        """What the router of a fleet knows of its engines."""
        return get(f"{self.url}/kvferry/members")["members"]

    def await_engines(self, num_prefill: int, num_decode: int) -> None:
        """Until so many of each role are ready, as the router sees it."""
        expected = {"prefill": num_prefill, "decode": num_decode}
        seen: list[object] = []

        def as_expected() -> bool:
            try:
                members = self.members()
            except urllib.error.URLError as error:
                # Without a router Serve answers 503.
                seen[:] = [error]
                return False
            seen[:] = [(one["url"], one["ready"], one["in_flight_tokens"]) for one in members]
            return Counter(one["role"] for one in members if one["ready"]) == expected

        eventually(as_expected, lambda: f"{expected}; the router: {seen}; Serve: {self._states()}")

    def _states(self) -> object:
        from ray import serve

        applications = serve.status().applications
        return {name: one.replica_states for app in applications.values() for name, one in app.deployments.items()}

    @property
    def logs(self) -> Path:
        return self.folder / "ray" / "session_latest" / "logs"

    def _add(self, resources: dict[str, int], variables: Mapping[str, str], **more: object) -> str:
        self._num_nodes += 1
        address = f"{ADDRESS}{self._num_nodes}"
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "lo"], check=True, timeout=30)
        own = {"num_cpus": 2, "resources": resources, "object_store_memory": OBJECT_BYTES}
        own["env_vars"] = {name: value.format(address=address) for name, value in variables.items()}
        self.nodes[address] = self.cluster.add_node(node_ip_address=address, **own, **more)
        return address


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return json.load(response)


def post(url: str, body: object) -> tuple[int, dict]:
    """Status and body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def eventually(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for a condition of another process; fails at the deadline, and says `what` there is."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what()}"
        time.sleep(0.1)


def processes(*words: str) -> list[psutil.Process]:
    """Those of this network namespace whose command lines hold one of these words: others may run the same tests."""
    here = os.stat("/proc/self/ns/net").st_ino
    found = []
    for one in psutil.process_iter(["cmdline"]):
        line = " ".join(one.info["cmdline"] or ())
        with suppress(OSError):
            if any(word in line for word in words) and os.stat(f"/proc/{one.pid}/ns/net").st_ino == here:
                found.append(one)
    return found
