"""What went wrong on the way to an HTTP server, in one line for people."""

from __future__ import annotations

import os
import ssl

import aiohttp

__all__ = ["words_of"]


def words_of(error: Exception) -> str:
    """Of an error of aiohttp's, or of the sockets below it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        # Those of looking up a name are below 0, and have words of their own, as those of TLS have.
        is_plain = number > 0 and not isinstance(error.os_error, ssl.SSLError)
        reason = os.strerror(number) if is_plain else error.strerror
        return f"cannot connect to {error.host}:{error.port}: {reason or error.os_error}"
    return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
