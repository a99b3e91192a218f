"""Where the time to a first token went: pure. Engines tell their part in the standard header `Server-Timing`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from kvferry.router.policy.records import Role
from kvferry.router.request.headers import Headers

# What a decode engine does before it computes its first token, in this order; other entries are not ours. `lost` is all
# that it has done for a cache that did not come.
ENGINE_PHASES = ("queue", "handshake", "claim", "wire", "verify", "lost")
ENTRY = re.compile(rb"\s*([a-z_]{1,32})\s*;\s*dur=(\d{1,9}(?:\.\d{1,9})?)\s*")
HEADER = b"server-timing"
END_OF_FRAME = b"\n\n"


def told_phases(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, float]:
    """Seconds per phase that an engine tells; empty when it tells nothing that can be understood."""
    values = [value for name, value in headers if name.lower() == HEADER]
    found = (ENTRY.fullmatch(entry) for value in values for entry in value.split(b","))
    told = {match[1].decode(): float(match[2]) / 1000 for match in found if match}
    return {name: told[name] for name in ENGINE_PHASES if name in told}


def phases_of(queue_s: float, prefill_s: float, decode_s: float, told: Mapping[str, float]) -> dict[str, float]:
    """The parts of a time to a first byte, in the order in which they happened; they add up to it.

    `decode_s` is from the end of the prefill to the decode request's first byte. What the engine does not tell is
    `first_decode`, which without streaming is the whole answer.
    """
    engine = {("decode_queue" if name == "queue" else name): seconds for name, seconds in told.items()}
    own = {"queue": queue_s} | ({"prefill": prefill_s} if prefill_s else {})
    return own | engine | {"first_decode": max(decode_s - math.fsum(told.values()), 0.0)}


def without_beginning(told: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What is left of phases that follow one another, `seconds` after the first one began."""
    left = {}
    for name, lasted_s in told.items():
        left[name] = max(lasted_s - seconds, 0.0)
        seconds = max(seconds - lasted_s, 0.0)
    return left


class RequestTiming:
    """The times of one request, in seconds of the loop's clock."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._began_s: dict[Role, float] = {}
        self._took_s: dict[Role, float] = {}
        # The engine's own phases, once it has answered.
        self.told: dict[str, float] = {}
        # For so long the decode request has waited for a prompt that was still computed.
        self._overlap_s = 0.0
        self._is_computing = False
        self._last_token_s = 0.0

    @property
    def decode_s(self) -> float:
        """The time from the decode request's start to its first byte, or whole answer; 0 before that."""
        return self._took_s.get(Role.DECODE, 0.0)

    @property
    def handover_s(self) -> float:
        """The time from the end of the prefill to the decode request's answer; 0 when one of the two is not known."""
        return 0.0 if self._is_computing else max(self.decode_s - self._overlap_s, 0.0)

    @property
    def phases(self) -> dict[str, float]:
        """The parts of the time to the decode request's first byte."""
        prefill_s = self._took_s.get(Role.PREFILL, 0.0)
        waited_s = self._began_s.get(Role.DECODE, self._started_s) - self._started_s
        told, overlap_s = without_beginning(self.told, self._overlap_s), self._overlap_s
        return phases_of(max(waited_s - prefill_s, 0.0), prefill_s + overlap_s, self.decode_s - overlap_s, told)

    def began(self, role: Role, now: float) -> None:
        if role is Role.DECODE and Role.PREFILL in self._took_s:
            # Another decode request for the same prompt: it waits for none of what was computed beside the one before.
            beside_s = now - self._began_s.get(Role.DECODE, now) if self._is_computing else self._overlap_s
            self._took_s[Role.PREFILL] += beside_s
        self._began_s[role], self.told = now, {}
        self._took_s.pop(role, None)
        # Nothing that was measured of an earlier try belongs to this one.
        self._overlap_s = 0.0
        if role is Role.PREFILL:
            self._took_s.pop(Role.DECODE, None)
            self._began_s.pop(Role.DECODE, None)
            self._is_computing = False

    def answered(self, role: Role, now: float, headers: Headers) -> None:
        self._took_s[role] = now - self._began_s[role]
        if role is Role.DECODE:
            self.told = told_phases(headers)

    def promised(self) -> None:
        """Note that the prefill request goes on beside the decode request."""
        self._is_computing = True

    def prefilled(self, now: float) -> None:
        """Note that a promised prompt is computed."""
        if not self.decode_s and self._is_computing:
            self._is_computing = False
            self._overlap_s = max(now - self._began_s.get(Role.DECODE, now), 0.0)

    def piece(
        self, piece: bytes, now: float, observe: Callable[[float], None], progress: Callable[[int], None]
    ) -> None:
        """Take a part of an event stream that has come. Each frame is taken for a token.

        Frames that come together were written one after the other: each is given its share of the time.
        """
        num_tokens = piece.count(END_OF_FRAME)
        if num_tokens:
            progress(num_tokens)
            if self._last_token_s:
                for _ in range(num_tokens):
                    observe((now - self._last_token_s) / num_tokens)
            self._last_token_s = now
