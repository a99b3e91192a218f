"""From SGLang's pools to our description of the rank. SGLang addresses pages, which are our blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import Memory
from kvferry.connectors.sglang.description.parts import Component, RankFacts, unsupported
from kvferry.connectors.sglang.description.recurrent import recurrent
from kvferry.connectors.sglang.description.rows import Rows, paged
from kvferry.layout import Layout, Region

__all__ = ["Described", "RankFacts", "describe"]

# What has the pages of keys and values, and so no list of its own.
_IN_PAGES = ("dsa",)


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's layout, with a group for each component, and the memory to register: one region per allocation."""

    layout: Layout
    memories: tuple[Memory, ...]
    components: tuple[Component, ...]

    @property
    def nowhere(self) -> tuple[tuple[int, ...], ...]:
        """The block tables of a request that has no pages yet."""
        return ((),) * len(self.components)

    def check_complete(self, kv_args: Any) -> None:
        """Compare with what SGLang would have its own backends move. Raises LayoutError for what is not described."""
        registered = {"": set(kv_args.kv_data_ptrs)}
        for kind, addresses in zip(kv_args.state_types, kv_args.state_data_ptrs, strict=True):
            name = "" if kind.value in _IN_PAGES else str(kind.value)
            # A layer without a state of its own has none of these addresses.
            registered.setdefault(name, set()).update(address for address in addresses if address)
        described = {component.kind: component.buffers for component in self.components}
        unknown = {kind for kind in registered.keys() | described.keys() if registered.get(kind) != described.get(kind)}
        if unknown:
            kinds = ", ".join(sorted(kind or "keys and values" for kind in unknown))
            raise unsupported("SGLang keeps more of a request than kvferry can move from it yet", kinds)


def describe(pool: Any, facts: RankFacts) -> Described:
    """Raises LayoutError for a pool that cannot be described, naming it."""
    components = tuple(_components(pool, facts))
    parts = [(number, part) for number, component in enumerate(components) for part in component.parts]
    regions: dict[int, Region] = {}
    placements = tuple(part.placement(regions, number) for number, part in parts)
    groups = tuple(component.group for component in components)
    layout = Layout(tuple(part.state for _, part in parts), tuple(regions.values()), groups, placements)
    memories = tuple(Memory(region.address, region.size_bytes, -1) for region in regions.values())
    return Described(layout, memories, components)


def _components(pool: Any, facts: RankFacts) -> Sequence[Component]:
    match type(pool).__name__:
        case "SWAKVPool":
            return _with_windows(pool, facts)
        case "HybridLinearKVPool":
            full = Rows(pool.full_kv_pool, tuple(pool.full_attention_layer_id_mapping), facts.num_heads)
            return paged(full, facts), recurrent(pool.mamba_pool, facts)
        case _:
            # A pipeline stage has some of the layers.
            first, num_layers = int(getattr(pool, "start_layer", 0)), int(getattr(pool, "layer_num", 0))
            return (paged(Rows(pool, range(first, first + num_layers), facts.num_heads), facts),)


def _with_windows(pool: Any, facts: RankFacts) -> Sequence[Component]:
    if facts.window_tokens < 1 or getattr(pool, "request_window", None) is not None:
        raise unsupported("how many tokens its layers see is not known", type(pool).__name__)
    numbered = sorted((number, layer, is_window) for layer, (number, is_window) in pool.layers_mapping.items())
    full, window = (tuple(layer for _, layer, is_window in numbered if is_window is wanted) for wanted in (False, True))
    return (
        paged(Rows(pool.full_kv_pool, full, facts.num_heads), facts),
        paged(Rows(pool.swa_kv_pool, window, facts.num_window_heads, facts.window_tokens), facts, "swa"),
    )
