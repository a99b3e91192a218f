"""How much UCX sends and receives at once over its sockets.

A process compares what it sends with what it receives itself. Nobody compares it with what the peer receives: a longer
piece is written behind the peer's buffer. So every engine sends and receives the same.
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
MEMORY: Final = re.compile(r"(?P<number>\d+)(?P<unit>[kmgt]?)b?", re.IGNORECASE)


def num_bytes_of(value: str) -> int | None:
    """The bytes that UCX reads in a text such as `64k`, `64KB` or `65536`. None for what is no such number."""
    found = MEMORY.fullmatch(value.strip())
    return int(found["number"]) << 10 * " kmgt".index(found["unit"].lower() or " ") if found else None


def check_received(user: Mapping[str, str]) -> None:
    """Raises ConfigurationError when the user lets this process receive less than its peers send."""
    value = user.get(RECEIVED, SEGMENT)
    received = num_bytes_of(value)
    if received is not None and received < SEGMENT_BYTES:
        raise ConfigurationError(
            "UCX would write behind the buffer of its sockets: peers send longer pieces than this process receives",
            found=f"{RECEIVED}={value}",
            expected=f"{SEGMENT} or more",
            hint=f"unset {RECEIVED}: kvferry sets {SEGMENT}, which is UCX's own value",
        )
