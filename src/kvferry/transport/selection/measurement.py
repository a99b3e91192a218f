"""Bandwidth and latency of one transport to one peer, as a self-test has measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvferry.plan.programs.copies import Direction

# A direction that is slower by this factor takes another path; a busy machine alone does not cause it.
FAR_SLOWER: Final = 6.0
OTHER: Final = {Direction.READ: Direction.WRITE, Direction.WRITE: Direction.READ}


@dataclass(frozen=True, slots=True)
class Rates:
    """One direction: two bandwidths in 10⁹ bytes per second and the time of a small copy, or why there are none.

    `gigabytes_per_s` is that of one long row, `row_gigabytes_per_s` that of many rows of 4 KiB, which shows the cost of
    a descriptor.
    """

    gigabytes_per_s: float
    row_gigabytes_per_s: float
    latency_s: float
    error: str = ""

    @property
    def seconds_per_gigabyte(self) -> float:
        """The time of 10⁹ bytes, half of them in long rows and half in short ones: caches have both."""
        return 0.5 / self.gigabytes_per_s + 0.5 / self.row_gigabytes_per_s

    def __str__(self) -> str:
        return f"{self.gigabytes_per_s:.1f} GB/s, {self.row_gigabytes_per_s:.1f} in rows of 4 KiB"


UNMEASURED = Rates(0.0, 0.0, 0.0, "not measured")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One transport: reading (the first four figures, as in `Rates`), writing, and what carried the bytes.

    With an `error` the transport cannot be used at all. `carriers` are names of the transport's own library, such as
    `cma/memory` or `tcp/eth0`; `copies_once` is as in `Transport`.
    """

    name: str
    gigabytes_per_s: float
    row_gigabytes_per_s: float
    latency_s: float
    error: str
    writing: Rates = UNMEASURED
    carriers: tuple[str, ...] = ()
    copies_once: bool = False

    @classmethod
    def failed(cls, name: str, error: str) -> Measurement:
        """The entry of a transport that was not measured, and why it cannot be used."""
        return cls(name, 0.0, 0.0, 0.0, error)

    def rates(self, direction: Direction) -> Rates:
        """The rates of one direction."""
        if direction is Direction.WRITE:
            return self.writing
        return Rates(self.gigabytes_per_s, self.row_gigabytes_per_s, self.latency_s, self.error)

    def likely_rates(self, direction: Direction) -> Rates:
        """The rates of a direction. Where a peer's probe may not be written, those of reading stand for writing."""
        return self.rates(Direction.READ if self.writing == UNMEASURED else direction)

    def why_not(self, direction: Direction) -> str:
        """Why it cannot be used in a direction; empty where it can."""
        return self.error or self.likely_rates(direction).error

    def times_slower(self, direction: Direction) -> float:
        """How many times slower it is than the other direction; 0 when one of them is unknown."""
        rates, others = self.rates(direction), self.rates(OTHER[direction])
        return 0.0 if rates.error or others.error else rates.seconds_per_gigabyte / others.seconds_per_gigabyte

    @property
    def endangers_source(self) -> bool:
        """Whether a reader that dies can end the process that it reads from: over sockets of UCX (NIXL's notes)."""
        return bool(self.carriers) and all(carrier.startswith("tcp/") for carrier in self.carriers)

    @property
    def is_asymmetric(self) -> bool:
        """Whether one direction is far slower than the other."""
        return any(self.times_slower(direction) >= FAR_SLOWER for direction in Direction)
