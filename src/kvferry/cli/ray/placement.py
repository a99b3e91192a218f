"""Whether a cluster can hold a fleet. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvferry.cli.ray.settings import RaySettings
from kvferry.errors import ConfigurationError

Resources = Mapping[str, float]
HINT = "add nodes, ask for less, or set nodes_may_join: true where nodes are added on demand"


def check_placement(settings: RaySettings, nodes: Sequence[Resources]) -> None:
    """Raises ConfigurationError for what these nodes cannot hold, whatever else they do: each entry is all that a node
    has. A fleet that passes may still have to wait for what others use."""
    wanted = Counter[str]()
    parts = [("the router", settings.router_resources, 1)]
    parts += [(f"a {side} engine", role.resources, role.min_replicas) for side, role in settings.roles.items()]
    for who, resources, number in parts:
        if not any(_fits(resources, node) for node in nodes):
            found = "; ".join(map(_shown, nodes)) or "no node"
            expected = f"a node with {_shown(resources)}"
            raise ConfigurationError(
                f"no node of the cluster can hold {who}", found=found, expected=expected, hint=HINT
            )
        wanted.update({name: amount * number for name, amount in resources.items()})
    total = Counter[str]()
    for node in nodes:
        total.update(node)
    if not _fits(wanted, total):
        have, need = _shown({name: total[name] for name in wanted}), _shown(wanted)
        raise ConfigurationError("the cluster is too small for the fleet", found=have, expected=need, hint=HINT)


def _fits(wanted: Resources, there: Resources) -> bool:
    return all(amount <= there.get(name, 0.0) for name, amount in wanted.items())


def _shown(resources: Resources) -> str:
    """Without the resources that Ray gives each node a name by, and memory, unless it is asked for."""
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(shown.items())) or "nothing"
