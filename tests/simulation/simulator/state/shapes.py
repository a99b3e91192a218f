"""The engines of a run: small models on small engines, any parallelism and block size on either side."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from engines.models import COMPRESSED, random_model

from kvferry.errors import FerryError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import CacheModel
from kvferry.plan.routing.route import route
from simulator.state.memory import ByteMap

MAX_TOKENS = 9
NUM_SHAPES = 256
"""Runs share this many pairs of engines: to describe and to bind them takes longer than to play a run."""

MAX_REQUESTS = 3
MAX_STATES = 4
FORMATS = ["".join(letters) for letters in permutations("LKBNHD")]
ONE, TWO, THREE, STAGES = (1, 1), (2, 1), (3, 1), (1, 2)
PARALLEL = (
    (ONE, ONE),
    (ONE, ONE),
    (ONE, TWO),
    (TWO, ONE),
    (TWO, TWO),
    (TWO, TWO),
    (THREE, TWO),
    (ONE, THREE),
    (STAGES, TWO),
    (ONE, STAGES),
)
"""Tensor and pipeline parallelism of a source and a target."""


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

    @property
    def request_bytes(self) -> int:
        """About what the longest request has on one rank of a target."""
        return max(each.num_bytes for each in self.target.maps) // MAX_REQUESTS


@lru_cache(maxsize=NUM_SHAPES)
def shape_of(number: int) -> Shape:
    """One of the `NUM_SHAPES` pairs of engines."""
    rng = random.Random(number)
    while True:
        also = (rng.choice(sorted(COMPRESSED)),) if number % 8 == 7 else ()
        model, parallel = random_model(rng, also), rng.choice(PARALLEL)
        if len(model.kept()) > MAX_STATES:
            continue
        try:
            (source, wide), (target, long) = (_side(rng, model, each) for each in parallel)
            route(source.layouts, target.layouts)
        except FerryError:
            continue
        fixed = any(not kept.state.per_token for kept in model.kept())
        names = ", ".join(f"{kept.state.name}" for kept in model.kept())
        return Shape(source, target, fixed, f"{names}; {wide} to {long}")


def _side(rng: random.Random, model: CacheModel, parallel: tuple[int, int]) -> tuple[Side, str]:
    kernel_blocks, shared_pool = rng.choice([1, 1, 1, 2]), rng.random() < 0.4
    ratio = max(kept.state.compress_ratio for kept in model.kept())
    block_tokens = kernel_blocks * rng.randint(1, 4 // kernel_blocks) * ratio
    # Room for two or three of the longest requests: pools run full, and blocks are used again at once.
    per_request = -(-MAX_TOKENS // block_tokens)
    num_blocks = per_request * rng.randint(2, MAX_REQUESTS) * (len(model.groups()) if shared_pool else 1)
    sizes = EngineShape(*parallel, block_tokens, num_blocks, rng.choice(FORMATS))
    shape = replace(sizes, kernel_blocks=kernel_blocks, shared_pool=shared_pool)
    layouts = describe(model, shape, first_address=1 << 41)
    if rng.random() < 0.2:
        layouts = tuple(_with_free_tails(layout) for layout in layouts)
    side = Side(layouts, tuple(ByteMap.of(layout) for layout in layouts), shared_pool)
    return side, f"{shape.num_ranks} ranks, blocks of {block_tokens} tokens"


def _with_free_tails(layout: Layout) -> Layout:
    return replace(layout, groups=tuple(replace(group, tail_is_free=True) for group in layout.groups))
