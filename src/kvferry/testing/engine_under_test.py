"""An engine as the checks see it: its cache as it describes it, its own way to write and to read, maybe its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import LeaseRequest
from kvferry.testing.elements import Coordinate, complete_entries, element_addresses, own_tokens, value_of
from kvferry.wire.messages import Reference

Element = NDArray[np.uint8]
"""What one token has of one state on this rank: bytes, shaped as the spans of its placement and the item's bytes."""


class Source(Protocol):
    """An engine's agent, which others fetch from, in this process or in another one."""

    @property
    def address(self) -> str:
        """Where its agent listens."""
        ...

    def lease(self, request: LeaseRequest) -> Reference:
        """Open a lease, as `Agent.lease` does."""
        ...

    def notice(self) -> Notice:
        """The next thing that its agent says; waits for it, a minute at most."""
        ...

    def close(self) -> None:
        """End the agent. Where it has a process of its own, kill that. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """One rank of an engine. `write` and `read` use the engine's own view of its cache, never the description: they are
    given the name of a state, the block table of its cache group and the number of a token, or of an entry where
    several tokens share one.

    The cache lies in memory that this process can reach, and nobody uses it during a check. Its agent runs in this
    process, unless `open_source` starts one elsewhere over the same memory; that of a target always runs here.
    """

    cache: Cache
    write: Callable[[str, Sequence[int], int, Element], None]
    read: Callable[[str, Sequence[int], int], Element]
    close: Callable[[], None]
    rank: int = 0
    open_source: Callable[[AgentConfig], Source] | None = None

    @property
    def layout(self) -> Layout:
        return self.cache.layouts[self.rank]

    @property
    def num_tokens(self) -> int:
        """How many tokens are used: two blocks and a bit of a third, or fewer if a cache group or a window has less."""
        groups, states = self.layout.groups, self.layout.states
        blocks = [group.block_tokens * self._ratio(number) for number, group in enumerate(groups)]
        most = [
            group.ring_tokens or size * (group.num_blocks // len(groups))
            for size, group in zip(blocks, groups, strict=True)
        ]
        most += [seen - 1 for state in states for seen in (state.window_tokens, state.chunk_tokens) if seen]
        return min(max(blocks) * 2 + 1, *most)

    def _ratio(self, group: int) -> int:
        """How many tokens an entry of a cache group stands for."""
        named = self.layout.state_named()
        return max(
            (named[place.state].compress_ratio for place in self.layout.placements if place.group == group), default=1
        )

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """A table of falling block numbers for each cache group. Groups that share a pool take different parts."""
        groups = self.layout.groups
        ends = [group.num_blocks * (index + 1) // len(groups) for index, group in enumerate(groups)]
        needed = [-(-self.num_tokens // group.block_tokens) for group in groups]
        return tuple(tuple(range(end - 1, end - 1 - count, -1)) for end, count in zip(ends, needed, strict=True))

    def elements(self) -> Iterator[tuple[State, Placement, int]]:
        """Every state of every token that this rank has."""
        for placement in self.layout.placements:
            state = self.layout.state_named()[placement.state]
            tokens = complete_entries(state, TokenRange(0, self.num_tokens))
            for token, _ in own_tokens(self.layout.groups[placement.group], tokens) if state.per_token else ((0, 0),):
                yield state, placement, token

    def described(self) -> Iterator[tuple[State, int, Coordinate, int]]:
        """Every number of the cache: its state, token and coordinate, and the address where it is described."""
        for placement in self.layout.placements:
            state = self.layout.state_named()[placement.state]
            tokens = complete_entries(state, TokenRange(0, self.num_tokens))
            for found in element_addresses(self.layout, placement, self.tables, tokens):
                yield state, *found


MakeEngine = Callable[[], EngineUnderTest]


def expected_element(state: State, placement: Placement, token: int) -> Element:
    """What an element must hold: every item encodes its state, token and coordinate."""
    shape = tuple(len(span) for span in placement.spans)
    coordinates = product(*(range(span.start, span.stop) for span in placement.spans))
    joined = b"".join(value_of(state, token, coordinate) for coordinate in coordinates)
    return np.frombuffer(joined, np.uint8).reshape(*shape, state.item_bytes)


def fill(engine: EngineUnderTest) -> None:
    """Let the engine write every element itself."""
    for state, placement, token in engine.elements():
        element = expected_element(state, placement, token)
        engine.write(state.name, engine.tables[placement.group], token, element)


def expect_filled(engine: EngineUnderTest) -> None:
    """Raises AssertionError unless the engine itself reads what must be there."""
    for state, placement, token in engine.elements():
        found = engine.read(state.name, engine.tables[placement.group], token)
        wanted = expected_element(state, placement, token)
        assert np.array_equal(found, wanted), f"{state.name}, token {token}: the engine reads other bytes"
