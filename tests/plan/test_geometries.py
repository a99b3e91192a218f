"""The geometries of the field, one by one, checked with dictionaries: which byte of a source is where in a target."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention, latent
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route

SOURCE, TARGET = 1 << 41, 1 << 52


def elements(layout: Layout, tables, num_tokens: int):
    """{(state, token, coordinate): address}; a later token overwrites what a ring had in its place."""
    states, found = {state.name: state for state in layout.states}, {}
    for held in layout.placements:
        state, group = states[held.state], layout.groups[held.group]
        share, small = group.share, group.block_tokens // group.kernel_blocks
        mine = [t for t in range(num_tokens) if t // share.run_tokens % share.num_shares == share.share]
        for number, token in enumerate(mine) if state.per_token else [(0, 0)]:
            place = number % group.ring_tokens if group.ring_tokens else number
            block = tables[held.group][place // group.block_tokens]
            slot = place % group.block_tokens
            start = layout.regions[held.region].address + held.offset
            start += (
                block * group.kernel_blocks + slot // small
            ) * held.block_stride + slot % small * held.token_stride
            for where in product(*(range(span.start, span.stop) for span in held.spans)):
                steps = [(c - span.start) * step for c, span, step in zip(where, held.spans, held.strides, strict=True)]
                found[state.name, token, where] = start + sum(steps)
    return found


def seen(state: State, token: int, last: int) -> bool:
    if state.chunk_tokens:
        return token // state.chunk_tokens == last // state.chunk_tokens
    return not state.window_tokens or last - token < state.window_tokens


def tables_of(layouts, num_tokens, groups_share_blocks):
    """Scattered blocks; with a shared pool no two groups have the same."""
    dice, found = random.Random(7), []
    for layout in layouts:
        tables, used = [], 0
        for group in layout.groups:
            kept = min(num_tokens, group.ring_tokens) if group.ring_tokens else num_tokens
            needed = max(1, -(-kept // group.block_tokens))
            ids = list(range(used, used + needed) if groups_share_blocks else range(group.num_blocks))
            dice.shuffle(ids)
            tables.append(ids[:needed])
            used += needed
        found.append(tables)
    return found


def moved(sources, targets, ranges, *, groups_share_blocks=False) -> int:
    """Run a request and compare every byte; how many bytes have arrived."""
    last = max(tokens.last for tokens in ranges)
    source_tables = tables_of(sources, last, groups_share_blocks)
    target_tables = tables_of(targets, last, groups_share_blocks)
    found, total = route(sources, targets), 0
    for rank, target in enumerate(targets):
        states = {state.name: state for state in target.states}
        group = {placement.state: placement.group for placement in target.placements}
        wanted = {}
        for key, address in elements(target, target_tables[rank], last).items():
            state, tokens = states[key[0]], ranges[group[key[0]]]
            if not state.per_token or (tokens.first <= key[1] < tokens.last and seen(state, key[1], tokens.last)):
                wanted |= {address + byte: (*key, byte) for byte in range(state.item_bytes)}
        arrived = {}
        for source_rank in found.sources_of(rank):
            source = sources[source_rank]
            program = bind(found.between(source_rank, rank), source, target)
            copies = copies_for(program, source_tables[source_rank], target_tables[rank], ranges)
            held = elements(source, source_tables[source_rank], last)
            sizes = {state.name: state.item_bytes for state in source.states}
            at = {address + byte: (*key, byte) for key, address in held.items() for byte in range(sizes[key[0]])}
            rows = zip(copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True)
            for start, goal, length in rows:
                for byte in range(length):
                    assert goal + byte not in arrived
                    arrived[goal + byte] = at[start + byte]
        assert arrived == wanted
        total += len(arrived)
    return total


def engine(model, address, tp=1, pp=1, block=4, form="token-major", **more):
    return describe(model, EngineShape(tp, pp, block, 64, form, **more), address)


def pair(model, source, target):
    return engine(model, SOURCE, **source), engine(model, TARGET, **target)


def per_token(name, axes, item_bytes=1, **limits):
    return Kept(State(name, "any", item_bytes, axes, True, **limits), "")


def of_layers(*groups: tuple[str, tuple[Kept, ...]]) -> CacheModel:
    return CacheModel(len(groups), tuple(LayerCache(i, group, kept) for i, (group, kept) in enumerate(groups)))


HEADS = attention(num_layers=5, num_heads=6, head_dim=2, dtype="float16", item_bytes=2)
ROWS = of_layers(("full", (per_token("latent", (Axis("byte", 656),)),)))
SMALL = of_layers(("full", (per_token("latent", (Axis("byte", 3),)),)))
DRAFT = of_layers(
    ("full", (per_token("latent", (Axis("dim", 4),), 2), per_token("indexer", (Axis("dim", 3),)))),
    ("window", (per_token("k", (Axis("dim", 2),), 2, window_tokens=9),)),
    ("chunk", (per_token("v", (Axis("dim", 2),), 1, chunk_tokens=8),)),
)


@pytest.mark.parametrize(
    ("model", "source", "target", "tokens", "num_copies"),
    [
        (HEADS, {"tp": 3, "pp": 3}, {"tp": 2, "pp": 2, "block": 16}, (3, 21), 1),
        (HEADS, {"tp": 6, "pp": 2, "form": "HBLKDN"}, {"tp": 2, "pp": 5}, (0, 18), 1),
        (HEADS, {"tp": 12}, {"tp": 1, "form": "block-major"}, (5, 6), 1),
        (HEADS, {"tp": 2}, {"tp": 12, "form": "head-major"}, (1, 17), 2),
        (HEADS, {"block": 16, "kernel_blocks": 4}, {"block": 6, "form": "BLHKND"}, (2, 33), 1),
        (HEADS, {"block": 16, "kernel_blocks": 2}, {"block": 12, "kernel_blocks": 4}, (16, 48), 1),
        (ROWS, {"tp": 8, "decode_context_parallel": 4}, {"tp": 4, "decode_context_parallel": 2}, (17, 50), 2),
        (ROWS, {"tp": 4, "decode_context_parallel": 4, "run_tokens": 4, "block": 8}, {"tp": 2}, (0, 41), 2),
        (SMALL, {"context_parallel": 8}, {"context_parallel": 4, "run_tokens": 16, "block": 16}, (9, 190), 1),
        (SMALL, {"context_parallel": 4, "run_tokens": 16}, {"context_parallel": 8, "block": 3}, (64, 192), 1),
        (SMALL, {"context_parallel": 3, "run_tokens": 5}, {"context_parallel": 4, "run_tokens": 2}, (1, 150), 1),
        (SMALL, {"context_parallel": 2, "tp": 4, "decode_context_parallel": 2}, {"context_parallel": 3}, (7, 70), 1),
        (SMALL, {"context_parallel": 4, "block": 8, "kernel_blocks": 4}, {"block": 7}, (30, 31), 1),
        (SMALL, {}, {"block": 16}, (24, 24), 1),
    ],
)
def test_every_parallelism_and_memory_format(model, source, target, tokens, num_copies):
    """`num_copies`: how many target ranks hold the same tokens of the same heads."""
    num_bytes = moved(*pair(model, source, target), [TokenRange(*tokens)])
    assert num_bytes == (tokens[1] - tokens[0]) * model.bytes_per_token * num_copies


@pytest.mark.parametrize(
    ("ranges", "num_bytes"),
    [
        ([(0, 27), (0, 27), (0, 27)], 27 * 11 + 8 * 4 + 3 * 2),
        ([(13, 27), (20, 27), (26, 27)], 14 * 11 + 7 * 4 + 1 * 2),
        ([(0, 24), (0, 24), (0, 24)], 24 * 11 + 8 * 4 + 0),
        ([(24, 24), (0, 5), (0, 7)], 0 + 5 * 4 + 7 * 2),
    ],
    ids=["all", "a prefix per group", "a chunk ends with the last token", "groups that end elsewhere"],
)
@pytest.mark.parametrize("shared_pool", [False, True])
def test_groups_with_ranges_of_their_own(ranges, num_bytes, shared_pool):
    sides = pair(DRAFT, {"block": 16, "shared_pool": True}, {"block": 4, "shared_pool": shared_pool})
    wanted = [TokenRange(*tokens) for tokens in ranges]
    assert moved(*sides, wanted, groups_share_blocks=True) == num_bytes


def ring(address, ring_tokens, block_tokens, kernel_blocks):
    state = State("s", "any", 2, (Axis("dim", 2),), True, window_tokens=6)
    group = CacheGroup(block_tokens, 16, ring_tokens, kernel_blocks)
    placement = Placement("s", 0, 0, 0, (Span(0, 2),), (2,), 4 * group.kernel_tokens, 4)
    return Layout((state,), (Region(address, 64 * block_tokens, "dram", 0),), (group,), (placement,))


@pytest.mark.parametrize("last", [0, 1, 5, 6, 35, 36, 37, 41])
@pytest.mark.parametrize("sizes", [((7, 2, 1), (10, 4, 2)), ((5, 8, 2), (0, 16, 1)), ((40, 3, 3), (5, 5, 1))])
def test_rings_of_any_size_hold_what_the_window_needs(sizes, last):
    sides = (ring(SOURCE, *sizes[0]),), (ring(TARGET, *sizes[1]),)
    assert moved(*sides, [TokenRange(0, last)]) == min(last, 5) * 4


CONV = {"x": 4, "B": 2, "C": 2}


def conv(address: int, tp: int, width_major: bool) -> list[Layout]:
    """x, B and C of a convolution in one state: each rank's channels side by side, per width row or as a whole."""
    layouts = []
    for rank in range(tp):
        held = {name: Span(rank * n // tp, (rank + 1) * n // tp) for name, n in CONV.items()}
        channels = sum(map(len, held.values()))
        states, placements, first = [], [], 0
        for name, span in held.items():
            states.append(State(name, "any", 2, (Axis("channel", CONV[name]), Axis("width", 3)), False))
            strides = (2, 2 * channels) if width_major else (6, 2)
            offset = first * (2 if width_major else 6)
            placements.append(Placement(name, 0, 0, offset, (span, Span(0, 3)), strides, 6 * channels, 0))
            first += len(span)
        region = Region(address + (rank << 40), 6 * channels * 4, "dram", 0)
        layouts.append(Layout(tuple(states), (region,), (CacheGroup(1, 4, 0),), tuple(placements)))
    return layouts


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("source_width_major", [False, True])
@pytest.mark.parametrize("target_width_major", [False, True])
def test_parts_of_a_convolution_interleaved_per_row(source_tp, target_tp, source_width_major, target_width_major):
    sides = conv(SOURCE, source_tp, source_width_major), conv(TARGET, target_tp, target_width_major)
    assert moved(*sides, [TokenRange(5, 5)]) == prod([sum(CONV.values()), 3, 2])


@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_a_source_rank_that_nobody_reads_is_told_by_a_target_rank_that_exists(num_targets):
    found = route(*pair(SMALL, {"tp": 7}, {"tp": num_targets}))
    assert len(found.pairs()) == num_targets
    assert sorted(s for target in range(num_targets) for s in found.sources_of(target)) == list(range(7))
    assert {target for source in range(7) for target in found.targets_of(source)} == set(range(num_targets))


def test_target_ranks_share_the_telling_of_sources_that_nobody_reads():
    """One latent layer on 8 replicas, read by two ranks: each also tells three of the other six."""
    model = latent(num_layers=1, dim=4, dtype="int8", item_bytes=1)
    found = route(
        describe(model, EngineShape(8, 1, 4, 4, "token-major"), 1 << 20),
        describe(model, EngineShape(2, 1, 4, 4, "token-major"), 1 << 50),
    )
    assert [len(found.sources_of(rank)) for rank in (0, 1)] == [4, 4]
