"""The transport between ranks: the bytes of a ticket move in steps, some of them late, and it ends exactly once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Post
from kvferry.session.events import PeerConnected, PeerUnreachable, TicketEnded
from kvferry.session.keys import Remote, WorkKey
from kvferry.wire.messages import Offer, Party, TargetOffer
from simulator.context import RunContext
from simulator.network.receiver import Receiver
from simulator.state.rank import Access, Copy, Rank
from simulator.state.ticket import Ticket

NUM_STEPS = 4
FAST_S = 0.01
MAX_SLOW_S = 9.0
MAX_DRAIN_S = 4.0
MAX_LATE_LANDING_S = 4.0


class TransferNetwork:
    """Routes between ranks, and all tickets that are open."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._receivers: dict[Rank, Receiver] = {}
        self._ranks: list[Rank] = []
        self._accesses: dict[bytes, Access] = {}
        self._own: dict[tuple[Rank, Party], Access] = {}
        self._routes: dict[tuple[Rank, Remote], Access] = {}
        self._open = context.open_tickets

    def register(self, receiver: Receiver) -> None:
        """The memory of this rank can be reached by its descriptor."""
        self._receivers[receiver.rank] = receiver
        self._ranks.append(receiver.rank)
        self._accesses[receiver.rank.descriptor] = Access(receiver.rank, receiver.rank.descriptor)

    def access_for(self, rank: Rank, source: Party) -> bytes:
        """How this source alone may write to a rank, until that revokes it."""
        own = self._own.get((rank, source))
        if own is None:
            descriptor = b"%s for %s, %d" % (rank.descriptor, str(source).encode(), len(self._accesses))
            own = self._own[rank, source] = self._accesses[descriptor] = Access(rank, descriptor)
        return own.descriptor

    def _tell(self, rank: Rank, event: PeerConnected | PeerUnreachable | TicketEnded) -> None:
        self._receivers[rank].network_event(event)

    def connect(self, rank: Rank, peer: Remote, offer: Offer | TargetOffer) -> None:
        """Answered a little later."""
        context = self._context
        fails = context.scheduler.chance(context.faults.unreachable)
        if fails:
            context.log.fault("unreachable peer", rank.name, peer)

        def answer() -> None:
            access = self._accesses.get(offer.transports[0].descriptor) if offer.transports else None
            if fails or access is None or not access.is_valid or not access.rank.alive:
                self._tell(rank, PeerUnreachable(peer, "nobody there"))
                return
            if access.rank.descriptor != access.descriptor:
                access.is_near = context.scheduler.chance(0.5)
            self._routes[rank, peer] = access
            is_near = context.is_revocable and access.is_near
            costs = context.staging.costs
            self._tell(rank, PeerConnected(peer, "simulated", "the only one", costs, reaches_staging=is_near))

        context.scheduler.after(context.scheduler.between(0.001, 0.05), answer)

    def near(self, rank: Rank, peer: Remote) -> Rank | None:
        """Into whose slots a rank can gather under this name."""
        access = self._routes.get((rank, peer))
        return access.rank if access is not None and access.is_near else None

    def gathers_into(self, rank: Rank) -> list[tuple[Rank, Copy]]:
        """What others gather into slots of a rank, and who."""
        return [(each, copy) for each in self._ranks for copy in each.copies.values() if copy.far is rank]

    def disconnect(self, rank: Rank, peer: Remote) -> None:
        """Its open tickets end with an error before long; until then their bytes may still move."""
        self._routes.pop((rank, peer), None)
        for ticket in self._open:
            if ticket.owner is rank and ticket.key.remote == peer:
                self._let_go(ticket)

    def revoke(self, rank: Rank, source: Party) -> None:
        """What a source writes by access of its own moves no more."""
        if own := self._own.pop((rank, source), None):
            own.is_valid = False
        for ticket in self._open:
            if ticket.is_revoked:
                self._let_go(ticket)

    def post(self, owner: Rank, post: Post) -> None:
        """Start to read or to write."""
        key, copies = post.key, post.copies
        access = self._routes.get((owner, key.remote))
        if access is None or not access.is_valid:
            self._tell(owner, TicketEnded(key, "the peer is not connected any more"))
            return
        far = access.rank
        here, there = (far, owner) if post.direction is Direction.READ else (owner, far)
        source, target = here.memory.indices(copies.source, copies), there.memory.indices(copies.target, copies)
        if here.memory.lacks(source) or there.memory.lacks(target):
            self._tell(owner, TicketEnded(key, "a row leaves registered memory"))
            return
        self._begin(Ticket(owner, here, there, key, source, target, access))

    def _begin(self, ticket: Ticket) -> None:
        scheduler, faults, num_bytes = self._context.scheduler, self._context.faults, len(ticket.source)
        slow, hangs, fails = (scheduler.chance(chance) for chance in (faults.slow, faults.hang, faults.fail))
        ticket.step_s = scheduler.between(0.0, MAX_SLOW_S if slow else FAST_S) / NUM_STEPS
        ticket.fails_at = scheduler.rng.randint(0, num_bytes) if fails else num_bytes + 1
        ticket.hangs = hangs
        for name, chosen in (("slow ticket", slow), ("hanging ticket", hangs), ("failing ticket", fails)):
            if chosen:
                self._context.log.fault(name, ticket.owner.name, ticket.request_id)
        self._open.append(ticket)
        if not hangs:
            scheduler.after(ticket.step_s, lambda: self._step(ticket))

    def cancel(self, rank: Rank, key: WorkKey) -> None:
        """Nobody wants it any more, which stops no byte: it ends when it is done, or some time later."""
        for ticket in self._open:
            if ticket.owner is rank and ticket.key == key:
                self._let_go(ticket)

    def rank_died(self, rank: Rank) -> None:
        """Tickets of a dead process are over; those that need it fail, now or when somebody loses interest."""
        for ticket in list(self._open):
            if ticket.owner is rank:
                self._open.remove(ticket)
                ticket.is_open = False
                self._land_late(ticket)

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.unwanted:
            return
        ticket.unwanted = True
        scheduler = self._context.scheduler
        if ticket.hangs and scheduler.chance(0.5):
            self._context.log.note(ticket.owner.name, "the bytes of", ticket.request_id, "begin to move after all")
            scheduler.after(scheduler.between(0.0, MAX_DRAIN_S), lambda: self._step(ticket))
        scheduler.after(scheduler.between(0.0, MAX_DRAIN_S), lambda: self._end(ticket, "cancelled"))

    def _step(self, ticket: Ticket) -> None:
        """Move the next quarter of the bytes; nothing moves across a partition or out of a process that is gone."""
        if not ticket.is_open or ticket.is_revoked:
            return
        context, here, there = self._context, ticket.source_rank, ticket.target_rank
        if context.is_cut(there.engine_name, here.engine_name):
            context.scheduler.after(0.2, lambda: self._step(ticket))
            return
        if not all(each.alive or each.outlived for each in (there, here)):
            self._broken(ticket)
            return
        end = min(len(ticket.source), ticket.moved + max(1, -(-len(ticket.source) // NUM_STEPS)), ticket.fails_at)
        part = slice(ticket.moved, end)
        context.checks.moves(ticket)
        there.memory.bytes[ticket.target[part]] = here.memory.bytes[ticket.source[part]]
        if (
            end > ticket.moved
            and context.digest is DigestPolicy.FULL
            and context.scheduler.chance(context.faults.corrupt / NUM_STEPS)
        ):
            context.log.fault("corrupted byte", there.name, ticket.request_id)
            there.memory.bytes[ticket.target[context.scheduler.rng.randrange(ticket.moved, end)]] ^= (
                1 << context.scheduler.rng.randrange(8)
            )
        ticket.moved = end
        if end == ticket.fails_at:
            self._end(ticket, "injected fault")
        elif end == len(ticket.source):
            self._arrived(ticket)
        else:
            context.scheduler.after(ticket.step_s, lambda: self._step(ticket))

    def _broken(self, ticket: Ticket) -> None:
        """Half of the transports notice that the other process is gone; the others just wait."""
        if self._context.scheduler.chance(0.5):
            self._end(ticket, "the connection broke")

    def _arrived(self, ticket: Ticket) -> None:
        self._end(ticket, "")

    def _end(self, ticket: Ticket, error: str) -> None:
        if ticket.is_open:
            ticket.is_open = False
            ticket.ended_at = self._context.scheduler.now
            self._open.remove(ticket)
            self._context.checks.ended(ticket, error)
            self._tell(ticket.owner, TicketEnded(ticket.key, error))
            if error:
                self._land_late(ticket)

    def _land_late(self, ticket: Ticket) -> None:
        """What a source had sent by the end of a write that went wrong is still in somebody's buffers."""
        scheduler = self._context.scheduler
        if ticket.is_write and scheduler.chance(0.5):
            sent = ticket.source_rank.memory.bytes[ticket.source[ticket.moved :]].copy()
            scheduler.after(scheduler.between(0.0, MAX_LATE_LANDING_S), lambda: self._land(ticket, sent))

    def _land(self, ticket: Ticket, sent: NDArray[np.uint8]) -> None:
        if ticket.target_rank.alive and not ticket.is_revoked:
            self._context.log.note(ticket.target_rank.name, "late bytes of", ticket.request_id)
            self._context.checks.lands(ticket)
            ticket.target_rank.memory.bytes[ticket.target[ticket.moved :]] = sent
