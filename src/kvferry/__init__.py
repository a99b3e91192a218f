"""kvferry moves a request's KV cache from the engine that computed it to the engine that needs it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
