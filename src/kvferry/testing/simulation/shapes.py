"""The engines of a run: small models on small engines, any parallelism and block size on either side."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from kvferry.errors import FerryError
from kvferry.plan.describe import EngineShape, describe
from kvferry.plan.layout import Layout
from kvferry.plan.model import CacheModel
from kvferry.plan.route import route
from kvferry.testing.models import random_model
from kvferry.testing.simulation.memory import ByteMap
from kvferry.testing.strategies import FORMATS

__all__ = ["MAX_TOKENS", "NUM_SHAPES", "Shape", "Side", "shape_of"]

MAX_TOKENS = 9
NUM_SHAPES = 256
"""Runs share this many pairs of engines: to describe and to bind them takes longer than to play a run."""

MAX_STATES = 4
PARALLEL = ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (3, 2), (1, 3))


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """An engine: a layout and a map of its bytes per rank; whether its cache groups share one pool of blocks."""

    layouts: tuple[Layout, ...]
    maps: tuple[ByteMap, ...]
    shared_pool: bool


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """All prefill engines of a run are `source`, all decode engines are `target`."""

    source: Side
    target: Side
    has_fixed_states: bool
    text: str


@lru_cache(maxsize=NUM_SHAPES)
def shape_of(number: int) -> Shape:
    """One of the `NUM_SHAPES` pairs of engines."""
    dice = random.Random(number)
    while True:
        model, parallel = random_model(dice), dice.choice(PARALLEL)
        if len(model.kept()) > MAX_STATES:
            continue
        try:
            (source, wide), (target, long) = (_side(dice, model, ranks) for ranks in parallel)
            route(source.layouts, target.layouts)
        except FerryError:
            continue
        fixed = any(not kept.state.per_token for kept in model.kept())
        names = ", ".join(f"{kept.state.name}" for kept in model.kept())
        return Shape(source, target, fixed, f"{names}; {wide} to {long}")


def _side(dice: random.Random, model: CacheModel, num_ranks: int) -> tuple[Side, str]:
    block_tokens, shared_pool = dice.randint(1, 4), dice.random() < 0.4
    # Room for two or three of the longest requests: pools run full, and blocks are used again at once.
    per_request = -(-MAX_TOKENS // block_tokens)
    num_blocks = per_request * dice.randint(2, 3) * (len(model.groups()) if shared_pool else 1)
    shape = EngineShape(num_ranks, 1, block_tokens, num_blocks, dice.choice(FORMATS), shared_pool=shared_pool)
    layouts = describe(model, shape, first_address=1 << 41)
    side = Side(layouts, tuple(ByteMap.of(layout) for layout in layouts), shared_pool)
    return side, f"{num_ranks} ranks, blocks of {block_tokens} tokens"
