"""Hypothesis strategies for layouts, block tables and token ranges: small numbers, every shape."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd, lcm
from typing import Any

from hypothesis import strategies as st

from engines.handmade import make_model, make_side
from engines.models import COMPRESSED, random_model
from kvferry.errors import LayoutError
from kvferry.plan.description.describe import EngineShape, describe, divided
from kvferry.plan.description.layout import CacheGroup, Layout
from kvferry.plan.description.model import CacheModel
from kvferry.plan.description.tokens import TokenRange

FORMATS = ["".join(letters) for letters in permutations("LKBNHD")]
Tables = tuple[list[list[int]], ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two engines with the same model, one request on both, and the tokens to move.

    `source_tables` and `target_tables` have one list of block tables per rank; `ranges` one range per cache group of
    the target. `name` says how to make it again.
    """

    name: str
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    source_tables: Tables
    target_tables: Tables
    ranges: tuple[TokenRange, ...]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis prints: the call that makes it again, not its thousand numbers."""
        printer.text(self.name)

    @property
    def last(self) -> int:
        """How many tokens the source has computed."""
        return max((tokens.last for tokens in self.ranges), default=0)


def scenarios() -> st.SearchStrategy[Scenario]:
    """Any pair of engines with any kinds of cache: TP (divided or replicated), PP, context parallelism, block sizes,
    kernel blocks, pools and memory formats all independent; per-group ranges."""
    seeds = st.integers(0, 2**32)
    return st.one_of(seeds.map(described_scenario), seeds.map(compressed_scenario))


def handmade() -> st.SearchStrategy[Scenario]:
    """Engines that no helper of ours describes; see `engines/handmade.py`."""
    return st.builds(handmade_scenario, st.integers(0, 2**32), st.sampled_from([1, 1, 2, 3]))


def described_scenario(seed: int) -> Scenario:
    """The scenario of a seed, for `scenarios`."""
    dice = random.Random(seed)
    return _described(dice, random_model(dice), f"described_scenario({seed})")


def compressed_scenario(seed: int) -> Scenario:
    """The same with layers whose attention is over compressed tokens."""
    dice = random.Random(seed)
    kinds = tuple(dice.sample(sorted(COMPRESSED), dice.randint(1, 2)))
    return _described(dice, random_model(dice, kinds), f"compressed_scenario({seed})")


def _described(dice: random.Random, model: CacheModel, name: str) -> Scenario:
    last = dice.randint(0, 13)
    sources, source_shape = _engine(dice, model, last)
    targets, target_shape = _engine(dice, model, last)
    if dice.random() < 0.3:
        targets = tuple(
            replace(layout, groups=tuple(replace(group, tail_is_free=True) for group in layout.groups))
            for layout in targets
        )
    ranges = _ranges(dice, len(model.groups()), last)
    return Scenario(
        name,
        sources,
        targets,
        tuple(_tables(dice, layout, source_shape, last) for layout in sources),
        tuple(_tables(dice, layout, target_shape, last) for layout in targets),
        ranges,
    )


def handmade_scenario(seed: int, compress_ratio: int = 1) -> Scenario:
    """The scenario of a seed, for `handmade`; some states keep an entry for `compress_ratio` tokens."""
    dice = random.Random(seed)
    model = make_model(dice, compress_ratio)
    last = dice.randint(0, 13)
    source = make_side(dice, model, last, 1 << 41)
    target = make_side(dice, model, last, 1 << 52)
    ranges = _ranges(dice, len(target.layouts[0].groups), last)
    name = f"handmade_scenario({seed}, {compress_ratio})"
    return Scenario(name, source.layouts, target.layouts, source.tables, target.tables, ranges)


def _ranges(dice: random.Random, num_groups: int, last: int) -> tuple[TokenRange, ...]:
    """The same end for all groups; often the same start, sometimes a prefix of another length for each."""
    first = dice.randint(0, last)
    if dice.random() < 0.6:
        return (TokenRange(first, last),) * num_groups
    return tuple(TokenRange(dice.randint(0, last), last) for _ in range(num_groups))


def _engine(dice: random.Random, model: CacheModel, num_tokens: int) -> tuple[tuple[Layout, ...], EngineShape]:
    shape = EngineShape(
        tensor_parallel=dice.choice(_tensor_sizes(model)),
        pipeline_parallel=dice.randint(1, model.num_layers),
        block_tokens=6,
        num_blocks=1,
        format=dice.choice(FORMATS),
        run_tokens=dice.randint(1, 4),
        kernel_blocks=dice.choice([1, 1, 2, 3]),
        outer_axis=dice.choice(["", "width"]),
        shared_pool=dice.random() < 0.4,
    )
    ranks = range(shape.tensor_parallel)
    spans = [{divided(kept, shape, rank) for rank in ranks} for kept in model.kept() if kept.state.per_token]
    replicas = gcd(*(len(ranks) // len(distinct) for distinct in spans))
    ratio = lcm(*(kept.state.compress_ratio for kept in model.kept()))
    shape = replace(
        shape,
        block_tokens=shape.kernel_blocks * dice.randint(1, 4) * ratio,
        context_parallel=dice.choice([1, 1, 2, 3]) if shape.tensor_parallel * shape.pipeline_parallel < 8 else 1,
        decode_context_parallel=dice.choice([size for size in (1, 2, 3) if replicas % size == 0]),
    )
    if ratio > 1:
        shape = replace(shape, context_parallel=1, decode_context_parallel=1)
    num_needed = max(1, -(-num_tokens // shape.block_tokens))
    shape = replace(shape, num_blocks=num_needed * len(model.groups()) + dice.randint(1, 3))
    try:
        return describe(model, shape, first_address=1 << 41), shape
    except LayoutError:
        # States of different shape cannot lie inside one another: see `arrange`.
        shape = replace(shape, format="token-major")
        return describe(model, shape, first_address=1 << 41), shape


def _tensor_sizes(model: CacheModel) -> list[int]:
    extents = [axis.extent for kept in model.kept() for axis in kept.state.axes if axis.name == kept.divided_axis]
    return [size for size in (1, 2, 3, 4, 6) if all(e % size == 0 or size % e == 0 for e in extents)]


def _tables(dice: random.Random, layout: Layout, shape: EngineShape, num_tokens: int) -> list[list[int]]:
    """One block table per group; groups that share a pool never share a block."""
    pool = dice.sample(range(shape.num_blocks), shape.num_blocks)
    if dice.random() < 0.3:
        pool.sort()
    tables = []
    named = layout.state_named()
    of_groups = {placement.group: named[placement.state] for placement in layout.placements}
    for index, group in enumerate(layout.groups):
        state = of_groups.get(index)
        num_needed = _num_blocks(group, num_tokens // state.compress_ratio if state and state.per_token else 0)
        tables.append(pool[:num_needed])
        pool = pool[num_needed:] if shape.shared_pool else dice.sample(range(shape.num_blocks), shape.num_blocks)
    return [_forgotten(dice, layout, index, table, num_tokens) for index, table in enumerate(tables)]


def _num_blocks(group: CacheGroup, num_tokens: int) -> int:
    share = group.share
    own = sum(token // share.run_tokens % share.num_shares == share.share for token in range(num_tokens))
    return max(1, -(-own // group.block_tokens))


def _forgotten(dice: random.Random, layout: Layout, index: int, table: list[int], num_tokens: int) -> list[int]:
    """Replace blocks that the windows of all states have left by what no block is called."""
    named, group = layout.state_named(), layout.groups[index]
    states = [named[placement.state] for placement in layout.placements if placement.group == index]
    reach = min((_reach(state.window_tokens, state.chunk_tokens, num_tokens) for state in states), default=0)
    gone = _num_blocks(group, reach + 1) - 1 if reach else 0
    filler = dice.choice([-1, group.num_blocks, 0])
    return [filler] * gone + table[gone:] if all(state.per_token for state in states) else table


def _reach(window_tokens: int, chunk_tokens: int, num_tokens: int) -> int:
    """The first token that is still seen after all tokens."""
    if window_tokens:
        return max(0, num_tokens - window_tokens + 1)
    return num_tokens // chunk_tokens * chunk_tokens if chunk_tokens else 0
