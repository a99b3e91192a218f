"""A Ray cluster of several nodes in this network namespace, and a fleet on it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

DEADLINE_S = 180.0
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


class FleetOnRay:
    """The first node holds the router, the others engines: one of each role."""

    def __init__(self, folder: Path, short: Path, model: Path) -> None:
        self._short, self.model = short, str(model)
        self._num_nodes = 0
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.url = f"http://127.0.0.1:{PORT}"
        self.nodes: dict[str, Any] = {}

    def __enter__(self) -> FleetOnRay:
        home = self._short / "home"
        home.mkdir()
        os.environ.update(VARIABLES, HOME=str(home), RAY_TMPDIR=str(self._short))
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        with ExitStack() as undo:
            undo.callback(self.cluster.shutdown)
            self._add({"router": 1}, include_dashboard=False, _system_config=QUICK)
            self.add_node()
            self.add_node()
            ray.init(address=self.cluster.address, log_to_driver=False)
            undo.callback(ray.shutdown)
            serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
            undo.callback(serve.shutdown)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def add_node(self) -> str:
        """One for an engine of each role; its address."""
        return self._add({"prefill": 1, "decode": 1})

    def kill_node(self, address: str) -> None:
        self.cluster.remove_node(self.nodes.pop(address), allow_graceful=False)

    def arguments(self, **changes: object) -> dict[str, object]:
        """Of the application, as they stand in a file for `serve deploy`."""
        role = {"max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 4, "look_back_s": 4}
        whole: dict[str, object] = {
            "model": self.model,
            "token_file": str(self.token),
            "drain_timeout_s": 30,
            "extra_args": ["--served-name", "tiny", "--transport", "tcp", "--simulated-step", "token=1ms,step=10ms"],
            "router_resources": {"router": 1},
            "prefill": {**role, "resources": {"prefill": 1}, "target_load": 40},
            "decode": {**role, "resources": {"decode": 1}, "target_load": 3},
        }
        return whole | changes

    def members(self) -> list[dict]:
        return get(f"{self.url}/kvferry/members")["members"]

    def await_engines(self, num_prefill: int, num_decode: int) -> None:
        """Until so many of each role are ready, as the router sees it."""
        expected = {"prefill": num_prefill, "decode": num_decode}
        seen: list[object] = []

        def as_expected() -> bool:
            members = self.members()
            seen[:] = [(one["url"], one["ready"], one["in_flight_tokens"]) for one in members]
            return Counter(one["role"] for one in members if one["ready"]) == expected

        eventually(as_expected, lambda: f"{expected}; the router: {seen}; Serve: {self._states()}")

    def _states(self) -> object:
        from ray import serve

        applications = serve.status().applications
        return {name: one.replica_states for app in applications.values() for name, one in app.deployments.items()}

    def _add(self, resources: dict[str, float], **more: object) -> str:
        self._num_nodes += 1
        address = f"{ADDRESS}{self._num_nodes}"
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "lo"], check=True, timeout=30)
        own = {"num_cpus": 1, "resources": resources, "object_store_memory": OBJECT_BYTES}
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
