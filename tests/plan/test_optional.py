"""States that an engine can do without, such as a speculator's: what moves when the other side lacks them."""

from dataclasses import replace

import pytest

from kvferry.errors import IncompatibleError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout, contents
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention
from kvferry.plan.routing.compatibility import moving
from kvferry.plan.routing.route import route

MODEL = attention(num_layers=2, num_heads=4, head_dim=2, dtype="float16", item_bytes=2)
SHAPE = EngineShape(2, 1, 4, 8, "token-major")


def drafting(*, optional: bool, heads: int = 4) -> CacheModel:
    """The same with a draft layer."""
    (layer,) = attention(1, heads, 2, "float16", 2).layers
    names = ("draft.layers.0.k", "draft.layers.0.v")
    states = [replace(kept.state, name=name, optional=optional) for kept, name in zip(layer.kept, names, strict=True)]
    draft = LayerCache(1, "draft", tuple(Kept(state, "head") for state in states))
    return CacheModel(2, (*MODEL.layers, draft))


def engine(model: CacheModel, shape: EngineShape = SHAPE) -> tuple[Layout, ...]:
    return describe(model, shape, 1 << 20)


PLAIN, NEEDS, CAN = engine(MODEL), engine(drafting(optional=False)), engine(drafting(optional=True))
OTHER = engine(drafting(optional=True, heads=2))


def moved(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> set[str]:
    return {leg.state.split(".")[0] for leg in route(sources, targets).legs}


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        (PLAIN, CAN, {"model"}),
        (CAN, PLAIN, {"model"}),
        (CAN, CAN, {"model", "draft"}),
        (NEEDS, CAN, {"model", "draft"}),
        (CAN, NEEDS, {"model", "draft"}),
        (OTHER, CAN, {"model"}),
        (CAN, OTHER, {"model"}),
    ],
)
def test_what_moves_is_what_both_have(sources, targets, expected):
    assert moved(sources, targets) == expected
    assert {name.split(".")[0] for name in moving(sources, targets)} == expected


@pytest.mark.parametrize(
    ("sources", "targets", "says"),
    [
        (PLAIN, NEEDS, "draft.layers.0.k: only the target has it"),
        (NEEDS, PLAIN, "draft.layers.0.k: only the source has it"),
        (OTHER, NEEDS, r"draft.layers.0.k: extents \[2, 2\] at the source, \[4, 2\] at the target"),
        (NEEDS, OTHER, "draft.layers.0.k: extents"),
    ],
)
def test_without_the_rule_it_is_refused(sources, targets, says):
    with pytest.raises(IncompatibleError, match=says):
        route(sources, targets)


def test_the_rest_moves_as_if_the_others_were_not_there():
    one = engine(MODEL, replace(SHAPE, tensor_parallel=1))
    assert route(one, CAN).legs == route(one, PLAIN).legs
    assert route(CAN, one).legs == route(PLAIN, one).legs


def test_a_name_of_what_must_be_kept_leaves_them_out():
    assert contents(*CAN) == contents(*PLAIN) == contents(*OTHER) != contents(*NEEDS)


def test_ranks_that_contradict_one_another_are_told_all_the_same():
    mixed = (CAN[0], OTHER[1])
    with pytest.raises(IncompatibleError, match="describes it differently"):
        route(mixed, CAN)
