"""How many engines of a role there should be: a policy for Ray Serve, which asks it again and again."""

from __future__ import annotations

from typing import Any

METRIC = "kvferry_load"
"""What each engine reports: how much the router has given it to do."""


class LoadPolicy:
    """Ask for so many engines that each has `target` to do. Serve applies the delays and the limits of the settings."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of engines that is wanted, and no state to keep. Without a report the number stays as it is."""
        loads = (context.aggregated_metrics or {}).get(METRIC, {})
        return (sum(loads.values()) / self._target if loads else context.target_num_replicas), {}
