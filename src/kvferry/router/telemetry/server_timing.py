"""Where the time to a first token went: pure. Engines tell their part in the standard header `Server-Timing`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

# What a decode engine does before it computes its first token, in this order; other entries are not ours. `lost` is all
# that it has done for a cache that did not come.
ENGINE_PHASES = ("queue", "handshake", "claim", "wire", "verify", "lost")
ENTRY = re.compile(rb"\s*([a-z_]{1,32})\s*;\s*dur=(\d{1,9}(?:\.\d{1,9})?)\s*")
HEADER = b"server-timing"


def told_phases(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, float]:
    """Seconds per phase that an engine tells; empty when it tells nothing that can be understood."""
    values = [value for name, value in headers if name.lower() == HEADER]
    found = (ENTRY.fullmatch(entry) for value in values for entry in value.split(b","))
    told = {match[1].decode(): float(match[2]) / 1000 for match in found if match}
    return {name: told[name] for name in ENGINE_PHASES if name in told}


def phases_of(queue_s: float, prefill_s: float, decode_s: float, told: Mapping[str, float]) -> dict[str, float]:
    """The parts of a time to a first byte, in the order in which they happened; they add up to it.

    `decode_s` is from the end of the prefill to the decode leg's first byte. What the engine does not tell is
    `first_decode`, which without streaming is the whole answer.
    """
    engine = {("decode_queue" if name == "queue" else name): seconds for name, seconds in told.items()}
    own = {"queue": queue_s} | ({"prefill": prefill_s} if prefill_s else {})
    return own | engine | {"first_decode": max(decode_s - math.fsum(told.values()), 0.0)}


def without_beginning(told: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What is left of phases, one after the other, when they are looked at `seconds` after the first one began."""
    left = {}
    for name, lasted_s in told.items():
        left[name] = max(lasted_s - seconds, 0.0)
        seconds = max(seconds - lasted_s, 0.0)
    return left


def server_timing(phases: Mapping[str, float]) -> str:
    """The value of a `Server-Timing` header: milliseconds."""
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in phases.items())
