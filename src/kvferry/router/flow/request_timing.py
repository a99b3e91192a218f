"""The times of one request: its legs, its phases, its tokens."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.router.fleet.reservation import Reservation
from kvferry.router.policy.records import Role
from kvferry.router.request.headers import Headers
from kvferry.router.telemetry.server_timing import phases_of, told_phases, without_beginning

END_OF_FRAME = b"\n\n"


class RequestTiming:
    """All times are seconds of the loop's clock."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._began_s: dict[Role, float] = {}
        self._took_s: dict[Role, float] = {}
        self._told: dict[str, float] = {}
        # For so long the decode leg has waited for a prompt that was still computed.
        self._overlap_s = 0.0
        self._is_computing = False
        self._last_token_s = 0.0

    @property
    def decode_s(self) -> float:
        """From the decode leg's start to its first byte, or whole answer; 0 before that."""
        return self._took_s.get(Role.DECODE, 0.0)

    @property
    def handover_s(self) -> float:
        """From the end of the prefill to the decode leg's answer; 0 when one of the two is not known."""
        return 0.0 if self._is_computing else max(self.decode_s - self._overlap_s, 0.0)

    @property
    def told(self) -> dict[str, float]:
        """The engine's own phases, once it has answered."""
        return self._told

    @property
    def phases(self) -> dict[str, float]:
        """The parts of the time to the decode leg's first byte."""
        prefill_s = self._took_s.get(Role.PREFILL, 0.0)
        waited_s = self._began_s.get(Role.DECODE, self._started_s) - self._started_s
        told, overlap_s = without_beginning(self._told, self._overlap_s), self._overlap_s
        return phases_of(max(waited_s - prefill_s, 0.0), prefill_s + overlap_s, self.decode_s - overlap_s, told)

    def leg_began(self, role: Role, now: float) -> None:
        self._began_s[role], self._told = now, {}
        self._took_s.pop(role, None)
        # Nothing that was measured of an earlier try belongs to this one.
        self._overlap_s = 0.0
        if role is Role.PREFILL:
            self._took_s.pop(Role.DECODE, None)
            self._began_s.pop(Role.DECODE, None)
            self._is_computing = False

    def leg_answered(self, role: Role, now: float, headers: Headers) -> None:
        self._took_s[role] = now - self._began_s[role]
        if role is Role.DECODE:
            self._told = told_phases(headers)

    def promised(self) -> None:
        """The prefill leg goes on beside the decode leg."""
        self._is_computing = True

    def prefilled(self, now: float) -> None:
        """A promised prompt is computed."""
        if not self.decode_s and self._is_computing:
            self._is_computing = False
            self._overlap_s = max(now - self._began_s.get(Role.DECODE, now), 0.0)

    def piece(self, piece: bytes, now: float, observe: Callable[[float], None], reservation: Reservation) -> None:
        """A part of an event stream has come: each frame is taken for a token.

        Frames that come together were written one after the other: each is given its share of the time.
        """
        num_tokens = piece.count(END_OF_FRAME)
        if num_tokens:
            reservation.progress(num_tokens)
            if self._last_token_s:
                for _ in range(num_tokens):
                    observe((now - self._last_token_s) / num_tokens)
            self._last_token_s = now
