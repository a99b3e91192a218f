"""A source and the targets that fetch from it: engines with their agents, for one check."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from kvferry.agent.config import AgentConfig, Notice, new_lease_id
from kvferry.agent.loop.agent import Agent
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.testing.engine_under_test import EngineUnderTest, MakeEngine, Source, expect_filled, fill
from kvferry.transport.base import Completion, Ticket, Transport
from kvferry.transport.registry import open_transports
from kvferry.wire.messages import Reason, Reference

NOTICE_S = 60.0
LEASE_S = 30.0


class Spoiling:
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


class LocalAgent:
    """An agent in this process over an engine's cache, and what it has said. It is a `Source`."""

    def __init__(self, engine: EngineUnderTest, config: AgentConfig, *, spoils: bool = False) -> None:
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        opened = open_transports(config.transport)
        regions = [range(region.address, region.address + region.size_bytes) for region in engine.layout.regions]
        spoiling = [cast(Transport, Spoiling(each, regions)) for each in opened.transports]
        transports = spoiling if spoils else opened.transports
        self._agent = Agent(config, engine.cache, self._notices.put, transports, opened.unavailable)
        self._agent.start()
        self.address, self.lease, self.fetch = self._agent.address, self._agent.lease, self._agent.fetch

    def notice(self) -> Notice:
        return self._notices.get(timeout=NOTICE_S)

    def close(self) -> None:
        self._agent.close()


@dataclass(frozen=True, slots=True)
class OfferedCache:
    """A source whose cache is filled."""

    engine: EngineUnderTest
    agent: Source

    def lease(self) -> Reference:
        return self.agent.lease(LeaseRequest("computed", new_lease_id(), self.engine.tables, self.engine.num_tokens))

    def expect_ended(self, reason: str) -> None:
        """The lease ends, and why."""
        notice = self.agent.notice()
        assert notice == LeaseEnded("computed", reason), f"{notice} where the lease should have ended: {reason}"


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that fetches."""

    engine: EngineUnderTest
    agent: LocalAgent

    def fetch(self, source: OfferedCache, reference: Reference) -> None:
        tables = self.engine.tables
        ranges = (TokenRange(0, self.engine.num_tokens),) * len(tables)
        self.agent.fetch(FetchRequest("fetched", reference, (source.agent.address,), tables, ranges))

    def expect_arrived(self) -> None:
        """The fetch succeeds, and the engine reads what was offered."""
        notice = self.agent.notice()
        assert isinstance(notice, Fetched), f"{notice} where a fetched cache was expected"
        expect_filled(self.engine)

    def expect_failed(self, *reasons: Reason) -> None:
        """The fetch fails for one of these reasons, and its blocks are the engine's again."""
        failed = self.agent.notice()
        assert isinstance(failed, FetchFailed), f"{failed} where a failure was expected"
        assert failed.error.reason in reasons, str(failed.error)
        released = self.agent.notice()
        assert isinstance(released, BlocksReleased), f"{released} where the blocks should have been released"


@contextmanager
def source_and_targets(
    make: MakeEngine, num_targets: int = 1, lease_s: float = LEASE_S, *, spoils: bool = False
) -> Iterator[tuple[Any, ...]]:
    """A source, whose cache is filled, and targets, whose transports may spoil bytes. All are closed at the end."""
    with ExitStack() as stack:

        def engine_and_config(name: str) -> tuple[EngineUnderTest, AgentConfig]:
            engine = stack.enter_context(closing(make()))
            timing = Timing(lease_s=lease_s)
            config = AgentConfig(
                name, rank=engine.rank, timing=timing, digest=DigestPolicy.FULL, may_switch_direction=False
            )
            return engine, config

        engine, config = engine_and_config("source")
        fill(engine)
        agent = engine.open_source(config) if engine.open_source else LocalAgent(engine, config)
        source = OfferedCache(engine, stack.enter_context(closing(agent)))
        targets = []
        for number in range(num_targets):
            engine, config = engine_and_config(f"target-{number}")
            target = stack.enter_context(closing(LocalAgent(engine, config, spoils=spoils)))
            targets.append(Target(engine, target))
        yield (source, *targets)
