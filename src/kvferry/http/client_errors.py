"""Errors of an HTTP client as one line of text."""

from __future__ import annotations

import aiohttp

from kvferry.system import os_error_text


def client_error_text(error: Exception) -> str:
    """The text of an error of aiohttp, or of the sockets below it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {os_error_text(error.os_error)}"
    return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
