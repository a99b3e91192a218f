"""How an axis is divided over ranks: equal spans, or replicas when there are more ranks than elements."""

from __future__ import annotations

from itertools import pairwise

from kvferry.errors import LayoutError
from kvferry.plan.description.span import Span


def shares(extent: int, num_ranks: int, what: str) -> tuple[Span, ...]:
    """One span per rank over `extent` elements (tensor parallelism).

    Neighbouring ranks hold the same span when there are more ranks than elements. Raises LayoutError, naming `what`,
    when neither divides the other: engines refuse to start then.
    """
    if num_ranks >= 1 and extent % num_ranks == 0:
        size = extent // num_ranks
        return tuple(Span(rank * size, (rank + 1) * size) for rank in range(num_ranks))
    if num_ranks >= 1 and num_ranks % extent == 0:
        return tuple(Span(rank * extent // num_ranks, rank * extent // num_ranks + 1) for rank in range(num_ranks))
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
