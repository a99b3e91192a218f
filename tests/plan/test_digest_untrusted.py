"""Subjects come from peers: what makes no sense, or is not there, is refused before a byte is read."""

import pytest

from kvferry.errors import FerryError, LayoutError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange, TokenSet
from kvferry.plan.digests import extractor as extractors
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import MAX_PARTS, NO_TOKENS, NOTHING, DigestPolicy, Part, Subject

SEEN = TokenRange(0, 6)
BOX = (Span(0, 2), Span(0, 4))
GOOD = Part(("model.layers.0.k", "model.layers.1.v"), BOX, ALL_TOKENS, SEEN)
MODEL = attention(2, 2, 4, "float32", 4)
LAYOUT = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
TABLES = ((3, 5),)


def part(states=GOOD.states, box=BOX, tokens=ALL_TOKENS, seen=SEEN):
    return Part(states, box, tokens, seen)


@pytest.mark.parametrize(
    "made",
    [
        lambda: part(states=()),
        lambda: part(seen=TokenRange(-1, 3)),
        lambda: part(seen=TokenRange(4, 3)),
        lambda: part(seen=TokenRange(0, 1 << 60)),
        lambda: part(tokens=TokenSet(4, ())),
        lambda: part(tokens=TokenSet(4, (Span(2, 3), Span(0, 1)))),
        lambda: part(tokens=TokenSet(4, (Span(2, 5),))),
        lambda: part(tokens=TokenSet(1 << 40, (Span(0, 1),))),
        lambda: part(tokens=TokenSet(0, (Span(0, 1),))),
        lambda: Subject(DigestPolicy.OFF, 0, (GOOD,)),
        lambda: Subject(DigestPolicy.FULL, 0, (GOOD,) * (MAX_PARTS + 1)),
        lambda: Subject(DigestPolicy.SAMPLED, -1, ()),
        lambda: Subject(DigestPolicy.SAMPLED, 1 << 63, ()),
    ],
)
def test_what_makes_no_sense_cannot_be_built(made):
    with pytest.raises(LayoutError):
        made()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (part(states=("model.layers.9.k",)), "does not hold; found: model.layers.9.k"),
        (part(box=BOX[:1]), "more of model.layers.0.k than this rank holds"),
        (part(box=(Span(0, 3), Span(0, 4))), r"found: \[0, 3\) x \[0, 4\); expected: \[0, 2\) x \[0, 4\)"),
        (part(box=(Span(0, 2), Span(1, 5))), "more of"),
        (part(seen=TokenRange(0, 8)), r"wrong tokens; found: \[0, 8\); expected: some of 7 tokens"),
        (part(seen=NO_TOKENS), "wrong tokens"),
        (part(tokens=TokenSet(9, (Span(8, 9),))), "wrong tokens"),
        (part(states=("model.layers.0.k",) * 5, seen=TokenRange(0, 7)), "more than the cache holds"),
        (part(states=("fixed",), box=(Span(0, 2),)), "wrong tokens; .* none: the states are of fixed size"),
        (part(states=("fixed", "mixed"), box=(Span(0, 2),), seen=NO_TOKENS), "mixes states"),
    ],
)
def test_what_is_not_there_is_refused(wrong, says):
    layout = LAYOUT if wrong.states[0].startswith("model") else MIXED
    with pytest.raises(FerryError, match=says):
        Extractor(layout, "source").extracts(Subject(DigestPolicy.FULL, 0, (wrong,)), TABLES, 7)


def one(name, per_token, offset):
    state = State(name, "any", 4, (Axis("head", 2),), per_token)
    return state, Placement(name, 0, 0 if per_token else 1, offset, (Span(0, 2),), (4,), 64, 8 if per_token else 0)


STATES, PLACEMENTS = zip(one("fixed", False, 0), one("mixed", True, 8), strict=True)
MIXED = Layout(STATES, (Region(1 << 20, 1024, "dram", 0),), (CacheGroup(4, 8, 0), CacheGroup(1, 8, 0)), PLACEMENTS)


@pytest.mark.parametrize("tables", [(), ((3,),), ((3, 99),), ((3, 3),)])
def test_block_tables_must_reach_as_far(tables):
    with pytest.raises(FerryError, match="source"):
        Extractor(LAYOUT, "source").extracts(Subject(DigestPolicy.SAMPLED, 0, (GOOD,)), tables, 6)


def test_tokens_of_another_share_are_refused():
    shape = EngineShape(1, 1, 4, 8, "token-major", context_parallel=2, run_tokens=2)
    extractor = Extractor(describe(MODEL, shape, 1 << 20)[0], "source")
    ours, theirs = (part(tokens=TokenSet(4, (Span(at, at + 2),))) for at in (0, 2))
    extractor.extracts(Subject(DigestPolicy.FULL, 0, (ours,)), TABLES, 6)
    for wrong in (theirs, GOOD):
        with pytest.raises(FerryError, match="that this rank does not hold"):
            extractor.extracts(Subject(DigestPolicy.FULL, 0, (wrong,)), TABLES, 6)


def test_nothing_is_nothing():
    assert Extractor(LAYOUT, "source").extracts(NOTHING, TABLES, 6) == ()
    assert NOTHING.names == ()


def test_only_so_much_is_remembered(monkeypatch):
    """Peers make subjects up; what was worked out for them does not pile up."""
    monkeypatch.setattr(extractors, "MAX_KNOWN", 2)
    extractor = Extractor(LAYOUT, "source")
    for start in (0, 1, 2, 3):
        box = (Span(0, 2), Span(start, 4))
        extractor.extracts(Subject(DigestPolicy.FULL, 0, (part(box=box),)), TABLES, 6)
    assert len(extractor._known) <= 2
