"""The only place that reads the environment (UCX's own variables are those of `transport.preparing`)."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.errors import ConfigurationError

API_KEY = "KVFERRY_API_KEY"


def cache_directory() -> Path:
    """Where what is made on first use is kept: KVFERRY_CACHE, or a folder in XDG_CACHE_HOME, or in ~/.cache. Raises
    ConfigurationError where there is no home folder, either."""
    if chosen := os.environ.get("KVFERRY_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvferry"
    try:
        return Path.home() / ".cache" / "kvferry"
    except RuntimeError as error:
        hint = "set KVFERRY_CACHE to a folder that can be written"
        raise ConfigurationError("there is no folder for what is made once", found=str(error), hint=hint) from error


def token_file() -> str:
    """The file with the token that all engines share: KVFERRY_TOKEN_FILE; empty when there is none."""
    return os.environ.get("KVFERRY_TOKEN_FILE", "")


def api_keys() -> tuple[str, ...]:
    """The key that clients need, and that our own commands show: KVFERRY_API_KEY; empty when there is none."""
    key = os.environ.get(API_KEY, "")
    return (key,) if key else ()


def engine_api_key() -> str:
    """What a router shows to its engines: KVFERRY_ENGINE_API_KEY; empty when there is none."""
    return os.environ.get("KVFERRY_ENGINE_API_KEY", "")


def ray_address() -> str:
    """The Ray cluster that Ray is told to use: RAY_ADDRESS; empty when it looks for one on this machine."""
    return os.environ.get("RAY_ADDRESS", "")


def share_api_key() -> None:
    """Let the router of a fleet that this process starts show its engines the key that they ask for."""
    for key in api_keys():
        os.environ.setdefault("KVFERRY_ENGINE_API_KEY", key)


def all_variables() -> dict[str, str]:
    """What a program of others, that a command of ours starts, finds there."""
    return dict(os.environ)


def cache_origin() -> str:
    """Whether the folder is the `default` or comes from the `environment`."""
    return "environment" if {"KVFERRY_CACHE", "XDG_CACHE_HOME"} & os.environ.keys() else "default"


def token_origin(path: str) -> str:
    """Whether a token file was given by `option` or by the `environment`."""
    return "environment" if path == token_file() else "option"
