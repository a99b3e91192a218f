"""Where a request is cut between a source that writes and a target that reads."""

from dataclasses import replace

import pytest
from engines.strategies import handmade, handmade_scenario, scenarios
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import BlockTableError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.program_split import token_at
from kvferry.plan.programs.request import volume
from kvferry.plan.programs.stretches import parted, unit_tokens
from kvferry.plan.routing.route import route

MODEL = attention(2, 2, 8, "float32", 4)


def program_of(model=MODEL, tokens_per_block=(4, 6)):
    source, target = (
        describe(model, EngineShape(1, 1, size, 64, "token-major"), 1 << 20)[0] for size in tokens_per_block
    )
    return bind(route([source], [target]).between(0, 0), source, target)


@settings(max_examples=80)
@given(st.one_of(scenarios(), handmade()), st.sampled_from([0.25, 0.5, 2 / 3, 0.9]))
# Ranks that share tokens: units are made of those of one rank.
@example(handmade_scenario(99), 0.25)
def test_each_side_has_a_part_or_nothing_is_shared(scenario, share):
    found = route(scenario.sources, scenario.targets)
    for source, target in found.pairs():
        program = bind(found.between(source, target), scenario.sources[source], scenario.targets[target])
        token = token_at(program, scenario.ranges, share)
        assert token % unit_tokens(program) == 0
        parts = [volume(program, scenario.ranges, part) for part in parted(token)]
        assert tuple(map(sum, zip(*parts, strict=True))) == volume(program, scenario.ranges)
        if token:
            assert all(num_rows and num_bytes for num_rows, num_bytes in parts)


@pytest.mark.parametrize(
    ("ranges", "share", "token"),
    [
        ([(0, 16)], 0.5, 8),
        ([(0, 16)], 2 / 3, 10),
        ([(8, 16)], 0.5, 12),
        ([(7, 16)], 0.5, 12),
        # One unit of two tokens, or not even that, cannot be cut.
        ([(0, 2)], 0.5, 0),
        ([(0, 2)], 0.9, 0),
        ([(0, 3)], 0.9, 2),
        ([(0, 3)], 0.1, 0),
        ([(3, 5)], 0.9, 4),
        ([(4, 4)], 0.5, 0),
        ([(0, 0)], 0.5, 0),
    ],
)
def test_a_share_ends_where_nothing_has_to_be_taken_apart(ranges, share, token):
    assert token_at(program_of(), [TokenRange(*each) for each in ranges], share) == token


AXES = (Axis("dim", 4),)
TOKEN = State("token", "float32", 4, AXES, per_token=True)
TOKEN_TOO = replace(TOKEN, name="token too")
SEEN = State("seen", "float32", 4, AXES, per_token=True, window_tokens=5)


def cut(*states, ranges=(), share=0.5):
    """The token at which a request of a model with these states, each in a group of its own, is cut."""
    layers = tuple(LayerCache(layer, state.name, (Kept(state, ""),)) for layer, state in enumerate(states))
    program = program_of(CacheModel(len(states), layers), (2, 2))
    return token_at(program, ranges or [TokenRange(0, 16)] * len(states), share)


def fixed(num_bytes):
    return State("fixed", "uint8", 1, (Axis("byte", num_bytes),), per_token=False)


def test_what_a_window_has_forgotten_is_nobodys_part():
    """Of 16 tokens the last four move."""
    assert cut(TOKEN) == 8
    assert cut(SEEN) == 14
    assert cut(TOKEN, SEEN) == 8
    assert cut(SEEN, fixed(16)) == 14


def test_groups_of_which_nothing_moves_have_no_say():
    """A prefix that is there already, in one group only."""
    assert cut(TOKEN, TOKEN_TOO, ranges=[TokenRange(8, 16), TokenRange(2, 2)]) == 12


@pytest.mark.parametrize(
    ("num_bytes", "share", "token"),
    # Sixteen tokens have 256 bytes.
    [
        (1, 0.5, 8),
        (64, 0.5, 10),
        (128, 0.5, 12),
        (250, 0.5, 16),
        (256, 0.5, 16),
        (257, 0.5, 0),
        (1024, 0.5, 0),
        (1024, 0.2, 16),
    ],
)
def test_states_of_fixed_size_belong_to_who_reads(num_bytes, share, token):
    assert cut(TOKEN, fixed(num_bytes), share=share) == token


def test_states_of_fixed_size_alone_are_not_shared():
    assert cut(fixed(64)) == 0


def test_a_range_that_runs_backwards_is_found():
    with pytest.raises(BlockTableError):
        token_at(program_of(), [TokenRange(4, 2)], 0.5)
