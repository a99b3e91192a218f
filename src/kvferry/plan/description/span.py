"""Half-open intervals on one axis, and how an axis is divided over ranks: equal spans, or replicas when there are more
ranks than elements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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


def shares(extent: int, num_ranks: int, what: str) -> tuple[Span, ...]:
    """One span per rank over `extent` elements (tensor parallelism).

    Neighbouring ranks hold the same span when there are more ranks than elements. Raises LayoutError, naming `what`,
    when neither divides the other: engines refuse to start then.
    """
    return tuple(share(extent, num_ranks, rank, what) for rank in range(max(1, num_ranks)))


def share(extent: int, num_ranks: int, rank: int, what: str) -> Span:
    """The span of one rank; see `shares`."""
    if num_ranks >= 1 and extent % num_ranks == 0:
        size = extent // num_ranks
        return Span(rank * size, (rank + 1) * size)
    if num_ranks >= 1 and num_ranks % extent == 0:
        start = rank * extent // num_ranks
        return Span(start, start + 1)
    raise LayoutError(
        f"{what} cannot be divided over the ranks",
        found=f"{extent} over {num_ranks} ranks",
        expected="one of the two a multiple of the other",
    )


def stages(num_layers: int, num_stages: int) -> tuple[Span, ...]:
    """One span of layers per pipeline stage; the first stages take the layers that are left over.

    Raises LayoutError when there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise LayoutError("every pipeline stage needs a layer", found=f"{num_layers} layers, {num_stages} stages")
    base, extra = divmod(num_layers, num_stages)
    starts = [stage * base + min(stage, extra) for stage in range(num_stages + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))
