"""States that keep an entry for several tokens: what moves of them, in numbers worked out by hand."""

from dataclasses import replace
from fractions import Fraction

import pytest

from kvferry.errors import IncompatibleError, LayoutError, RequestError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for, seen
from kvferry.plan.programs.stretches import Stretch, stretch_tokens, unit_tokens
from kvferry.plan.routing.route import route


def layer(number: int, ratio: int, window: int = 0) -> LayerCache:
    state = State(f"model.layers.{number}.latent", "any", 2, (Axis("dim", 8),), True, window, compress_ratio=ratio)
    return LayerCache(number, f"every {ratio}", (Kept(state, ""),))


MODEL = CacheModel(2, (layer(0, 4), layer(1, 1)))
ONE = CacheModel(1, (layer(0, 4),))
SHAPE = EngineShape(1, 1, 8, 10, "token-major")


def pair(model: CacheModel = ONE, source: EngineShape = SHAPE, target: EngineShape = SHAPE):
    sides = describe(model, source, 1 << 20)[0], describe(model, target, 1 << 40)[0]
    return bind(route(*((side,) for side in sides)).legs, *sides), sides


def moved(tokens: TokenRange, stretch: Stretch | None = None) -> int:
    """How many entries of 16 bytes move of one layer."""
    program, _ = pair()
    tables = (range(5),)
    part = {} if stretch is None else {"stretch": stretch}
    return copies_for(program, tables, tables, (tokens,), **part).num_bytes // 16


@pytest.mark.parametrize(
    ("first", "last", "entries"),
    [(0, 16, 4), (0, 15, 3), (0, 3, 0), (3, 4, 1), (4, 7, 0), (5, 13, 2), (8, 8, 0)],
)
def test_an_entry_moves_when_its_last_token_is_among_those_wanted(first, last, entries):
    """Whoever has the tokens before `first` has no entry of which one is missing."""
    assert moved(TokenRange(first, last)) == entries


def test_entries_lie_side_by_side_in_a_block():
    """Two of them in one of 8 tokens: the entry of tokens 8 to 11 is the first of the second block."""
    program, (source, target) = pair()
    copies = copies_for(program, [[3, 7]], [[2, 5]], (TokenRange(8, 12),))
    assert copies.source.tolist() == [source.regions[0].address + 7 * 2 * 16]
    assert copies.target.tolist() == [target.regions[0].address + 5 * 2 * 16]
    assert copies.length.tolist() == [16]


def test_each_entry_belongs_to_the_stretch_that_completes_it():
    stretches = [Stretch(TokenRange(start, start + 6), start == 12) for start in (0, 6, 12)]
    assert [moved(TokenRange(0, 18), each) for each in stretches] == [1, 2, 1]


def test_what_is_seen_is_said_in_tokens():
    program, _ = pair(MODEL)
    assert seen(program, (TokenRange(5, 14), TokenRange(13, 13))) == TokenRange(4, 12)
    assert unit_tokens(program) == 8


def test_blocks_of_other_sizes_may_hold_other_numbers_of_entries():
    program, _ = pair(ONE, SHAPE, replace(SHAPE, block_tokens=4))
    assert unit_tokens(program) == 4
    copies = copies_for(program, [[3, 7]], [[2, 5, 1]], (TokenRange(0, 13),))
    assert copies.num_bytes == 3 * 16


def test_a_stretch_has_as_many_tokens_as_their_entries_fill():
    """A unit of 8 tokens is two entries of 16 bytes."""
    assert stretch_tokens(pair()[0], 64) == 16


def test_what_a_long_request_grows_by_has_neither_windows_nor_chunks():
    limited = [
        replace(layer(at, 1), kept=(Kept(replace(layer(at, 1).kept[0].state, **limit), ""),), group=str(at))
        for at, limit in enumerate(({"window_tokens": 8}, {"chunk_tokens": 8}))
    ]
    model = CacheModel(3, (*limited, layer(2, 4)))
    assert (model.bytes_per_token, model.lasting_bytes_per_token) == (16 + 16 + 4, 4)


def test_a_token_adds_its_part_of_an_entry():
    assert MODEL.bytes_per_token == 4 + 16
    assert isinstance(MODEL.bytes_per_token, int)
    assert CacheModel(1, (layer(0, 128),)).bytes_per_token == Fraction(1, 8)


def test_a_digest_covers_entries_that_are_complete():
    extractor = Extractor(pair()[1][0], "source")

    def ask(last: int, num_tokens: int):
        parts = (Part(("model.layers.0.latent",), pair()[1][0].placements[0].spans, ALL_TOKENS, TokenRange(0, last)),)
        return extractor.extracts(Subject(DigestPolicy.FULL, 0, parts), [[0, 1]], num_tokens)

    assert ask(last=3, num_tokens=12)
    with pytest.raises(RequestError, match="covers the wrong tokens"):
        ask(last=3, num_tokens=11)


def test_a_digest_counts_one_thing_in_a_part():
    (layout,) = describe(MODEL, SHAPE, 1 << 20)
    names = tuple(state.name for state in layout.states)
    parts = (Part(names, layout.placements[0].spans, ALL_TOKENS, TokenRange(0, 1)),)
    with pytest.raises(RequestError, match="count other things"):
        Extractor(layout, "source").extracts(Subject(DigestPolicy.FULL, 0, parts), [[0], [0]], 8)


def test_engines_that_compress_differently_are_told():
    sources, targets = describe(ONE, SHAPE, 1 << 20), describe(CacheModel(1, (layer(0, 8),)), SHAPE, 1 << 40)
    with pytest.raises(IncompatibleError, match="tokens an entry 4 at the source, 8 at the target"):
        route(sources, targets)


@pytest.mark.parametrize(
    ("model", "shape", "says"),
    [
        (ONE, replace(SHAPE, block_tokens=6), "whole entries .* found: 6 tokens a block; expected: a multiple of 4"),
        (ONE, replace(SHAPE, kernel_blocks=4), "whole entries .* found: 2 tokens a block; expected: a multiple of 4"),
        (ONE, replace(SHAPE, context_parallel=2), "compressed tokens .* cannot be divided among ranks"),
        (ONE, replace(SHAPE, decode_context_parallel=2, tensor_parallel=2), "cannot be divided among ranks"),
    ],
)
def test_an_engine_that_cannot_hold_entries_is_refused(model, shape, says):
    with pytest.raises(LayoutError, match=says):
        describe(model, shape, 1 << 20)


def test_states_of_a_group_have_entries_of_as_many_tokens():
    mixed = LayerCache(0, "both", (*layer(0, 4).kept, *layer(1, 1).kept))
    with pytest.raises(LayoutError, match="entries of as many tokens; found: both: 1, 4 tokens an entry"):
        CacheModel(1, (mixed,))
