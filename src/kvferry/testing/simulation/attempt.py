"""One attempt to fetch a request's cache: all ranks of the target engine together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvferry.plan.description.prompt import PromptName
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import AbortWanted, BlocksReleased, Fetched, FetchFailed, FetchRequest
from kvferry.testing.simulation.checks import Violation
from kvferry.testing.simulation.memory import Tables
from kvferry.testing.simulation.naming import attempt_of
from kvferry.testing.simulation.site import Site
from kvferry.wire.messages import Reference

if TYPE_CHECKING:
    from kvferry.testing.simulation.node import Node

GRACE_S = 1.0
MAX_DECODE_S = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted: `salt` says which bytes are the right ones, `prompt` is what the target calls them; `expected`
    that nothing stands in the way."""

    request_id: str
    reference: Reference
    addresses: tuple[str, ...]
    ranges: tuple[TokenRange, ...]
    salt: int
    prompt: PromptName
    expected: bool


@dataclass(slots=True)
class Fetching:
    """One rank's part. `status`: waiting, fetched or failed."""

    wish: Wish
    tables: Tables
    attempt: Attempt
    status: str = "waiting"
    began: float = 0.0
    stopped_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.wish.request_id

    @property
    def reference(self) -> Reference:
        return self.wish.reference

    @property
    def salt(self) -> int:
        return self.wish.salt

    @property
    def ranges(self) -> tuple[TokenRange, ...]:
        return self.wish.ranges

    def handle(self, node: Node, command: Fetched | FetchFailed | BlocksReleased) -> None:
        """What a session says about it."""
        match command:
            case Fetched():
                if self.status != "waiting":
                    raise Violation(f"{node.name}: {self.request_id} is fetched after it has {self.status}")
                node.site.checks.fetched(node, self)
                self.status = "fetched"
                self.attempt.rank_ended(node)
            case FetchFailed():
                if self.status != "waiting":
                    raise Violation(f"{node.name}: {self.request_id} fails after it has {self.status}")
                self.status = "failed"
                self.attempt.rank_failed(node, command.error.reason)
            case BlocksReleased():
                del node.fetching[self.request_id]
                node.prefix_cache.ended(node.memory, self)
                node.free(self.tables)
                self.attempt.rank_ended(node)


@dataclass(slots=True, eq=False)
class Attempt:
    """`then` is told the outcome, once every rank has ended: `fetched`, or why not."""

    site: Site
    wish: Wish
    nodes: tuple[Node, ...]
    then: Callable[[str], None]
    reason: str = ""
    ended: set[int] = field(default_factory=set)
    is_over: bool = False

    def start(self, tables: tuple[Tables, ...]) -> None:
        """Every rank is told, one a little after the other."""
        for node, own in zip(self.nodes, tables, strict=True):
            fetching = Fetching(self.wish, own, self)
            node.fetching[self.wish.request_id] = fetching
            node.wish(partial(self._wanted, node, fetching))

    def abort(self, reason: str) -> None:
        """Nobody wants it any more."""
        self.reason = self.reason or reason
        for node in self.nodes:
            node.wish(partial(node.handle_target, AbortWanted(self.wish.request_id)))

    def killed(self) -> None:
        """The engine that wanted it is gone."""
        self._over("killed")

    def rank_failed(self, node: Node, reason: str) -> None:
        """One rank is enough: the others are told to stop."""
        if not self.reason:
            if self.wish.expected and self.site.faults.is_calm:
                raise Violation(f"{node.name}: {self.wish.request_id} failed ({reason}) although nothing went wrong")
            self.abort(f"failed: {reason}")

    def rank_ended(self, node: Node) -> None:
        """It has everything, or its blocks are its own again."""
        self.ended.add(node.rank)
        if len(self.ended) < len(self.nodes):
            return
        fetched = all(self.wish.request_id in each.fetching for each in self.nodes)
        if fetched:
            self.site.world.after(self.site.world.between(0.0, MAX_DECODE_S), self._decoded)
        else:
            self._release()
            self._over(self.reason)

    def _decoded(self) -> None:
        """While the request was decoded nobody may have written into its blocks."""
        if self.is_over:
            return
        for node in self.nodes:
            self.site.checks.bytes_are_its_own(node, node.fetching[self.wish.request_id])
        self._release()
        self._over("fetched")

    def _release(self) -> None:
        for node in self.nodes:
            fetching = node.fetching.pop(self.wish.request_id, None)
            if fetching is not None:
                node.prefix_cache.ended(node.memory, fetching)
                node.free(fetching.tables)

    def _over(self, outcome: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.then(outcome)

    def _wanted(self, node: Node, fetching: Fetching) -> None:
        wish, world = self.wish, self.site.world
        fetching.began, fetching.stopped_s = world.now, node.inbox.stopped_s
        self.site.checks.began(node, fetching)
        tables = fetching.tables or ((),) * len(wish.ranges)
        world.after(self._limit_s(), partial(self._check_deadline, node, fetching))
        names = wish.request_id, wish.reference, wish.addresses
        node.handle_target(FetchRequest(*names, tables, wish.ranges, attempt_of(wish.request_id), prompt=wish.prompt))

    def _limit_s(self) -> float:
        return self.site.timing.handshake_s + self.site.timing.transfer_s + GRACE_S

    def _check_deadline(self, node: Node, fetching: Fetching) -> None:
        """However long a process was stopped, it must end a request in time as soon as it runs again."""
        if not node.alive or fetching.status != "waiting" or self.is_over:
            return
        if stopped_s := node.inbox.stopped_s - fetching.stopped_s:
            fetching.stopped_s = node.inbox.stopped_s
            self.site.world.after(stopped_s, partial(self._check_deadline, node, fetching))
            return
        if (again := node.staged_at + self._limit_s()) > self.site.world.now:
            self.site.world.at(again, partial(self._check_deadline, node, fetching))
            return
        raise Violation(f"{node.name}: {fetching.request_id} has not ended within its deadline")
