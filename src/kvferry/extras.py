"""How to get a part of kvferry that is not installed."""

from __future__ import annotations

__all__ = ["how_to_install"]


def how_to_install(extra: str) -> str:
    """Of an extra, or of several with commas: in words that follow `hint:`."""
    return f"pip install 'kvferry[{extra}]'; in a checkout: pip install -e '.[{extra}]'"
