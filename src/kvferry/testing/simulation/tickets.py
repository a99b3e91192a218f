"""The transport between nodes: the bytes of a ticket move in steps, some of them late, and it ends exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.events import (
    PeerConnected,
    PeerUnreachable,
    Post,
    Remote,
    SlotKey,
    TicketEnded,
    WorkKey,
)
from kvferry.testing.simulation.naming import request_of
from kvferry.testing.simulation.site import Site
from kvferry.wire.messages import Offer, TargetOffer

if TYPE_CHECKING:
    from kvferry.testing.simulation.node import Node
    from kvferry.testing.simulation.staging import Copy

NUM_STEPS = 4
FAST_S = 0.01
MAX_SLOW_S = 9.0
MAX_DRAIN_S = 4.0
MAX_ECHO_S = 4.0


@dataclass(slots=True, eq=False)
class Ticket:
    """Bytes on their way from `remote`, the source, to `node`, the target; `owner` is the one that has posted it.

    `source` and `target` are indices of bytes, of which `moved` have moved. `fails_at` is the number of bytes after
    which it ends with an error; a hanging one moves nothing until somebody loses interest in it.
    """

    owner: Node
    node: Node
    remote: Node
    key: WorkKey
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    step_s: float = 0.0
    fails_at: int = 0
    hangs: bool = False
    moved: int = 0
    is_open: bool = True
    unwanted: bool = False
    ended_at: float = 0.0

    @property
    def is_staged(self) -> bool:
        """Whether it fills a slot of staging memory."""
        return len(self.target) > 0 and bool(self.target.max() >= self.node.memory.map.num_bytes)

    @property
    def is_write(self) -> bool:
        """Whether the source has posted it."""
        return self.owner is self.remote

    @property
    def request_id(self) -> str:
        """What the target calls its request."""
        work = self.key.work if isinstance(self.key, SlotKey) else self.key
        return request_of(work.claim_id)


class TicketFabric:
    """Routes between nodes, and all tickets that are open."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._nodes: dict[bytes, Node] = {}
        self._routes: dict[tuple[Node, Remote], Node] = {}
        self.open: list[Ticket] = []

    def register(self, node: Node) -> None:
        """The memory of this node can be reached by its descriptor."""
        self._nodes[node.descriptor] = node

    def connect(self, node: Node, peer: Remote, offer: Offer | TargetOffer) -> None:
        """Answered a little later."""
        site = self._site
        fails = site.world.chance(site.faults.unreachable)
        if fails:
            site.story.fault("unreachable peer", node.name, peer)

        def answer() -> None:
            remote = self._nodes.get(offer.transports[0].descriptor) if offer.transports else None
            if fails or remote is None or not remote.alive:
                node.carried(PeerUnreachable(peer, "nobody there"))
            else:
                self._routes[node, peer] = remote
                node.carried(PeerConnected(peer, "simulated", "the only one", site.staging.costs))

        site.world.after(site.world.between(0.001, 0.05), answer)

    def route(self, node: Node, peer: Remote) -> Node | None:
        """Whose memory a node reaches under this name."""
        return self._routes.get((node, peer))

    def gathers_into(self, node: Node) -> list[tuple[Node, Copy]]:
        """What others gather into slots of a node, and who."""
        return [
            (each, copy) for each in self._nodes.values() for copy in each.stager.copies.values() if copy.far is node
        ]

    def disconnect(self, node: Node, peer: Remote) -> None:
        """Its open tickets end with an error before long; until then their bytes may still move."""
        self._routes.pop((node, peer), None)
        for ticket in self.open:
            if ticket.owner is node and ticket.key.remote == peer:
                self._let_go(ticket)

    def post(self, owner: Node, post: Post) -> None:
        """Start to read or to write."""
        key, copies = post.key, post.copies
        far = self._routes.get((owner, key.remote))
        if far is None:
            owner.carried(TicketEnded(key, "the peer is not connected any more"))
            return
        remote, node = (far, owner) if post.direction is Direction.READ else (owner, far)
        source, target = remote.memory.indices(copies.source, copies), node.memory.indices(copies.target, copies)
        if remote.memory.lacks(source) or node.memory.lacks(target):
            owner.carried(TicketEnded(key, "a row leaves registered memory"))
            return
        self._begin(Ticket(owner, node, remote, key, source, target))

    def _begin(self, ticket: Ticket) -> None:
        world, faults, num_bytes = self._site.world, self._site.faults, len(ticket.source)
        slow, hangs, fails = (world.chance(chance) for chance in (faults.slow, faults.hang, faults.fail))
        ticket.step_s = world.between(0.0, MAX_SLOW_S if slow else FAST_S) / NUM_STEPS
        ticket.fails_at = world.dice.randint(0, num_bytes) if fails else num_bytes + 1
        ticket.hangs = hangs
        for name, chosen in (("slow ticket", slow), ("hanging ticket", hangs), ("failing ticket", fails)):
            if chosen:
                self._site.story.fault(name, ticket.owner.name, ticket.request_id)
        self.open.append(ticket)
        if not hangs:
            world.after(ticket.step_s, lambda: self._step(ticket))

    def cancel(self, node: Node, key: WorkKey) -> None:
        """Nobody wants it any more, which stops no byte: it ends when it is done, or some time later."""
        for ticket in self.open:
            if ticket.owner is node and ticket.key == key:
                self._let_go(ticket)

    def node_died(self, node: Node) -> None:
        """Tickets of a dead process are over; those that need it fail, now or when somebody loses interest."""
        for ticket in list(self.open):
            if ticket.owner is node:
                self.open.remove(ticket)
                ticket.is_open = False
                self._echo(ticket)

    def open_of(self, node: Node, request_id: str) -> list[Ticket]:
        """The tickets of a request of this node that may still move bytes."""
        return [ticket for ticket in self.open if ticket.node is node and ticket.request_id == request_id]

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.unwanted:
            return
        ticket.unwanted = True
        world = self._site.world
        if ticket.hangs and world.chance(0.5):
            self._site.story.say(ticket.owner.name, "the bytes of", ticket.request_id, "begin to move after all")
            world.after(world.between(0.0, MAX_DRAIN_S), lambda: self._step(ticket))
        world.after(world.between(0.0, MAX_DRAIN_S), lambda: self._end(ticket, "cancelled"))

    def _step(self, ticket: Ticket) -> None:
        """Move the next quarter of the bytes; nothing moves across a partition or out of a process that is gone."""
        if not ticket.is_open:
            return
        site, node, remote = self._site, ticket.node, ticket.remote
        if site.is_cut(node.engine_name, remote.engine_name):
            site.world.after(0.2, lambda: self._step(ticket))
            return
        if not all(each.alive or each.outlived for each in (node, remote)):
            self._broken(ticket)
            return
        end = min(len(ticket.source), ticket.moved + max(1, -(-len(ticket.source) // NUM_STEPS)), ticket.fails_at)
        part = slice(ticket.moved, end)
        site.checks.moves(ticket)
        node.memory.bytes[ticket.target[part]] = remote.memory.bytes[ticket.source[part]]
        if (
            end > ticket.moved
            and site.digest is DigestPolicy.FULL
            and site.world.chance(site.faults.corrupt / NUM_STEPS)
        ):
            site.story.fault("corrupted byte", node.name, ticket.request_id)
            node.memory.bytes[ticket.target[site.world.dice.randrange(ticket.moved, end)]] ^= (
                1 << site.world.dice.randrange(8)
            )
        ticket.moved = end
        if end == ticket.fails_at:
            self._end(ticket, "injected fault")
        elif end == len(ticket.source):
            self._arrived(ticket)
        else:
            site.world.after(ticket.step_s, lambda: self._step(ticket))

    def _broken(self, ticket: Ticket) -> None:
        """Half of the transports notice that the other process is gone; the others just wait."""
        if self._site.world.chance(0.5):
            self._end(ticket, "the connection broke")

    def _arrived(self, ticket: Ticket) -> None:
        self._end(ticket, "")

    def _end(self, ticket: Ticket, error: str) -> None:
        if ticket.is_open:
            ticket.is_open = False
            ticket.ended_at = self._site.world.now
            self.open.remove(ticket)
            self._site.checks.ended(ticket, error)
            ticket.owner.carried(TicketEnded(ticket.key, error))
            if error:
                self._echo(ticket)

    def _echo(self, ticket: Ticket) -> None:
        """What a source had sent by the end of a write that went wrong is still in somebody's buffers."""
        world = self._site.world
        if ticket.is_write and world.chance(0.5):
            sent = ticket.remote.memory.bytes[ticket.source[ticket.moved :]].copy()
            world.after(world.between(0.0, MAX_ECHO_S), lambda: self._land(ticket, sent))

    def _land(self, ticket: Ticket, sent: NDArray[np.uint8]) -> None:
        if ticket.node.alive:
            self._site.story.say(ticket.node.name, "late bytes of", ticket.request_id)
            self._site.checks.lands(ticket)
            ticket.node.memory.bytes[ticket.target[ticket.moved :]] = sent
