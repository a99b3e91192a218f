"""Errors of the operating system as text, without what Python puts around it."""

from __future__ import annotations

import os
import ssl


def os_error_text(error: Exception) -> str:
    """`Connection refused`, not `<urlopen error [Errno 111] …>`: callers name the file or the address themselves.

    Other errors than the system's are shown as they are.
    """
    # urllib wraps what has happened.
    inner = getattr(error, "reason", error)
    if not isinstance(inner, OSError):
        return str(error)
    # Failures to look up a name have numbers below 0 and words of their own, as those of TLS have; asyncio has put an
    # address into the words of others.
    is_plain = (inner.errno or 0) > 0 and not isinstance(inner, ssl.SSLError)
    return os.strerror(inner.errno or 0) if is_plain else inner.strerror or str(inner)
