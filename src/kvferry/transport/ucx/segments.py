"""How much UCX sends and receives at once over its sockets.

A process compares what it sends with what it receives itself. Nobody compares it with what the peer receives: a longer
piece is written behind the peer's buffer. So every engine sends and receives the same, and others do not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvferry.errors import ConfigurationError

RECEIVED, SENT = "UCX_TCP_RX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE"
# As much UCX receives by itself; by itself it sends 8 KiB.
SEGMENT: Final = "64k"
SEGMENT_BYTES: Final = 64 << 10
# UCX takes more forms than these, and of those that it does not understand the beginning.
MEMORY: Final = re.compile(r"(?P<number>\d{1,12})(?P<unit>[kmg]?)b?", re.IGNORECASE)


def check_segments(user: Mapping[str, str]) -> None:
    """Raises ConfigurationError when the user lets this process receive less than its peers send, or send more than
    they receive."""
    received, sent = user.get(RECEIVED, SEGMENT), user.get(SENT, SEGMENT)
    if _num_bytes(RECEIVED, received) < SEGMENT_BYTES:
        raise _unsafe(RECEIVED, received, "peers send longer pieces than this process receives", "more")
    if _num_bytes(SENT, sent) > SEGMENT_BYTES:
        raise _unsafe(SENT, sent, "this process sends longer pieces than peers receive", "less")


def _unsafe(name: str, value: str, why: str, more_or_less: str) -> ConfigurationError:
    what = f"UCX would write behind the buffer of its sockets: {why}"
    expected, hint = f"{SEGMENT} or {more_or_less}", f"unset {name}: kvferry sets {SEGMENT}"
    return ConfigurationError(what, found=f"{name}={value}", expected=expected, hint=hint)


def _num_bytes(name: str, value: str) -> int:
    """The bytes that UCX reads in text such as `64k`, `64KB` or `65536`. Raises ConfigurationError for other forms."""
    if found := MEMORY.fullmatch(value.strip()):
        return int(found["number"]) << 10 * " kmg".index(found["unit"].lower() or " ")
    raise ConfigurationError(
        f"{name} is no size that is known to be safe", found=value, expected="a number, with k, m or g behind it"
    )
