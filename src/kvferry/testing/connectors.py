"""The contract of a connector, as checks that every engine must pass, whatever its cache looks like.

Hand each check a function that makes an engine: its cache as it describes it, and the engine's own way to write and
read it. The checks are the cases of a test, as in `tests/connectors/test_contract_of_engines.py`.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice, new_lease_id
from kvferry.agent.loop.agent import Agent
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timeouts import Timing
from kvferry.testing.engines import oracle
from kvferry.transport.base import Completion, Ticket, Transport
from kvferry.transport.registry import open_transports
from kvferry.wire.messages import Reason, Reference

Element = NDArray[np.uint8]
"""What one token has of one state on this rank: bytes, shaped as the spans of its placement and the item's bytes."""

NOTICE_S = 60.0
LEASE_S = 30.0
SHORT_LEASE_S = 0.2


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """One rank of an engine. `write` and `read` use the engine's own view of its cache, never the description: they are
    given the name of a state, the block table of its cache group and the number of a token.

    The cache lies in memory that this process can reach, and nobody uses it during a check.
    """

    cache: Cache
    write: Callable[[str, Sequence[int], int, Element], None]
    read: Callable[[str, Sequence[int], int], Element]
    close: Callable[[], None]
    rank: int = 0

    @property
    def layout(self) -> Layout:
        return self.cache.layouts[self.rank]

    @property
    def num_tokens(self) -> int:
        """Two blocks and a part of a third, or what the smallest cache group keeps."""
        most = [group.ring_tokens or group.block_tokens * group.num_blocks for group in self.layout.groups]
        return min(max(group.block_tokens for group in self.layout.groups) * 2 + 1, *most)

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that are no neighbours, from the end."""
        needed = [-(-self.num_tokens // group.block_tokens) for group in self.layout.groups]
        groups = zip(self.layout.groups, needed, strict=True)
        return tuple(tuple(range(group.num_blocks))[::-1][:count] for group, count in groups)

    def elements(self) -> Iterator[tuple[State, Placement, int]]:
        """Every state of every token."""
        for placement in self.layout.placements:
            state = self.layout.state_named()[placement.state]
            for token in range(self.num_tokens if state.per_token else 1):
                yield state, placement, token


MakeEngine = Callable[[], EngineUnderTest]
Check = Callable[[MakeEngine], None]


def expected_element(state: State, placement: Placement, token: int) -> Element:
    """What an element must hold: every item encodes its state, token and coordinate."""
    shape = tuple(len(span) for span in placement.spans)
    starts = tuple(span.start for span in placement.spans)
    coordinates = (tuple(np.add(index, starts).tolist()) for index in np.ndindex(shape))
    joined = b"".join(oracle.value_of(state, token, coordinate) for coordinate in coordinates)
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


def memory_of(engine: EngineUnderTest) -> oracle.Memory:
    """The engine's memory by address, as the description says."""
    buffers = {
        region.address: np.ctypeslib.as_array((ctypes.c_uint8 * region.size_bytes).from_address(region.address))
        for region in engine.layout.regions
    }
    return oracle.Memory(engine.layout, buffers)


def what_the_engine_writes_lies_where_it_is_described(make: MakeEngine) -> None:
    engine = make()
    memory, tokens = memory_of(engine), TokenRange(0, engine.num_tokens)
    fill(engine)
    for state, placement, _ in engine.elements():
        for token, coordinate, address in oracle.element_addresses(engine.layout, placement, engine.tables, tokens):
            found = memory.at(address, state.item_bytes).tobytes()
            wanted = oracle.value_of(state, token, coordinate)
            assert found == wanted, f"{state.name}, token {token}, {coordinate}: not at {address - placement.offset}"
    engine.close()


def what_lies_where_it_is_described_is_what_the_engine_reads(make: MakeEngine) -> None:
    engine = make()
    oracle.fill(memory_of(engine), engine.tables, TokenRange(0, engine.num_tokens))
    expect_filled(engine)
    engine.close()


class _Spoiling:
    """A transport that brings one wrong byte into the engine's memory with every copy."""

    def __init__(self, transport: Transport, regions: Sequence[range]) -> None:
        self._transport = transport
        self._regions = regions
        self._targets: dict[Ticket, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        ticket = self._transport.post(peer, copies, direction)
        if len(copies) and any(int(copies.target[0]) in region for region in self._regions):
            self._targets[ticket] = int(copies.target[0])
        return ticket

    def poll(self) -> list[Completion]:
        completions = self._transport.poll()
        for each in completions:
            if each.ticket in self._targets:
                ctypes.c_uint8.from_address(self._targets.pop(each.ticket)).value ^= 1
        return completions


class _Side:
    """An engine, its agent and what that has said."""

    def __init__(self, engine: EngineUnderTest, name: str, lease_s: float, *, spoils: bool) -> None:
        self.engine = engine
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        config = AgentConfig(
            name, rank=engine.rank, timing=Timing(lease_s=lease_s), digest=DigestPolicy.FULL, may_turn=False
        )
        opened = open_transports(config.transport)
        regions = [range(region.address, region.address + region.size_bytes) for region in engine.layout.regions]
        transports = [cast(Transport, _Spoiling(each, regions)) for each in opened.transports]
        chosen = transports if spoils else opened.transports
        self.agent = Agent(config, engine.cache, self._notices.put, chosen, opened.unavailable)
        self.agent.start()

    def lease(self) -> Reference:
        tables, num_tokens = self.engine.tables, self.engine.num_tokens
        return self.agent.lease(LeaseRequest("computed", new_lease_id(), tables, num_tokens))

    def fetch(self, source: _Side, reference: Reference) -> None:
        tables = self.engine.tables
        ranges = (TokenRange(0, self.engine.num_tokens),) * len(tables)
        self.agent.fetch(FetchRequest("fetched", reference, (source.agent.address,), tables, ranges))

    def expect(self, kind: type[Notice]) -> Notice:
        notice = self._notices.get(timeout=NOTICE_S)
        assert isinstance(notice, kind), f"{notice} where {kind.__name__} was expected"
        return notice

    def expect_failure(self, *reasons: Reason) -> None:
        """The fetch fails for one of these reasons, and its blocks are the engine's again."""
        failed = self.expect(FetchFailed)
        assert isinstance(failed, FetchFailed)
        assert failed.error.reason in reasons, str(failed.error)
        self.expect(BlocksReleased)


@contextmanager
def _sides(
    make: MakeEngine, num_targets: int = 1, lease_s: float = LEASE_S, *, spoils: bool = False
) -> Iterator[list[_Side]]:
    """A source, whose cache is filled, and targets, whose transports may spoil bytes."""
    names = ["source", *(f"target-{number}" for number in range(num_targets))]
    sides = [_Side(make(), name, lease_s, spoils=spoils and name != "source") for name in names]
    try:
        fill(sides[0].engine)
        yield sides
    finally:
        for side in sides:
            side.agent.close()
            side.engine.close()


def what_is_leased_arrives(make: MakeEngine) -> None:
    with _sides(make) as (source, target):
        target.fetch(source, source.lease())
        target.expect(Fetched)
        expect_filled(target.engine)
        ended = source.expect(LeaseEnded)
        assert ended == LeaseEnded("computed", "done")


def a_wrong_byte_is_found(make: MakeEngine) -> None:
    with _sides(make, spoils=True) as (source, target):
        target.fetch(source, source.lease())
        target.expect_failure(Reason.DIGEST)


def a_lease_that_nobody_claims_ends(make: MakeEngine) -> None:
    with _sides(make, lease_s=SHORT_LEASE_S) as (source, target):
        reference = source.lease()
        assert source.expect(LeaseEnded) == LeaseEnded("computed", "expired")
        target.fetch(source, reference)
        target.expect_failure(Reason.EXPIRED, Reason.UNKNOWN_LEASE)


def a_lease_is_claimed_once(make: MakeEngine) -> None:
    with _sides(make, num_targets=2) as (source, first, second):
        reference = source.lease()
        first.fetch(source, reference)
        first.expect(Fetched)
        second.fetch(source, reference)
        second.expect_failure(Reason.ALREADY_CLAIMED, Reason.UNKNOWN_LEASE, Reason.EXPIRED)


def a_source_that_is_gone_is_an_error(make: MakeEngine) -> None:
    with _sides(make) as (source, target):
        reference = source.lease()
        source.agent.close()
        target.fetch(source, reference)
        target.expect_failure(Reason.UNREACHABLE, Reason.PEER_LOST, Reason.DEADLINE)


CONTRACT: tuple[Check, ...] = (
    what_the_engine_writes_lies_where_it_is_described,
    what_lies_where_it_is_described_is_what_the_engine_reads,
    what_is_leased_arrives,
    a_wrong_byte_is_found,
    a_lease_that_nobody_claims_ends,
    a_lease_is_claimed_once,
    a_source_that_is_gone_is_an_error,
)
