"""What the planner decides for each shipped model is what its golden file says; and the file is right.

That it is right is not the planner's word: totals follow from numbers that are written here by hand, the rows of every
target rank are disjoint and as many bytes as it must hold, and the oracle executes a small copy of each geometry.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import pytest
from engines import oracle
from golden_models import FOLDER, Plan, case_of, filed, golden, model_of, plan_of, planned, rendered

from kvferry import catalog
from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.layout import Axis, Layout, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache
from kvferry.plan.description.tokens import TokenRange, TokenShare

pytestmark = pytest.mark.uncounted
# Models of each kind of cache and each way to divide it; more of a kind have no plan of another kind.
NAMES = sorted(file.stem for file in FOLDER.iterdir())
TOPOLOGIES = [
    pytest.param(name, case_of(asked), id=f"{name}: {asked['name']}")
    for name in NAMES
    for asked in filed(name)["topologies"]
]
FEW_TOKENS = 83
REMEDY = "if the plan is meant to change: .venv/bin/python tests/plan/golden_models.py --write, and read the difference"


@dataclass(frozen=True)
class Part:
    """Worked out by hand from a config: bytes over all layers and ranks, of one token or, when `fixed`, whatever the
    length; `num_shares` is how many ranks can divide it, more of them hold copies."""

    group: str
    num_bytes: int
    num_shares: int
    window: int = 0
    chunk: int = 0
    fixed: bool = False


# Layers * (key and value) * heads * dim * bytes; convolutions keep 3 inputs. 2 bytes are bfloat16, 4 are float32.
HAND = {
    "llama-3.1-8b": (Part("full", 32 * 2 * 8 * 128 * 2, 8),),
    "llama-3.3-70b": (Part("full", 80 * 2 * 8 * 128 * 2, 8),),
    "qwen3-8b": (Part("full", 36 * 2 * 8 * 128 * 2, 8),),
    "tiny": (Part("full", 4 * 2 * 4 * 64 * 4, 4),),
    "qwen3-32b": (Part("full", 64 * 2 * 8 * 128 * 2, 8),),
    "qwen3-235b-a22b": (Part("full", 94 * 2 * 4 * 128 * 2, 4),),
    "mistral-small-3.2-24b": (Part("full", 40 * 2 * 8 * 128 * 2, 8),),
    "mistral-7b": (Part("window-4096", 32 * 2 * 8 * 128 * 2, 8, window=4096),),
    "gemma-3-27b": (
        Part("window-1024", 52 * 2 * 16 * 128 * 2, 16, window=1024),
        Part("full", 10 * 2 * 16 * 128 * 2, 16),
    ),
    "gpt-oss-120b": (Part("window-128", 18 * 2 * 8 * 64 * 2, 8, window=128), Part("full", 18 * 2 * 8 * 64 * 2, 8)),
    "llama-4-scout": (
        Part("chunk-8192", 36 * 2 * 8 * 128 * 2, 8, chunk=8192),
        Part("full", 12 * 2 * 8 * 128 * 2, 8),
    ),
    "deepseek-v2-lite": (Part("full", 27 * (512 + 64) * 2, 1),),
    "deepseek-v3": (Part("full", 61 * (512 + 64) * 2, 1),),
    # The latent, then the indexer's key and its scale.
    "deepseek-v3.2": (Part("full", 61 * ((512 + 64) * 2 + 128 + 4), 1),),
    # Packed: 512 bytes of latent, 4 scales of 4 bytes, 64 rotary elements of 2 bytes: 656.
    "deepseek-v3.2 fp8_ds_mla": (Part("full", 61 * (512 + 4 * 4 + 64 * 2 + 128 + 4), 1),),
    "deepseek-v3.2 fp8_ds_mla draft": (Part("full", (61 + 1) * (656 + 128 + 4), 1),),
    # The convolution of x and the state, in 128 heads; those of B and C, in groups.
    "nemotron-h-8b": (
        Part("recurrent", 24 * 128 * 64 * (3 * 2 + 128 * 4), 128, fixed=True),
        Part("recurrent", 24 * 2 * 8 * 128 * 3 * 2, 8, fixed=True),
        Part("full", 4 * 2 * 8 * 128 * 2, 8),
    ),
    "bamba-9b": (
        Part("recurrent", 29 * 128 * 64 * (3 * 2 + 128 * 2), 128, fixed=True),
        Part("recurrent", 29 * 2 * 1 * 128 * 3 * 2, 1, fixed=True),
        Part("full", 3 * 2 * 8 * 128 * 2, 8),
    ),
    "falcon-h1-7b": (
        Part("full", 44 * 2 * 2 * 128 * 2, 2),
        Part("recurrent", 44 * 24 * 128 * (3 * 2 + 256 * 2), 24, fixed=True),
        Part("recurrent", 44 * 2 * 1 * 256 * 3 * 2, 1, fixed=True),
    ),
    "jamba-1.5-mini": (
        Part("recurrent", 28 * 8192 * (3 * 2 + 16 * 2), 8192, fixed=True),
        Part("full", 4 * 2 * 8 * 128 * 2, 8),
    ),
    # The convolutions of q and k, in 16 heads; that of v and the matrix, in 32.
    "qwen3-next-80b-a3b": (
        Part("recurrent", 36 * 2 * 16 * 128 * 3 * 2, 16, fixed=True),
        Part("recurrent", 36 * 32 * 128 * (3 * 2 + 128 * 2), 32, fixed=True),
        Part("full", 12 * 2 * 2 * 256 * 2, 2),
    ),
}


def text(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text(encoding="utf-8")


def test_every_file_is_of_a_shipped_model_and_has_topologies():
    assert set(NAMES) == {name.split()[0] for name in HAND}
    assert set(NAMES) <= set(catalog.names())
    assert all(len(filed(name)["topologies"]) >= 2 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_what_the_file_says(name):
    expected, found = text(name).splitlines(), rendered(golden(name)).splitlines()
    if found != expected:
        lines = difflib.unified_diff(expected, found, f"golden/{name}.json", "planned now", lineterm="", n=2)
        pytest.fail("\n".join([*list(lines)[:80], REMEDY]), pytrace=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_small_enough_to_be_read(name):
    assert len(text(name)) <= 8192


def hand(name: str, topology: dict[str, Any]) -> tuple[Part, ...]:
    words = [name, topology.get("cache_dtype", ""), "draft" * topology.get("draft_layers", False)]
    return HAND[" ".join(word for word in words if word)]


def moved(part: Part, first: int, last: int) -> int:
    """Tokens that move: those that the next token sees, itself one of the window."""
    if part.window:
        return last - max(first, last - part.window + 1)
    return last - (max(first, last // part.chunk * part.chunk) if part.chunk else first)


def num_copies(part: Part, shape: dict[str, Any]) -> int:
    """How often the target holds each byte. Ranks that share tokens out hold different ones, but the same states of
    fixed size."""
    replicas = max(1, shape["tensor_parallel"] // part.num_shares)
    if part.fixed:
        return replicas * shape.get("context_parallel", 1)
    return replicas // shape.get("decode_context_parallel", 1)


@pytest.mark.parametrize("name", NAMES)
def test_totals_follow_from_numbers_worked_out_by_hand(name):
    for topology in filed(name)["topologies"]:
        shape, tokens = topology["target"], topology["tokens"]
        total, groups = 0, defaultdict(lambda: [0, 0, 0])
        for part in hand(name, topology):
            num_tokens = 0 if part.fixed else moved(part, *tokens)
            copies = num_copies(part, shape)
            total += part.num_bytes * (1 if part.fixed else num_tokens) * copies
            group = groups[part.group]
            group[:] = group[0] + part.num_bytes * part.fixed, group[1] + part.num_bytes * (not part.fixed), num_tokens
        assert total == topology["bytes"]
        assert total == sum(pair["bytes"] * len(pair["ranks"]) for pair in topology["pairs"])
        keys = "fixed_bytes", "bytes_per_token", "moved_tokens"
        assert dict(groups) == {g["name"]: [g.get(key, 0) for key in keys] for g in topology["groups"]}


def held_bytes(plan: Plan, layout: Layout) -> int:
    """What a target rank must hold of the request, placement by placement."""
    states, total = layout.state_named(), 0
    for placement in layout.placements:
        state, share = states[placement.state], layout.groups[placement.group].share
        limits = replace(state, name="", axes=())
        num_tokens = num_held(limits, share, plan.tokens) if state.per_token else 1
        total += num_tokens * state.item_bytes * prod(map(len, placement.spans))
    return total


@lru_cache(maxsize=64)
def num_held(state: State, share: TokenShare, tokens: TokenRange) -> int:
    """Tokens of a share that are still seen, counted one by one; the same for layers that are alike."""
    own = [t for t in range(tokens.first, tokens.last) if t // share.run_tokens % share.num_shares == share.share]
    return sum(oracle.is_seen(state, token, tokens.last) for token in own)


def inside(layout: Layout, starts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether each row lies within one region."""
    first = np.array([region.address for region in layout.regions], np.uint64)
    size = np.array([region.size_bytes for region in layout.regions], np.uint64)
    region = np.searchsorted(first, starts, side="right") - 1
    return bool(np.all(region >= 0) and np.all(stops <= (first + size)[region]))


@pytest.mark.parametrize(("name", "case"), TOPOLOGIES)
def test_the_pairs_cover_each_target_rank_exactly(name, case):
    plan = plan_of(name, case)
    for rank, layout in enumerate(plan.target.layouts):
        pairs = [pair for pair in plan.copies if pair[1] == rank]
        starts = np.concatenate([plan.copies[pair].target for pair in pairs])
        lengths = np.concatenate([plan.copies[pair].length for pair in pairs])
        order = np.argsort(starts)
        starts, stops = starts[order], (starts + lengths)[order]
        assert np.all(stops[:-1] <= starts[1:]), f"rank {rank}: a byte is written twice"
        assert inside(layout, starts, stops)
        assert int(lengths.sum()) == held_bytes(plan, layout)
    for (rank, _), copies in plan.copies.items():
        assert inside(plan.source.layouts[rank], copies.source, copies.source + copies.length)


def shrunken(model: CacheModel, num_stages: int, last: int) -> CacheModel:
    """The first two layers of each cache group, so that every stage has some, and the drafts, with short axes; windows
    and chunks as long as they are for a request of `last` tokens, in proportion."""
    chosen = {
        layer
        for group in model.groups()
        for layer in sorted({each.layer for each in model.layers if each.group == group})[:2]
    }
    number = {layer: index for index, layer in enumerate(sorted(chosen))}
    assert len(number) >= num_stages
    layers = [
        LayerCache(
            number.get(each.layer, len(number) - 1), each.group, tuple(smaller(kept, last) for kept in each.kept)
        )
        for each in model.layers
        if each.layer in chosen or each.kept[0].state.name.startswith("draft")
    ]
    return CacheModel(len(number), tuple(layers))


def smaller(kept: Kept, last: int) -> Kept:
    """Heads and groups stay; channels and what is not divided become few."""
    state = kept.state
    axes = tuple(Axis(axis.name, fewer(axis, axis.name == kept.divided_axis)) for axis in state.axes)
    limits = {"window_tokens": state.window_tokens, "chunk_tokens": state.chunk_tokens}
    limits = {name: -(-limit * FEW_TOKENS // last) for name, limit in limits.items()}
    return replace(kept, state=replace(state, axes=axes, **limits))


def fewer(axis: Axis, divided: bool) -> int:
    if divided:
        return axis.extent if axis.extent <= 128 else axis.extent // 128
    return axis.extent if axis.extent <= 4 else max(2, axis.extent // 128)


def with_small_blocks(shape: EngineShape) -> EngineShape:
    return replace(shape, block_tokens=shape.block_tokens // 4, run_tokens=max(1, shape.run_tokens // 4))


@pytest.mark.parametrize(("name", "case"), TOPOLOGIES)
def test_a_small_copy_of_the_geometry_arrives_byte_by_byte(name, case):
    num_stages = max(case.source.pipeline_parallel, case.target.pipeline_parallel)
    model = shrunken(model_of(name, case), num_stages, case.tokens.last)
    tokens = TokenRange(-(-case.tokens.first * FEW_TOKENS // case.tokens.last), FEW_TOKENS)
    source, target = with_small_blocks(case.source), with_small_blocks(case.target)
    small = replace(case, source=source, target=target, tokens=tokens)
    execute(planned(model, small))


def execute(plan: Plan) -> None:
    """Fill the sources, move the bytes to poisoned targets, look at every byte of these."""
    sources = [oracle.Memory.poisoned(layout) for layout in plan.source.layouts]
    for memory in sources:
        oracle.fill(memory, plan.source.tables, TokenRange(0, plan.tokens.last))
    for rank, layout in enumerate(plan.target.layouts):
        target = oracle.Memory.poisoned(layout)
        written = {start: np.zeros(len(buffer), np.uint8) for start, buffer in target.buffers.items()}
        for pair, copies in plan.copies.items():
            if pair[1] == rank:
                oracle.execute(copies, sources[pair[0]], target, written)
        oracle.expect(target, plan.target.tables, [plan.tokens] * len(layout.groups), written)
