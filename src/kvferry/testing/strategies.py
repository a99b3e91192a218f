"""Hypothesis strategies for layouts, block tables and token ranges: small numbers, every shape."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import permutations

from hypothesis import strategies as st

from kvferry.plan.describe import Attention, EngineShape, describe
from kvferry.plan.layout import Layout, TokenRange
from kvferry.testing.handmade import make_model, make_side

__all__ = ["Scenario", "handmade", "scenarios"]

FORMATS = ["".join(letters) for letters in permutations("LKBNHD")]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two engines with the same model, one request on both, and the tokens to move.

    `source_tables` and `target_tables` have one list of block tables per rank; `windows` the sliding window of each
    state that has one.
    """

    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    source_tables: tuple[list[list[int]], ...]
    target_tables: tuple[list[list[int]], ...]
    tokens: TokenRange
    windows: dict[str, int]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any pair of attention engines: TP (divided or replicated), PP, block sizes and memory formats all independent."""
    attention = Attention(
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.sampled_from([1, 2, 3, 4, 6])),
        head_dim=draw(st.integers(1, 3)),
        dtype="float16",
        item_bytes=draw(st.sampled_from([1, 2, 4])),
    )
    last = draw(st.integers(0, 13))
    tokens = TokenRange(draw(st.integers(0, last)), last)
    sources, source_tables = _engine(draw, attention, last)
    targets, target_tables = _engine(draw, attention, last)
    return Scenario(sources, targets, source_tables, target_tables, tokens, windows={})


def _engine(
    draw: st.DrawFn, attention: Attention, num_tokens: int
) -> tuple[tuple[Layout, ...], tuple[list[list[int]], ...]]:
    heads = attention.num_heads
    sizes = [size for size in (1, 2, 3, 4, 6) if heads % size == 0 or size % heads == 0]
    block_tokens = draw(st.integers(1, 6))
    num_needed = -(-num_tokens // block_tokens)
    num_blocks = num_needed + draw(st.integers(1, 3))
    shape = EngineShape(
        tensor_parallel=draw(st.sampled_from(sizes)),
        pipeline_parallel=draw(st.integers(1, attention.num_layers)),
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        format=draw(st.sampled_from(FORMATS)),
    )
    layouts = describe(attention, shape, first_address=1 << 41)
    ids = st.permutations(range(num_blocks)).map(lambda order: [order[:num_needed]])
    return layouts, tuple(draw(ids) for _ in layouts)


@st.composite
def handmade(draw: st.DrawFn) -> Scenario:
    """Engines that no helper of ours describes; see `kvferry.testing.handmade`."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    model = make_model(dice)
    last = dice.randint(0, 13)
    source = make_side(dice, model, model.source_rings, last, 1 << 41)
    target = make_side(dice, model, model.target_rings, last, 1 << 52)
    tokens = TokenRange(dice.randint(0, last), last)
    return Scenario(source.layouts, target.layouts, source.tables, target.tables, tokens, model.windows())
