"""Errors of an HTTP client: how one is avoided, and the others as one line of text."""

from __future__ import annotations

import aiohttp

from kvferry.system import os_error_text

KEEP_ALIVE_S = 2.0
"""How long a client keeps an idle connection. It is less than servers keep theirs (vLLM: 5 s): a connection that the
server closes in the moment of its next use looks like a broken server."""


def client_error_text(error: Exception) -> str:
    """The text of an error of aiohttp, or of the sockets below it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {os_error_text(error.os_error)}"
    return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
