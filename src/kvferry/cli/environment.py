"""The only place that reads the environment (UCX's own variables are those of `transport.preparing`)."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory", "token_file"]


def cache_directory() -> Path:
    """Where what is made on first use is kept: KVFERRY_CACHE, or a folder in XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("KVFERRY_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def token_file() -> str:
    """The file with the token that all engines share: KVFERRY_TOKEN_FILE; empty when there is none."""
    return os.environ.get("KVFERRY_TOKEN_FILE", "")
