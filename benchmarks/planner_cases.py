"""What the planner's benchmark plans, and all that it uses of kvferry."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route

__all__ = [
    "BLOCK_TOKENS",
    "CASES",
    "HEAD_DIM",
    "IDS",
    "ITEM_BYTES",
    "NUM_HEADS",
    "NUM_LAYERS",
    "NUM_TOKENS",
    "Case",
    "block_ids",
    "copies",
    "engines",
    "held_bytes",
    "meet",
    "programs",
    "programs_and_layouts",
]

NUM_LAYERS, NUM_HEADS, HEAD_DIM, ITEM_BYTES = 80, 8, 128, 2
MODEL = attention(NUM_LAYERS, NUM_HEADS, HEAD_DIM, "bfloat16", ITEM_BYTES)
NUM_TOKENS = 131_072
BLOCK_TOKENS = 16
NUM_NEEDED = NUM_TOKENS // BLOCK_TOKENS
IDS = {"random": 1, "runs of 8": 8, "adjacent": NUM_NEEDED}
"""How many blocks follow one another before the next id is drawn."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rank 0 of a target engine with all source ranks that it reads."""

    name: str
    source_tensor_parallel: int
    target_tensor_parallel: int
    format: str


# "packed" is the layout that vLLM's connector asks for: block, head, token, then key and value side by side.
CASES = (
    Case("TP8 to TP4, packed", 8, 4, "packed"),
    Case("TP4 to TP4, packed", 4, 4, "packed"),
    Case("TP1 to TP1, token-major", 1, 1, "token-major"),
)


def engines(case: Case, num_blocks: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Source and target, with a pool of `num_blocks` blocks on each rank."""
    sides = (case.source_tensor_parallel, 1 << 50), (case.target_tensor_parallel, 1 << 51)
    source, target = (
        describe(MODEL, EngineShape(ranks, 1, BLOCK_TOKENS, num_blocks, case.format), first_address)
        for ranks, first_address in sides
    )
    return source, target


def meet(sources: Sequence[Layout], targets: Sequence[Layout]) -> list[Program]:
    """What is computed once per peer when all its ranks are taken together."""
    found = route(sources, targets)
    return [bind(found.between(source, target), sources[source], targets[target]) for source, target in found.pairs()]


def programs(sources: Sequence[Layout], targets: Sequence[Layout]) -> list[Program]:
    """What target rank 0 computes once per peer: one program per source rank that it reads."""
    found = route(sources, targets)
    return [bind(found.between(source, 0), sources[source], targets[0]) for source in found.sources_of(0)]


def programs_and_layouts(case: Case, num_blocks: int) -> object:
    """All that target rank 0 keeps of a peer, from nothing."""
    sides = engines(case, num_blocks)
    return sides, programs(*sides)


def copies(bound: Sequence[Program], source: Sequence[int], target: Sequence[int]) -> list[Copies]:
    """What target rank 0 computes once per request."""
    return [copies_for(program, [source], [target], [TokenRange(0, NUM_TOKENS)]) for program in bound]


def held_bytes(rows: Copies) -> int:
    """Bytes of memory behind the three columns; a column that repeats one number takes that number's."""
    bounds = (np.lib.array_utils.byte_bounds(column) for column in (rows.source, rows.target, rows.length))
    return sum(stop - start for start, stop in bounds)


def block_ids(run: int, num_blocks: int, seed: int) -> list[int]:
    """NUM_NEEDED ids out of a pool: runs of adjacent ones, the runs in random order."""
    starts = list(range(0, num_blocks - run + 1, run))
    random.Random(seed).shuffle(starts)
    return [start + i for start in starts[: NUM_NEEDED // run] for i in range(run)]
