"""Digests over random pairs of engines: equal caches have equal digests whatever the layouts, and others do not."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from engines import oracle
from engines.strategies import Scenario, handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.agent.memory.digests import Digester, HostBytes
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.sampling import STRATUM_TOKENS, chosen
from kvferry.plan.digests.subject import (
    NO_TOKENS,
    NOTHING,
    DigestPolicy,
    Part,
    Subject,
    digest_policy_named,
    seed_of,
    subject_of,
    templates_of,
)
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.transport.base import Memory

many = settings(max_examples=60)
engines = st.one_of(scenarios(), handmade())
policies = st.sampled_from([DigestPolicy.SAMPLED, DigestPolicy.FULL])


class Rank:
    """A layout whose regions lie in real memory, one behind the other."""

    def __init__(self, layout, tables):
        starts = np.cumsum([0] + [region.size_bytes for region in layout.regions])
        self.bytes = np.full(max(1, int(starts[-1])), oracle.POISON, np.uint8)
        base = self.bytes.ctypes.data
        regions = [replace(r, address=base + int(s)) for r, s in zip(layout.regions, starts[:-1], strict=True)]
        self.layout, self.tables = replace(layout, regions=tuple(regions)), tables
        views = {r.address: self.bytes[s : s + r.size_bytes] for r, s in zip(regions, starts[:-1], strict=True)}
        self.memory = oracle.Memory(self.layout, views)
        self.digester = Digester(HostBytes([Memory(base, len(self.bytes), -1)], regions))

    def digest(self, subject: Subject, side: str, num_tokens: int):
        extracts = Extractor(self.layout, side).extracts(subject, self.tables, num_tokens)
        self.digester.start("key", extracts)
        (digested,) = self.digester.run(1 << 40)
        return digested.values


class Pair:
    """One source rank and one target rank of a scenario between which something moves, after it has moved."""

    def __init__(self, scenario, pair, policy, seed, fill=oracle.fill):
        legs = route(scenario.sources, scenario.targets).between(*pair)
        self.last = scenario.last
        self.source = Rank(scenario.sources[pair[0]], scenario.source_tables[pair[0]])
        self.target = Rank(scenario.targets[pair[1]], scenario.target_tables[pair[1]])
        fill(self.source.memory, self.source.tables, TokenRange(0, scenario.last))
        program = bind(legs, self.source.layout, self.target.layout)
        self.copies = copies_for(program, self.source.tables, self.target.tables, scenario.ranges)
        oracle.execute(self.copies, self.source.memory, self.target.memory, {})
        self.subject = subject_of(templates_of(legs, self.target.layout), scenario.ranges, policy, seed)

    def digests(self):
        return (
            self.source.digest(self.subject, "source", self.last),
            self.target.digest(self.subject, "target", self.last),
        )


def pairs_of(scenario):
    return route(scenario.sources, scenario.targets).pairs()


@pytest.mark.uncounted  # Element by element.
@many
@given(engines, policies, st.integers(0, 2**63 - 1))
def test_what_has_moved_has_one_digest_on_both_sides(scenario, policy, seed):
    for pair in pairs_of(scenario):
        ours, theirs = Pair(scenario, pair, policy, seed).digests()
        assert ours == theirs
        assert all(len(value) == 8 for value in ours)


def addresses_of(layout, subject, tables):
    """Every address of what a subject names in one rank, found one element at a time, by state."""
    placements, states = layout.placement_of(), layout.state_named()
    found = {}
    for part in subject.parts:
        for name in part.states:
            placement, per_token = placements[name], states[name].per_token
            tokens = part.seen if per_token else TokenRange(0, 1)
            for token, coordinate, address in oracle.element_addresses(layout, placement, tables, tokens):
                inside = all(s.start <= c < s.stop for c, s in zip(coordinate, part.box, strict=True))
                held = any(s.start <= token % part.tokens.period < s.stop for s in part.tokens.spans)
                if inside and held:
                    found.setdefault(name, []).append(address)
    return found


@many
@given(engines, st.data())
def test_any_wrong_byte_changes_the_full_digest_of_its_state_and_of_no_other(scenario, data):
    for pair in pairs_of(scenario)[:3]:
        moved = Pair(scenario, pair, DigestPolicy.FULL, 0)
        found = addresses_of(moved.target.layout, moved.subject, moved.target.tables)
        if not found:
            assert moved.subject.parts == ()
            continue
        name = data.draw(st.sampled_from(sorted(found)))
        item_bytes = moved.target.layout.state_named()[name].item_bytes
        address = data.draw(st.sampled_from(found[name])) + data.draw(st.integers(0, item_bytes - 1))
        moved.target.memory.at(address, 1)[0] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
        theirs, ours = moved.digests()
        differing = {n for n, a, b in zip(moved.subject.names, theirs, ours, strict=True) if a != b}
        assert differing == {name}


@many
@given(engines, policies)
def test_a_digest_looks_at_nothing_but_what_has_moved(scenario, policy):
    """Neither the free tail of a block nor anybody else's bytes."""
    for pair in pairs_of(scenario)[:3]:
        moved = Pair(scenario, pair, policy, 7)
        before = moved.digests()[1]
        mask = np.ones(len(moved.target.bytes), bool)
        layout = moved.target.layout
        for name, addresses in addresses_of(layout, moved.subject, moved.target.tables).items():
            for address in addresses:
                start = address - moved.target.bytes.ctypes.data
                mask[start : start + layout.state_named()[name].item_bytes] = False
        moved.target.bytes[mask] ^= 0xFF
        assert moved.digests()[1] == before


LONG = TokenRange(0, 1000)
MODEL = attention(num_layers=6, num_heads=4, head_dim=8, dtype="float16", item_bytes=2)


def long_pair(
    policy=DigestPolicy.SAMPLED, seed=1, ranges=(LONG,), formats=("token-major", "head-major"), blocks=(16, 48)
):
    """A thousand tokens between two formats and block sizes, after they have moved."""
    layouts = [
        describe(MODEL, EngineShape(1, 1, size, 1200 // size + 1, name), 1 << 41)
        for name, size in zip(formats, blocks, strict=True)
    ]
    dice = random.Random(3)
    tables = [
        [dice.sample(range(group.num_blocks), -(-1000 // group.block_tokens)) for group in layout.groups]
        for (layout,) in layouts
    ]
    scenario = Scenario("long", *layouts, (tables[0],), (tables[1],), ranges)
    return Pair(scenario, (0, 0), policy, seed, fill=random_bytes)


def random_bytes(memory, tables, tokens):
    dice = np.random.default_rng(5)
    for buffer in memory.buffers.values():
        buffer[:] = dice.integers(0, 256, len(buffer), np.uint8)


def spoil(pair, where):
    """Flip every element of the target for which `where(state, token, coordinate)` holds."""
    layout = pair.target.layout
    for placement in layout.placements:
        for token, coordinate, address in oracle.element_addresses(layout, placement, pair.target.tables, LONG):
            if where(placement.state, token, coordinate):
                pair.target.memory.at(address, 2)[:] ^= 0xFF


WRONG = {
    "a layer": lambda state, token, _: state == "model.layers.3.v",
    "a head": lambda state, token, coordinate: coordinate[0] == 2,
    "a head of one layer": lambda state, token, coordinate: state == "model.layers.5.k" and coordinate[0] == 0,
    "the first token": lambda state, token, _: token == 0,
    "the last token": lambda state, token, _: token == 999,
    "a block of the source": lambda state, token, _: token // 16 == 21,
    "a block of the target": lambda state, token, _: token // 48 == 7,
    "the request": lambda *_: True,
}


@pytest.mark.uncounted  # Element by element over a thousand tokens.
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.slow
def test_a_sample_finds_every_whole_thing_that_is_wrong(what, seed):
    pair = long_pair(seed=seed)
    theirs, ours = pair.digests()
    assert theirs == ours
    spoil(pair, WRONG[what])
    theirs, ours = pair.digests()
    assert theirs != ours


def test_a_sample_is_a_small_part():
    pair = long_pair()
    extracts = Extractor(pair.target.layout, "target").extracts(pair.subject, pair.target.tables, 1000)
    assert sum(extract.num_bytes for extract in extracts) < pair.copies.num_bytes / 100


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_samples_of_all_states_together_look_into_every_stratum(first, count, num_states, seed):
    numbers = range(first, first + count)
    picks = chosen(numbers, STRATUM_TOKENS, num_states, seed)
    assert picks.min() >= first
    assert picks.max() < first + count
    seen = set(picks.ravel().tolist())
    assert {numbers[0], numbers[-1]} <= seen
    whole = range(-(-first // 16), (first + count) // 16)
    assert {number // 16 for number in seen} >= set(whole)
    assert np.array_equal(picks, chosen(numbers, STRATUM_TOKENS, num_states, seed))


def test_the_sample_of_a_seed_is_part_of_the_protocol():
    """Both sides must come to the same: a release that changes these numbers needs another wire version."""
    assert chosen(range(100), 16, 3, 12345).tolist() == [[0, 45, 93, 0], [4, 62, 98, 9], [23, 79, 99, 22]]


def test_a_seed_is_that_of_its_name():
    assert seed_of("a") == seed_of("a") != seed_of("b")
    assert 0 <= seed_of("a") < 1 << 63


def test_policies_have_names():
    assert digest_policy_named("full") is DigestPolicy.FULL
    with pytest.raises(
        ConfigurationError, match="unknown digest policy; found: some; expected: off or sampled or full"
    ):
        digest_policy_named("some")


def fixed(item_bytes, *extents):
    """A state of fixed size, one box on one rank, in a block of its own."""
    axes = tuple(Axis(f"axis{i}", extent) for i, extent in enumerate(extents))
    strides = tuple(item_bytes * math.prod(extents[i + 1 :]) for i in range(len(extents)))
    total = item_bytes * math.prod(extents)
    state = State("s", "any", item_bytes, axes, per_token=False)
    placement = Placement("s", 0, 0, 0, tuple(Span(0, extent) for extent in extents), strides, total, 0)
    layout = Layout((state,), (Region(1 << 20, total * 3, "dram", 0),), (CacheGroup(1, 3, 0),), (placement,))
    return Rank(layout, [[2]]), Subject(
        DigestPolicy.SAMPLED, 9, (Part(("s",), placement.spans, ALL_TOKENS, NO_TOKENS),)
    )


@pytest.mark.parametrize("extents", [(4,), (3, 5), (40, 64, 128), (2000, 3), (1, 1), (7, 4096)])
def test_a_sample_of_a_state_of_fixed_size_is_limited_and_finds_a_wrong_state(extents):
    rank, subject = fixed(4, *extents)
    (extract,) = Extractor(rank.layout, "target").extracts(subject, rank.tables, 0)
    assert extract.num_bytes <= 70 * 1024
    before = rank.digest(subject, "target", 0)
    rank.bytes[: len(rank.bytes) * 2 // 3] ^= 0xFF
    assert rank.digest(subject, "target", 0) == before
    rank.bytes[:] ^= 0xFF
    assert rank.digest(subject, "target", 0) != before


def test_what_was_worked_out_once_is_used_again():
    rank, subject = fixed(4, 3, 5)
    extractor = Extractor(rank.layout, "target")
    first, again = (extractor.extracts(subject, rank.tables, 0) for _ in range(2))
    assert first[0].starts is again[0].starts


def test_off_is_nothing():
    assert subject_of(templates_of((), fixed(4, 1)[0].layout), (), DigestPolicy.OFF, 0) == NOTHING


def test_the_value_of_some_bytes_is_part_of_the_protocol():
    rank, subject = fixed(4, 2)
    rank.bytes[:] = np.arange(len(rank.bytes))
    (value,) = rank.digest(replace(subject, policy=DigestPolicy.FULL), "target", 0)
    assert value == xxhash.xxh3_64_digest(bytes(range(16, 24)))
    assert value.hex() == "b7c621c6fce19fdc"


def two_states(token_strides):
    """Two states with tokens of 4 bytes, each with its own distance between tokens, in blocks of 64 tokens."""
    states = tuple(State(name, "any", 4, (), per_token=True) for name in "ab")
    placements = tuple(
        Placement(name, index, 0, 0, (), (), 64 * stride, stride)
        for index, (name, stride) in enumerate(zip("ab", token_strides, strict=True))
    )
    regions = tuple(Region((index + 1) << 20, 64 * stride, "dram", 0) for index, stride in enumerate(token_strides))
    return Rank(Layout(states, regions, (CacheGroup(64, 1, 0),), placements), [[0]])


def test_states_that_lie_differently_on_one_side_only_are_still_looked_at_in_the_same_tokens():
    part = Part(("a", "b"), (), ALL_TOKENS, TokenRange(0, 64))
    values = set()
    for strides in ((4, 4), (4, 12), (8, 4)):
        rank = two_states(strides)
        for placement in rank.layout.placements:
            where = oracle.element_addresses(rank.layout, placement, rank.tables, TokenRange(0, 64))
            for token, _, address in where:
                rank.memory.at(address, 4)[:] = token
        values.add(rank.digest(Subject(DigestPolicy.SAMPLED, 1, (part,)), "target", 64))
    assert len(values) == 1
