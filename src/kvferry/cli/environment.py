"""The only place that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Where what is made on first use is kept: KVFERRY_CACHE, or a folder in XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("KVFERRY_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"
