"""Policies by name: `module:function`, or an entry point of the group `kvferry.policies`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from kvferry.errors import ConfigurationError
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import Policy

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
            raise ConfigurationError("unknown policy", found=name, expected=f"{names}, or module:function")
        found = known[name].load()
    if not callable(found) or not _takes_a_query(found):
        expected = "a function with one argument (docs/router.md)"
        raise ConfigurationError("invalid policy", found=f"{name} is {found!r}", expected=expected)
    return found


def _function(name: str) -> object:
    module, _, function = name.partition(":")
    try:
        imported = vars(importlib.import_module(module))
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            "cannot import the policy",
            found=f"{name}: {error}",
            expected="module:function",
            hint="is its folder on PYTHONPATH?",
        ) from error
    if function not in imported:
        raise ConfigurationError("the policy's module has no such function", found=name, expected="module:function")
    return imported[function]


def _takes_a_query(found: Callable[..., object]) -> bool:
    """Whether it takes a query, as far as can be told: for some functions in C that only shows at the first request."""
    try:
        inspect.signature(found).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
