"""Which libraries belong to which extra, and how to install a part of kvferry that is missing."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Final

from kvferry.errors import ConfigurationError

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "agent": ("zmq", "xxhash"),
    "native": ("numba",),
    "router": ("starlette", "uvicorn", "aiohttp", "prometheus_client", "uvloop", "httptools"),
    "otel": ("opentelemetry.sdk",),
    "kubernetes": ("kubernetes",),
    "ray": ("ray",),
    "simulate": ("simpy",),
    "jax": ("jax",),
    "torch": ("torch",),
    "kernels": ("triton",),
    "engine": ("transformers", "tokenizers", "psutil"),
}
"""Modules that an extra brings by itself. `INCLUDED` names the extras that it brings as well."""

INCLUDED: Final[dict[str, tuple[str, ...]]] = {
    "otel": ("router",),
    "kubernetes": ("router",),
    "ray": ("agent", "router"),
    "simulate": ("router",),
    "jax": ("agent",),
    "kernels": ("torch",),
    "engine": ("agent", "native", "router", "torch"),
}
# A library that only comes with another one.
COMES_WITH: Final = {"llvmlite": "numba"}


class MissingExtraError(ConfigurationError):
    """A library is missing; one line says which, and the command that installs it."""


def how_to_install(extra: str) -> str:
    """The command for an extra, or for several with commas."""
    command = f"pip install 'kvferry[{extra}]'"
    return f"{command}; in a checkout: pip install -e '.[{extra}]'" if _is_editable() else command


def missing_extra(error: ModuleNotFoundError, wanted: str) -> MissingExtraError | None:
    """What to tell the user of this import that failed, if the module belongs to an extra.

    `wanted` are the extras of the command that needed it, with commas; another extra is named only where they would not
    bring the module.
    """
    module = _root(error.name or "")
    module = COMES_WITH.get(module, module)
    owner = next((extra for extra, modules in EXTRAS.items() if module in map(_root, modules)), "")
    if not owner:
        return None
    brought = {name for extra in wanted.split(",") for name in (extra, *INCLUDED.get(extra, ()))}
    extra = wanted if owner in brought else owner
    return MissingExtraError(f"the Python package {module} is not installed: {how_to_install(extra)}")


def missing_modules(extra: str) -> list[str]:
    """What is not installed of an extra's own modules."""
    return [module for module in EXTRAS[extra] if not _is_installed(module)]


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # A parent of it.
        return False


def _is_editable() -> bool:
    """Whether this package is installed from a checkout: the index may not have this version."""
    try:
        text = distribution("kvferry").read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
