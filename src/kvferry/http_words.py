"""What went wrong on the way to an HTTP server, in one line for people."""

from __future__ import annotations

import aiohttp

from kvferry.system_words import system_words


def words_of(error: Exception) -> str:
    """Of an error of aiohttp's, or of the sockets below it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {system_words(error.os_error)}"
    return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
