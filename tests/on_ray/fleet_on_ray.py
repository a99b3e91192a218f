"""A fleet on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from ray_cluster import RayCluster


class FleetOnRay(RayCluster):
    """The first node holds the router, the others engines: one of each role."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        self.model = str(model)

    def add_engine_node(self) -> str:
        return self.add_node("prefill", "decode")

    def arguments(self, **changes: object) -> dict[str, object]:
        """Of the application, as they stand in a file for `serve deploy`."""
        role = {"max_replicas": 2, "upscale_delay_s": 2, "downscale_delay_s": 15, "look_back_s": 6}
        whole: dict[str, object] = {
            "model": self.model,
            "token_file": str(self.token),
            "drain_timeout_s": 30,
            "extra_args": ["--served-name", "tiny", "--transport", "tcp", "--simulated-step", "token=1ms,step=10ms"],
            "router_resources": {"head": 1},
            "prefill": {**role, "resources": {"prefill": 1}, "target_load": 60},
            "decode": {**role, "resources": {"decode": 1}, "target_load": 3},
        }
        return whole | changes
