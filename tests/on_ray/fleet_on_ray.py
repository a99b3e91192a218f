"""A fleet on a Ray cluster."""

from __future__ import annotations

import urllib.error
from collections import Counter
from pathlib import Path

from ray_cluster import RayCluster, eventually, get


class FleetOnRay(RayCluster):
    """The first node holds the router, the others engines: one of each role."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        self.model = str(model)

    def __enter__(self) -> FleetOnRay:
        super().__enter__()
        self.add_engine_node()
        self.add_engine_node()
        return self

    def add_engine_node(self) -> str:
        return self.add_node("prefill", "decode")

    def arguments(self, **changes: object) -> dict[str, object]:
        """Of the application, as they stand in a file for `serve deploy`."""
        role = {"max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 4, "look_back_s": 4}
        whole: dict[str, object] = {
            "model": self.model,
            "token_file": str(self.token),
            "drain_timeout_s": 30,
            "extra_args": ["--served-name", "tiny", "--transport", "tcp", "--simulated-step", "token=1ms,step=10ms"],
            "router_resources": {"head": 1},
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
