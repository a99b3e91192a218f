"""How many engines of a role there should be: a policy for Ray Serve, which asks it again and again."""

from __future__ import annotations

from typing import Any

METRIC = "kvferry_load"
"""What each engine reports: how much the router has given it to do."""


class LoadPolicy:
    """As many engines as give each of them `target` to do. Serve applies the delays and the limits of the settings."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number that is wanted, and what to remember: nothing. Without a report everything stays as it is."""
        loads = (context.aggregated_metrics or {}).get(METRIC, {})
        return (sum(loads.values()) / self._target if loads else context.target_num_replicas), {}
