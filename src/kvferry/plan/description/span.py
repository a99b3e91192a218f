"""Half-open intervals on one axis."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import LayoutError

# No axis is longer; and `len` of a span, which comes from peers, never overflows.
MAX_STOP = 1 << 48


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers `start <= i < stop`; `start < stop`, so a span is never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= MAX_STOP:
            raise LayoutError("a span must not be empty", found=str(self), expected=f"0 <= start < stop <= {MAX_STOP}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def overlap(left: Span, right: Span) -> tuple[Span, ...]:
    """The common part of two spans: one span, or none."""
    start, stop = max(left.start, right.start), min(left.stop, right.stop)
    return (Span(start, stop),) if start < stop else ()


def uncovered(whole: Span, parts: list[Span]) -> tuple[Span, ...]:
    """The pieces of `whole` that no part covers, in ascending order."""
    gaps: list[Span] = []
    reached = whole.start
    for part in sorted(parts):
        if part.start > reached:
            gaps.append(Span(reached, min(part.start, whole.stop)))
        reached = max(reached, part.stop)
        if reached >= whole.stop:
            return tuple(gaps)
    gaps.append(Span(reached, whole.stop))
    return tuple(gaps)
