"""One attempt to fetch a request's cache: all ranks of the target engine together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed
from kvferry.session.events import AbortRequest, FetchRequest
from simulator.context import RunContext
from simulator.engines.node import Node
from simulator.state.memory import Tables
from simulator.state.naming import attempt_of
from simulator.state.rank import Fetching, WantedCache
from simulator.violation import Violation

GRACE_S = 1.0
MAX_DECODE_S = 1.0


@dataclass(slots=True, eq=False)
class Attempt:
    """`then` is told the outcome, once every rank has ended: `fetched`, or why not."""

    context: RunContext
    wanted: WantedCache
    nodes: tuple[Node, ...]
    then: Callable[[str], None]
    reason: str = ""
    ended: set[int] = field(default_factory=set)
    is_over: bool = False

    def start(self, tables: tuple[Tables, ...]) -> None:
        """Every rank is told, one a little after the other."""
        for node, own in zip(self.nodes, tables, strict=True):
            fetching = Fetching(self.wanted, own, partial(self._notified, node), self.killed)
            node.rank.fetching[self.wanted.request_id] = fetching
            node.wanted(partial(self._wanted, node, fetching))

    def abort(self, reason: str) -> None:
        """Nobody wants it any more."""
        self.reason = self.reason or reason
        for node in self.nodes:
            node.wanted(partial(node.handle_target, AbortRequest(self.wanted.request_id)))

    def killed(self) -> None:
        """The engine that wanted it is gone."""
        self._over("killed")

    def _notified(self, node: Node, command: Fetched | FetchFailed | BlocksReleased) -> None:
        """What the session of a rank says about it."""
        rank, request_id = node.rank, self.wanted.request_id
        fetching = rank.fetching[request_id]
        match command:
            case Fetched():
                if fetching.status != "waiting":
                    raise Violation(f"{rank.name}: {request_id} is fetched after it has {fetching.status}")
                self.context.checks.fetched(rank, fetching)
                fetching.status = "fetched"
                self._rank_ended(node)
            case FetchFailed():
                if fetching.status != "waiting":
                    raise Violation(f"{rank.name}: {request_id} fails after it has {fetching.status}")
                fetching.status = "failed"
                self._rank_failed(node, command.error.reason)
            case BlocksReleased():
                self._release(node)
                self._rank_ended(node)

    def _rank_failed(self, node: Node, reason: str) -> None:
        """One rank is enough: the others are told to stop."""
        if not self.reason:
            if self.wanted.expected and self.context.faults.is_calm:
                raise Violation(
                    f"{node.rank.name}: {self.wanted.request_id} failed ({reason}) although nothing went wrong"
                )
            self.abort(f"failed: {reason}")

    def _rank_ended(self, node: Node) -> None:
        """It has everything, or its blocks are its own again."""
        self.ended.add(node.rank.party.rank)
        if len(self.ended) < len(self.nodes):
            return
        fetched = all(self.wanted.request_id in each.rank.fetching for each in self.nodes)
        if fetched:
            self.context.scheduler.after(self.context.scheduler.between(0.0, MAX_DECODE_S), self._decoded)
        else:
            self._release_all()
            self._over(self.reason)

    def _decoded(self) -> None:
        """While the request was decoded nobody may have written into its blocks."""
        if self.is_over:
            return
        for node in self.nodes:
            self.context.checks.bytes_are_its_own(node.rank, node.rank.fetching[self.wanted.request_id])
        self._release_all()
        self._over("fetched")

    def _release_all(self) -> None:
        for node in self.nodes:
            if self.wanted.request_id in node.rank.fetching:
                self._release(node)

    def _release(self, node: Node) -> None:
        rank = node.rank
        fetching = rank.fetching.pop(self.wanted.request_id)
        node.prefix_cache.ended(rank.memory, fetching)
        rank.free(fetching.tables)

    def _over(self, outcome: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.then(outcome)

    def _wanted(self, node: Node, fetching: Fetching) -> None:
        wanted, scheduler = self.wanted, self.context.scheduler
        fetching.began, fetching.stopped_s = scheduler.now, node.rank.inbox.stopped_s
        self.context.checks.began(node.rank, fetching)
        tables = fetching.tables or ((),) * len(wanted.ranges)
        scheduler.after(self._limit_s(), partial(self._check_deadline, node, fetching))
        names = wanted.request_id, wanted.reference, wanted.addresses
        node.handle_target(
            FetchRequest(*names, tables, wanted.ranges, attempt_of(wanted.request_id), prompt=wanted.prompt)
        )

    def _limit_s(self) -> float:
        return self.context.timing.handshake_s + self.context.timing.transfer_s + GRACE_S

    def _check_deadline(self, node: Node, fetching: Fetching) -> None:
        """However long a process was stopped, it must end a request in time as soon as it runs again."""
        if not node.rank.alive or fetching.status != "waiting" or self.is_over:
            return
        if stopped_s := node.rank.inbox.stopped_s - fetching.stopped_s:
            fetching.stopped_s = node.rank.inbox.stopped_s
            self.context.scheduler.after(stopped_s, partial(self._check_deadline, node, fetching))
            return
        if (again := node.staged_at + self._limit_s()) > self.context.scheduler.now:
            self.context.scheduler.at(again, partial(self._check_deadline, node, fetching))
            return
        raise Violation(f"{node.rank.name}: {fetching.wanted.request_id} has not ended within its deadline")
