"""One question to a server of the fleet."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

# Proxies of the environment are for the world outside: they reach neither this host nor a fleet's own network.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float) -> bytes:
    """The body of an answer. Raises OSError, also for a status that says no, and ValueError for what is no URL or no
    HTTP."""
    try:
        with _DIRECT.open(url, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body
    except HTTPException as error:
        raise ValueError(str(error) or type(error).__name__) from error
