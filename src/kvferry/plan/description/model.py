"""What a model keeps of a request, before any rank, block or address: its states, layer by layer.

A model is data. `kvferry.catalog` makes it from a `config.json`; tests and users make their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from kvferry.errors import LayoutError
from kvferry.plan.description.layout import Axis, State


@dataclass(frozen=True, slots=True)
class Kept:
    """One state of a layer. Tensor parallelism divides its axis `divided_axis`; empty when every rank keeps a copy."""

    state: State
    divided_axis: str

    @property
    def num_bytes(self) -> int:
        """Bytes over all ranks, replicas counted once: of one token or entry, or of the whole state when it has no
        tokens."""
        return self.state.item_bytes * prod(axis.extent for axis in self.state.axes)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps. Layers with the same `group` share block tables; `layer` decides the pipeline stage."""

    layer: int
    group: str
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class CacheModel:
    """All that a model keeps of a request. `num_layers` counts the layers that keep nothing too.

    Raises LayoutError when a layer lies outside the model or the states of a group cannot share block tables.
    """

    num_layers: int
    layers: tuple[LayerCache, ...]

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise LayoutError("every number of a model must be at least 1", found=str(self.num_layers))
        for layer in self.layers:
            if not 0 <= layer.layer < self.num_layers:
                expected = f"0 <= layer < {self.num_layers}"
                raise LayoutError("a layer lies outside the model", found=str(layer.layer), expected=expected)
            for kept in layer.kept:
                _check_divided(kept)
        for group in self.groups():
            _check_group(group, [kept.state for layer in self.layers if layer.group == group for kept in layer.kept])

    def groups(self) -> tuple[str, ...]:
        """The cache groups in the order of their first layer."""
        return tuple(dict.fromkeys(layer.group for layer in self.layers))

    def kept(self) -> tuple[Kept, ...]:
        """Every state of every layer, in order."""
        return tuple(kept for layer in self.layers for kept in layer.kept)

    @property
    def bytes_per_token(self) -> int | Fraction:
        """Bytes that one more token adds while no window is full, replicas counted once. On average, and maybe a
        fraction, where several tokens share an entry."""
        return bytes_per_token(self.kept())

    @property
    def lasting_bytes_per_token(self) -> int | Fraction:
        """The same once all windows and chunks are full: what a long request grows by."""
        return bytes_per_token(k for k in self.kept() if not (k.state.window_tokens or k.state.chunk_tokens))

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all states of fixed size, replicas counted once."""
        return sum(kept.num_bytes for kept in self.kept() if not kept.state.per_token)


def bytes_per_token(kept: Iterable[Kept]) -> int | Fraction:
    """Bytes that one more token adds to some states; nothing to those of fixed size."""
    each = [Fraction(one.num_bytes, one.state.compress_ratio) for one in kept if one.state.per_token]
    total = sum(each, Fraction(0))
    return total.numerator if total.denominator == 1 else total


def attention(num_layers: int, num_heads: int, head_dim: int, dtype: str, item_bytes: int) -> CacheModel:
    """A model whose layers are all full attention: per layer a key and a value per token and head."""
    axes = (Axis("head", num_heads), Axis("dim", head_dim))
    return _uniform(num_layers, ("k", "v"), axes, (dtype, item_bytes), divided_axis="head")


def latent(num_layers: int, dim: int, dtype: str, item_bytes: int) -> CacheModel:
    """A model whose layers all keep one latent vector per token, the same on every tensor-parallel rank."""
    return _uniform(num_layers, ("latent",), (Axis("dim", dim),), (dtype, item_bytes), divided_axis="")


def _uniform(
    num_layers: int, kinds: tuple[str, ...], axes: tuple[Axis, ...], item: tuple[str, int], divided_axis: str
) -> CacheModel:
    layers = tuple(
        LayerCache(
            layer,
            "full",
            tuple(
                Kept(State(f"model.layers.{layer}.{kind}", *item, axes, per_token=True), divided_axis) for kind in kinds
            ),
        )
        for layer in range(num_layers)
    )
    return CacheModel(num_layers, layers)


def _check_group(group: str, states: list[State]) -> None:
    if not states:
        raise LayoutError("a cache group keeps something", found=f"{group}: no state")
    if len({state.per_token for state in states}) > 1:
        raise LayoutError("a cache group keeps either tokens or states of fixed size", found=f"{group}: both")
    if len(ratios := {state.compress_ratio for state in states}) > 1:
        found = f"{group}: {', '.join(map(str, sorted(ratios)))} tokens an entry"
        raise LayoutError("the states of a cache group have entries of as many tokens", found=found)


def _check_divided(kept: Kept) -> None:
    names = [axis.name for axis in kept.state.axes]
    if kept.divided_axis and kept.divided_axis not in names:
        raise LayoutError(
            f"state {kept.state.name} cannot be divided along an axis that it does not have",
            found=kept.divided_axis,
            expected=" or ".join(names) or "no axis at all",
        )
    if kept.state.item_bytes < 1 or any(axis.extent < 1 for axis in kept.state.axes):
        raise LayoutError("every number of a model must be at least 1", found=repr(kept.state))
