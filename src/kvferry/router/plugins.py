"""Policies by name: `module:function`, or an entry point of the group `kvferry.policies`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from kvferry.errors import ConfigurationError
from kvferry.router.balanced import balanced
from kvferry.router.policy import Policy

__all__ = ["policy_named"]

GROUP = "kvferry.policies"


def policy_named(name: str) -> Policy:
    """The function of that name; `balanced` is the one that comes with the router. Raises ConfigurationError."""
    if name == "balanced":
        return balanced
    found: object
    if ":" in name:
        found = _function(name)
    else:
        known = {point.name: point for point in entry_points(group=GROUP)}
        if name not in known:
            names = ", ".join(sorted(["balanced", *known]))
            raise ConfigurationError("no such policy", found=name, expected=f"{names}, or module:function")
        found = known[name].load()
    if not callable(found):
        raise ConfigurationError("a policy must be a function", found=f"{name} is {found!r}", expected="callable")
    return found


def _function(name: str) -> object:
    module, _, function = name.partition(":")
    try:
        return vars(importlib.import_module(module))[function]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigurationError(
            "the policy cannot be imported",
            found=f"{name}: {error!r}",
            expected="module:function",
            hint="is its folder on PYTHONPATH?",
        ) from error
