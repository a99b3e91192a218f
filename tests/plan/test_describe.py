"""Whole engines from a handful of numbers: what each rank holds, and what cannot be divided."""

from dataclasses import replace

import pytest

from kvferry.errors import LayoutError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention, latent
from kvferry.plan.description.tokens import UNSHARED, TokenShare

MLA = latent(num_layers=2, dim=4, dtype="int8", item_bytes=1)
GQA = attention(num_layers=2, num_heads=4, head_dim=2, dtype="float16", item_bytes=2)
SHAPE = EngineShape(1, 1, 8, 4, "token-major")
FIXED = Kept(State("ssm", "float32", 4, (Axis("head", 2), Axis("width", 3)), per_token=False), "head")
TOKENS = Kept(State("k", "float32", 4, (Axis("head", 2),), per_token=True), "head")


def with_layers(*kept: tuple[Kept, ...]) -> CacheModel:
    return CacheModel(len(kept), tuple(LayerCache(index, f"group {index}", of) for index, of in enumerate(kept)))


def test_a_group_that_keeps_nothing_is_refused():
    with pytest.raises(LayoutError, match="group 1: no state"):
        with_layers((TOKENS,), ())


def shares_of(model, **changes):
    return [layout.groups[0].share for layout in describe(model, replace(SHAPE, **changes), 0)]


def test_ranks_of_their_own_and_ranks_that_would_hold_the_same_share_the_tokens():
    assert shares_of(MLA, context_parallel=2, run_tokens=4) == [TokenShare(2, 0, 4), TokenShare(2, 1, 4)]
    assert shares_of(MLA, tensor_parallel=4, decode_context_parallel=2) == [TokenShare(2, i % 2) for i in range(4)]
    both = shares_of(MLA, context_parallel=2, tensor_parallel=3, decode_context_parallel=3)
    assert both == [TokenShare(6, share) for share in range(6)]


def test_without_context_parallelism_the_size_of_a_run_does_not_matter():
    assert shares_of(MLA, run_tokens=16) == [UNSHARED]


def test_tokens_are_shared_out_only_among_ranks_that_would_hold_the_same():
    shape = replace(SHAPE, tensor_parallel=8, decode_context_parallel=2)
    assert len(describe(GQA, shape, 0)) == 8
    with pytest.raises(
        LayoutError,
        match=r"state model.layers.0.k cannot be divided among ranks; found: 4 shares; ranks that hold the same: 2",
    ):
        describe(GQA, replace(shape, decode_context_parallel=4), 0)


def test_kernel_blocks_must_divide_a_block():
    with pytest.raises(LayoutError, match="kernel blocks must divide a block; found: 3 in a block of 8 tokens"):
        replace(SHAPE, kernel_blocks=3)


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel", "block_tokens", "num_blocks", "run_tokens"])
@pytest.mark.parametrize("other", ["context_parallel", "decode_context_parallel", "kernel_blocks"])
def test_no_number_of_an_engine_may_be_less_than_one(name, other):
    for wrong in ({name: 0}, {other: 0}, {name: -1}):
        with pytest.raises(LayoutError, match="every size of an engine must be at least 1"):
            replace(SHAPE, **wrong)


def test_a_model_that_keeps_nothing_has_ranks_without_memory():
    for shared_pool in (False, True):
        (layout,) = describe(CacheModel(3, ()), replace(SHAPE, shared_pool=shared_pool), 0)
        assert (layout.regions, layout.groups, layout.placements) == ((), (), ())


def test_a_shared_pool_has_one_memory_and_blocks_as_large_as_the_largest():
    shape = replace(SHAPE, shared_pool=True, kernel_blocks=2)
    (layout,) = describe(with_layers((FIXED,), (TOKENS,)), shape, 0)
    (region,) = layout.regions
    strides = {placement.state: placement.block_stride for placement in layout.placements}
    assert region.size_bytes == 4 * 64  # 8 tokens of 8 bytes; the other group needs 24
    assert strides == {"ssm": 64, "k": 32}  # the distance between kernel blocks
    assert [group.kernel_blocks for group in layout.groups] == [1, 2]


def test_states_of_fixed_size_follow_one_another_in_a_block_whatever_the_format():
    other = Kept(replace(FIXED.state, name="conv", item_bytes=2), "head")
    (layout,) = describe(with_layers((FIXED, other)), replace(SHAPE, format="HNDKBL"), 0)
    assert [(p.offset, p.block_stride, p.strides, p.token_stride) for p in layout.placements] == [
        (0, 36, (12, 4), 0),
        (24, 36, (6, 2), 0),
    ]
    (layout,) = describe(with_layers((FIXED, other)), replace(SHAPE, outer_axis="width"), 0)
    assert [placement.strides for placement in layout.placements] == [(4, 8), (2, 4)]


def test_a_format_of_all_layers_in_one_block():
    (layout,) = describe(GQA, replace(SHAPE, format="block-head-major"), 100)
    assert [region.address for region in layout.regions] == [100]
    assert {placement.block_stride for placement in layout.placements} == {4 * 4 * 2 * 2 * 8}
    assert [placement.offset for placement in layout.placements] == [0, 128, 256, 384]
    assert {(placement.strides, placement.token_stride) for placement in layout.placements} == {((32, 2), 4)}


HEADS = (Axis("head", 2),)


def kept(name="k", axes=HEADS, divided="head", per_token=True, item_bytes=1):
    return Kept(State(name, "int8", item_bytes, axes, per_token), divided)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: CacheModel(0, ()), "at least 1; found: 0"),
        (lambda: CacheModel(2, (LayerCache(2, "full", ()),)), "outside the model; found: 2; expected: 0 <= layer < 2"),
        (lambda: CacheModel(2, (LayerCache(-1, "full", ()),)), "outside the model; found: -1"),
        (lambda: with_layers((kept(), kept("s", per_token=False))), "either tokens or states of fixed size"),
        (lambda: with_layers((kept(divided="dim"),)), "an axis that it does not have; found: dim; expected: head"),
        (lambda: with_layers((kept(axes=()),)), "found: head; expected: no axis at all"),
        (lambda: with_layers((kept(item_bytes=0),)), "every number of a model must be at least 1"),
        (lambda: with_layers((kept(axes=(Axis("head", 0),)),)), "every number of a model must be at least 1"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(build, says):
    with pytest.raises(LayoutError, match=says):
        build()


def test_the_bytes_of_a_model():
    model = with_layers((FIXED,), (TOKENS, replace(TOKENS, state=replace(TOKENS.state, name="v", item_bytes=2))))
    assert (model.bytes_per_token, model.fixed_bytes) == (2 * 4 + 2 * 2, 2 * 3 * 4)


def test_states_of_different_shape_cannot_lie_inside_one_another():
    wide = Kept(State("v", "float32", 4, (Axis("head", 2), Axis("dim", 3)), per_token=True), "head")
    narrow = Kept(State("k", "float32", 4, (Axis("head", 2), Axis("dim", 2)), per_token=True), "head")
    with pytest.raises(
        LayoutError,
        match=r"interleave states of different shapes; found: v, k: \[2, 3\] along D; hint: choose a format",
    ):
        describe(with_layers((wide, narrow)), replace(SHAPE, format="BNHDLK"), 0)


def test_the_number_of_ranks():
    shape = EngineShape(2, 3, 8, 4, "token-major", context_parallel=5, decode_context_parallel=2)
    assert shape.num_ranks == 2 * 3 * 5
