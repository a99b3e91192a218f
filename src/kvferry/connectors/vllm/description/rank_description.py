"""A rank's description: the layout, where its groups' block tables come from, and how both are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry import Memory
from kvferry.connectors.vllm.description.groups import GroupFacts
from kvferry.connectors.vllm.description.parts import Part, Parts
from kvferry.errors import LayoutError
from kvferry.layout import CacheGroup, Layout, Placement, Region, State, TokenRange


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's layout, the memory it lies in (one per allocation), and where its groups' block tables come from.

    The layout may have more groups than vLLM: layers of one that must be counted differently are apart here.
    `layer_ends` has for each layer, in the layout's order, how many states there are up to its own.
    """

    layout: Layout
    memories: tuple[Memory, ...]
    groups: tuple[GroupFacts, ...]
    transfer_group_ids: tuple[int, ...]
    layer_ends: Mapping[str, int] = field(default_factory=dict)

    def tables(self, tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """One block table per group of the layout, from one per transferable group of vLLM's."""
        return tuple(tuple(tables[self.transfer_group_ids.index(group.index)]) for group in self.groups)

    @property
    def nowhere(self) -> tuple[tuple[int, ...], ...]:
        """The block tables of a request that has no blocks yet."""
        return ((),) * len(self.groups)

    @property
    def counts_alike(self) -> bool:
        """Whether all groups of the layout count the same: tokens, or pieces of so many."""
        return len({group.whole_tokens for group in self.groups}) == 1

    def num_counted(self, num_tokens: int) -> int:
        """What a request of so many tokens is in what the layout counts: that of the group that has most of it."""
        whole = [TokenRange(0, num_tokens)] * len(self.transfer_group_ids)
        return max(tokens.last for tokens in self.ranges(whole))

    def num_complete(self, num_tokens: int) -> int:
        """How much is complete of a request of which so many tokens are computed, where all groups count alike."""
        return num_tokens // max(1, self.groups[0].whole_tokens)

    def ranges(self, ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
        """What to move of each group of the layout, from the tokens wanted of each transferable group of vLLM's."""
        return tuple(group.range(ranges[self.transfer_group_ids.index(group.index)]) for group in self.groups)


@dataclass(slots=True)
class Building:
    """A layout while it grows: regions by allocation, groups by what they count."""

    states: list[State] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    groups: list[CacheGroup] = field(default_factory=list)
    facts: list[GroupFacts] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    layer_ends: dict[str, int] = field(default_factory=dict)

    def region(self, region: Region) -> int:
        """The number of a region, which may be a new one."""
        if region not in self.regions:
            self.regions.append(region)
        return self.regions.index(region)

    def add(self, index: int, layer: str, parts: Parts, region: int, start: int) -> None:
        """The states of a layer of vLLM's group `index`, whose cache begins at `start` in a region. Raises LayoutError
        for a layer that there is already."""
        group = self._group(GroupFacts(index, parts.whole_tokens, *parts.limits), parts.group)
        for part in parts.parts:
            if any(part.state.name == state.name for state in self.states):
                hint = "report this with the model's name"
                raise LayoutError(f"layer {layer} has the name of another", found=part.state.name, hint=hint)
            self.states.append(part.state)
            self.placements.append(_placement(part, region, group, start))
        self.layer_ends[layer] = len(self.states)

    def described(self, transfer_group_ids: Sequence[int]) -> Described:
        """All of it."""
        layout = Layout(tuple(self.states), tuple(self.regions), tuple(self.groups), tuple(self.placements))
        memories = tuple(Memory(region.address, region.size_bytes, -1) for region in self.regions)
        return Described(layout, memories, tuple(self.facts), tuple(transfer_group_ids), self.layer_ends)

    def _group(self, facts: GroupFacts, group: CacheGroup) -> int:
        for number, known in enumerate(zip(self.facts, self.groups, strict=True)):
            if known == (facts, group):
                return number
        self.facts.append(facts)
        self.groups.append(group)
        return len(self.groups) - 1


def _placement(part: Part, region: int, group: int, start: int) -> Placement:
    return Placement(
        part.state.name,
        region,
        group,
        start + part.offset,
        part.spans,
        part.strides,
        part.block_stride,
        part.token_stride,
    )
