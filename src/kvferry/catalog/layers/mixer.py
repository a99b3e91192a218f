"""One way to mix tokens, and the two kinds of states that it can keep: rows per token, and states of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.dtypes import Item
from kvferry.catalog.config.fields import Fields
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import Kept

RECURRENT = "recurrent"
"""The cache group of states of fixed size."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """Its cache group, its weights, and what it keeps; the states' names lack their layer's."""

    group: str
    num_parameters: int
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a token sees, how many tokens share an entry, and the name of the cache group of all layers that are
    alike in this."""

    group: str
    window_tokens: int
    chunk_tokens: int
    compress_ratio: int = 1

    def row(self, name: str, item: Item, axes: tuple[Axis, ...], divided_axis: str) -> Kept:
        """A state with a row per token or entry; every rank keeps all of it where there is no `divided_axis`."""
        limits = (self.window_tokens, self.chunk_tokens, self.compress_ratio)
        return Kept(State(name, item.dtype, item.num_bytes, axes, True, *limits), divided_axis)


def reach_of(fields: Fields, kind: str) -> Reach:
    """The reach of a layer whose attention is `full`, `window` or `chunk`."""
    if kind == "window":
        tokens = fields.number("sliding_window", "sliding_window_size")
        return Reach(f"window-{tokens}", tokens, 0)
    if kind == "chunk":
        tokens = fields.number("attention_chunk_size")
        return Reach(f"chunk-{tokens}", 0, tokens)
    return Reach("full", 0, 0)


def fixed(name: str, item: Item, axes: tuple[Axis, ...]) -> Kept:
    """A state of fixed size, divided along its first axis."""
    return Kept(State(name, item.dtype, item.num_bytes, axes, per_token=False), axes[0].name)


def kernel_of(fields: Fields, *names: str) -> int:
    """How many inputs a convolution goes over; all but the newest are kept."""
    kernel = fields.number(*names)
    if kernel < 2:
        raise fields.wrong(" or ".join(names), kernel, "at least 2: a convolution over one input has no state")
    return kernel
