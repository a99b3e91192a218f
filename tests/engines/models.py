"""Random models that mix every kind of cache in the field, each described as data. A seed gives the same model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import CacheModel, Kept, LayerCache


def random_model(dice: random.Random, also: tuple[str, ...] = ()) -> CacheModel:
    """One to four layers, some with two caches, of up to three kinds and those in `also`; sometimes a draft layer of
    another shape."""
    kinds = [*dice.sample(sorted(KINDS), dice.randint(1, 3)), *also]
    num_layers = dice.randint(1, 4)
    heads = dice.choice([1, 2, 3, 4, 6])
    makers = {kind: (KINDS | COMPRESSED)[kind](dice, heads) for kind in kinds}
    layers = []
    for layer in range(num_layers):
        for kind in dice.sample(kinds, dice.choice([1, 1, 2]) if len(kinds) > 1 else 1):
            layers.append(_layer(layer, kind, f"model.layers.{layer}", makers[kind]))
    if dice.random() < 0.2:
        layers.append(_layer(num_layers - 1, "draft", "draft.layers.0", _attention(dice, heads)))
    return CacheModel(num_layers, tuple(layers))


def _layer(layer: int, group: str, prefix: str, parts: tuple[Kept, ...]) -> LayerCache:
    named = tuple(
        Kept(State(f"{prefix}.{group}.{kept.state.name}", *_rest(kept.state)), kept.divided_axis) for kept in parts
    )
    return LayerCache(layer, group, named)


def _rest(state: State) -> tuple[str, int, tuple[Axis, ...], bool, int, int, int]:
    limits = state.window_tokens, state.chunk_tokens
    return state.dtype, state.item_bytes, state.axes, state.per_token, *limits, state.compress_ratio


def _attention(dice: random.Random, heads: int, window: int = 0, chunk: int = 0) -> tuple[Kept, ...]:
    """Grouped-query attention; the value may be narrower than the key."""
    item_bytes, dims = dice.choice([1, 2, 4]), [dice.randint(1, 3), dice.randint(1, 3)]
    if dice.random() < 0.7:
        dims[1] = dims[0]
    return tuple(
        Kept(State(name, "any", item_bytes, (Axis("head", heads), Axis("dim", dim)), True, window, chunk), "head")
        for name, dim in zip("kv", dims, strict=True)
    )


def _latent(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    """A latent per token on every rank, sometimes with the keys and scales of a sparse-attention indexer."""
    indexer = (
        Kept(State("indexer.k", "int8", 1, (Axis("dim", dice.randint(1, 4)),), per_token=True), ""),
        Kept(State("indexer.scale", "float32", 4, (Axis("quant_block", 1),), per_token=True), ""),
    )
    latent = Kept(State("latent", "any", 2, (Axis("dim", dice.randint(1, 5)),), per_token=True), "")
    return (latent, *indexer) if dice.random() < 0.5 else (latent,)


def _compressed(dice: random.Random, heads: int, ratio: int) -> tuple[Kept, ...]:
    """A latent for several tokens, with an indexer's key of the same ones."""
    latent, indexer = Axis("dim", dice.randint(1, 5)), Axis("dim", dice.randint(1, 3))
    return (
        Kept(State("compressed", "any", 2, (latent,), per_token=True, compress_ratio=ratio), ""),
        Kept(State("indexer.k", "any", 1, (indexer,), per_token=True, compress_ratio=ratio), ""),
    )


def _packed(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    """Rows of bytes whose inside is nobody's business."""
    return (Kept(State("latent", "packed", 1, (Axis("byte", dice.randint(3, 11)),), per_token=True), ""),)


def _scaled(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    """A quantised cache with scales per block of elements."""
    return (
        *_attention(dice, heads),
        Kept(State("k_scale", "any", 1, (Axis("head", heads), Axis("quant_block", 2)), per_token=True), "head"),
        Kept(State("v_scale", "any", 1, (Axis("head", heads), Axis("quant_block", 1)), per_token=True), "head"),
    )


def _mamba1(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    channel = Axis("channel", heads * dice.randint(1, 2))
    return (
        _fixed("conv", 2, (channel, Axis("width", dice.randint(1, 3))), "channel"),
        _fixed("ssm", 4, (channel, Axis("state", dice.randint(1, 3))), "channel"),
    )


def _mamba2(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    """Convolution states of x, B and C: x follows the heads, B and C the groups, of which there may be fewer."""
    width = Axis("width", dice.randint(1, 3))
    group = Axis("group", dice.choice([n for n in (1, 2, 3) if heads % n == 0]))
    head, head_dim, state = Axis("head", heads), Axis("head_dim", dice.randint(1, 2)), Axis("state", dice.randint(1, 2))
    return (
        _fixed("conv.x", 2, (head, head_dim, width), "head"),
        _fixed("conv.b", 2, (group, state, width), "group"),
        _fixed("conv.c", 2, (group, state, width), "group"),
        _fixed("ssm", 4, (head, head_dim, state), "head"),
    )


def _delta_net(dice: random.Random, heads: int) -> tuple[Kept, ...]:
    """Convolution states of q, k and v: the value heads are a multiple of the key heads."""
    width, dim = Axis("width", dice.randint(1, 3)), Axis("head_dim", dice.randint(1, 2))
    key = Axis("key_head", dice.choice([n for n in (1, 2, 3) if heads % n == 0]))
    value = Axis("value_head", heads)
    return (
        _fixed("conv.q", 2, (key, dim, width), "key_head"),
        _fixed("conv.k", 2, (key, dim, width), "key_head"),
        _fixed("conv.v", 2, (value, dim, width), "value_head"),
        _fixed("ssm", 4, (value, dim, dim), "value_head"),
    )


def _fixed(name: str, item_bytes: int, axes: tuple[Axis, ...], divided_axis: str) -> Kept:
    return Kept(State(name, "any", item_bytes, axes, per_token=False), divided_axis)


KINDS: dict[str, Callable[[random.Random, int], tuple[Kept, ...]]] = {
    "full": _attention,
    "window": lambda dice, heads: _attention(dice, heads, window=dice.randint(1, 9)),
    "chunk": lambda dice, heads: _attention(dice, heads, chunk=dice.randint(1, 9)),
    "latent": _latent,
    "packed": _packed,
    "scaled": _scaled,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "delta-net": _delta_net,
}
"""What one layer keeps, by kind of cache. Arguments: dice and the number of heads that tensor parallelism divides."""

COMPRESSED: dict[str, Callable[[random.Random, int], tuple[Kept, ...]]] = {
    f"compressed {ratio}": partial(_compressed, ratio=ratio) for ratio in (2, 3, 4)
}
"""The same for layers whose attention is over compressed tokens: so many tokens an entry."""
