"""What must never happen, whatever goes wrong. The first thing that does happen ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.plan.programs.request import volume
from kvferry.session.events import ClaimKey, Command, Count, FetchFailed, LeaseEnded, PeerKey, ReadKey, SlotKey
from kvferry.testing.simulation.naming import request_of
from kvferry.testing.simulation.programs import programs_between
from kvferry.testing.simulation.staging_checks import slot_lands, slot_leaves
from kvferry.testing.simulation.violation import Violation
from kvferry.wire.messages import Party, Reason

if TYPE_CHECKING:
    from kvferry.testing.simulation.attempt import Fetching
    from kvferry.testing.simulation.node import Lent, Node
    from kvferry.testing.simulation.staging import Copy
    from kvferry.testing.simulation.tickets import Ticket

__all__ = ["Checks", "Violation"]


COUNTED = ("fetches_failed", "leases_expired")


class Checks:
    """Watches all nodes of a run. `outcomes` counts how requests ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._arrived: dict[tuple[Node, str], list[Ticket]] = {}
        self._begun: dict[tuple[Party, str], Fetching] = {}
        self._in_place: Counter[tuple[Party, str, PeerKey]] = Counter()
        self._packed: dict[tuple[Party, str, PeerKey], dict[SlotKey, int]] = {}

    def began(self, node: Node, fetching: Fetching) -> None:
        """Note what a rank wants."""
        self._begun[node.party, fetching.request_id] = fetching

    # --- bytes ---

    def moves(self, ticket: Ticket) -> None:
        """I8, I9: bytes only move into blocks that still belong to the request they were asked for. A source that
        writes only looks at blocks that it still keeps."""
        if ticket.node.alive:
            self.lands(ticket)
        if ticket.is_write and ticket.is_staged:
            slot_leaves(ticket)
        elif ticket.is_write and not _keeps(ticket):
            raise Violation(f"{ticket.remote.name}: {ticket.request_id} is written from blocks freed since")

    def lands(self, ticket: Ticket) -> None:
        """I9: bytes that were sent before only land where they were meant to, and before anybody uses them."""
        if ticket.is_staged:
            slot_lands(ticket)
            return
        fetching = ticket.node.fetching.get(ticket.request_id)
        if fetching is None or fetching.status == "fetched":
            raise Violation(f"{ticket.node.name}: late bytes of {ticket.request_id} move into blocks used since")

    def ended(self, ticket: Ticket, error: str) -> None:
        """Note what has arrived as a whole."""
        if not error:
            self._arrived.setdefault((ticket.node, ticket.request_id), []).append(ticket)
            whose = ticket.node.party, ticket.request_id, ticket.remote.peer_key
            if not ticket.is_staged:
                self._in_place[whose] += len(ticket.source)
            elif ticket.is_write and isinstance(ticket.key, SlotKey):
                self._packed.setdefault(whose, {})[ticket.key] = len(ticket.source)

    def copied(self, node: Node, copy: Copy) -> None:
        """Note what has come to its blocks out of a slot, and what was gathered into a target's slot."""
        work = copy.key.work
        if isinstance(work, ReadKey):
            self._in_place[node.party, request_of(work.claim_id), work.peer] += len(copy.source)
        elif copy.far is not None:
            whose = work.party, request_of(work.claim_id), node.peer_key
            self._packed.setdefault(whose, {})[copy.key] = len(copy.source)

    def fetched(self, node: Node, fetching: Fetching) -> None:
        """A request may be answered: from its own bytes, read while its lease was live (I8)."""
        if node.open_tickets(fetching.request_id):
            raise Violation(f"{node.name}: {fetching.request_id} is there, but bytes of it still move")
        if node.stager.held_by(fetching.request_id):
            raise Violation(f"{node.name}: {fetching.request_id} is there, but still has slots of staging memory")
        for ticket in self._arrived.get((node, fetching.request_id), ()):
            freed_at = ticket.remote.freed_at.get(fetching.reference.lease_id, float("inf"))
            if freed_at < ticket.ended_at:
                raise Violation(f"{node.name}: {fetching.request_id} was read from blocks that were freed meanwhile")
        self.bytes_are_its_own(node, fetching)

    def bytes_are_its_own(self, node: Node, fetching: Fetching) -> None:
        """Every byte that was wanted."""
        wrong = node.memory.wrong_bytes(fetching.salt, fetching.tables, fetching.ranges) if fetching.tables else 0
        if wrong:
            raise Violation(f"{node.name}: {fetching.request_id} is answered from {wrong} bytes that are not its own")

    def digested(self, node: Node, key: ReadKey | ClaimKey) -> None:
        """A digest only looks at blocks that still belong to its request."""
        lent = {each.wanted.lease_id for each in node.lent.values()}
        held = request_of(key.claim_id) in node.fetching if isinstance(key, ReadKey) else key.lease_id in lent
        if not held:
            raise Violation(f"{node.name}: the digest of {key} has looked at blocks freed since")

    # --- blocks ---

    def target_freed(self, node: Node, request_id: str) -> None:
        """I9: a failed request's blocks come back once, when no ticket can write to them any more."""
        fetching = node.fetching.get(request_id)
        if fetching is None or fetching.status != "failed":
            status = "unknown" if fetching is None else fetching.status
            raise Violation(f"{node.name}: the blocks of {request_id} are freed again, it is {status}")
        if node.open_tickets(request_id):
            raise Violation(f"{node.name}: the blocks of {request_id} are freed while a ticket may write to them")
        if node.stager.held_by(request_id):
            raise Violation(f"{node.name}: the blocks of {request_id} are freed while it has slots of staging memory")

    def source_freed(self, node: Node, request_id: str, reason: str, open_tickets: Sequence[Ticket]) -> None:
        """A lease ends once, and not while we write out of it; it is done only when each of its readers has all."""
        lent = node.lent.get(request_id)
        if lent is None:
            raise Violation(f"{node.name}: the lease of {request_id} has ended twice")
        if reason == "done" and not self._readers(node, lent) >= lent.readers:
            raise Violation(f"{node.name}: the lease of {request_id} is done, but not every reader has all bytes")
        moving = [ticket for ticket in open_tickets if ticket.remote is node and _claim_of(ticket) in lent.claims]
        if moving and (reason == "done" or any(ticket.is_write for ticket in moving)):
            raise Violation(f"{node.name}: the lease of {request_id} has ended, but its bytes still move")
        if node.stager.gathers_for(lent.wanted.lease_id):
            raise Violation(f"{node.name}: the lease of {request_id} has ended, but its bytes are being gathered")

    def _readers(self, node: Node, lent: Lent) -> set[int]:
        return {party.rank for party, claim_id in lent.claims if self._has_all(node, party, request_of(claim_id))}

    def _has_all(self, node: Node, party: Party, request_id: str) -> bool:
        """Whether everything that a reader has claimed of a source rank has come to its blocks, or out of ours."""
        fetching = self._begun.get((party, request_id))
        if fetching is None:
            return False
        shape = node.site.shape
        _, programs = programs_between(shape.source.layouts, shape.target.layouts, party.rank)
        is_something = node.rank in programs and any(tokens.last for tokens in fetching.ranges)
        num_bytes = volume(programs[node.rank], fetching.ranges)[1] if is_something else 0
        whose = party, request_id, node.peer_key
        return max(self._in_place[whose], sum(self._packed.get(whose, {}).values())) >= num_bytes

    # --- ends ---

    def counted(self, node: Node, commands: Sequence[Command]) -> None:
        """Every failure and every lease that expires moves exactly one counter, labelled with the reason."""
        labels = [label for command in commands for label in _labels(command)]
        if not labels:
            return
        counts = [command for command in commands if isinstance(command, Count) and command.what in COUNTED]
        counted = Counter((count.what, str(count.reason)) for count in counts)
        if counted != Counter(labels):
            raise Violation(f"{node.name}: {labels} happened, but {dict(counted)} is counted")

    def quiet(self, node: Node) -> None:
        """When nothing happens any more, nothing is left."""
        source, target = node.source, node.target
        left = {
            "blocks": node.pool.num_used,
            "leases": source.num_live(),
            "tombstones": len(list(source._leases)),
            "early messages": len(source._early._waiting),
            "aborted claims": len(source._aborted),
            "targets": len(source._targets),
            "fetches": target.num_open(),
            "farewells": len(target._farewells),
            "holds": len(target._holds._holds),
            "peers": len(list(target._peers)),
            "bindings": len(target._reads.bindings._known),
            "slots": node.stager.num_open,
            "copies": len(node.stager.copies),
        }
        if found := {name: number for name, number in left.items() if number}:
            raise Violation(f"{node.name}: left at the end: {found}")


def _claim_of(ticket: Ticket) -> tuple[Party, str]:
    """By whom and under which id: ids are used again by the next incarnation."""
    return ticket.node.party, ticket.request_id


def _keeps(ticket: Ticket) -> bool:
    """Whether the source still keeps the blocks of a write."""
    leases = {lent.wanted.lease_id for lent in ticket.remote.lent.values()}
    work = ticket.key.work if isinstance(ticket.key, SlotKey) else ticket.key
    return isinstance(work, ClaimKey) and work.lease_id in leases


def _labels(command: Command) -> list[tuple[str, str]]:
    """The counter that a command must come with."""
    if isinstance(command, FetchFailed):
        return [("fetches_failed", str(command.error.reason))]
    if isinstance(command, LeaseEnded) and command.reason == Reason.EXPIRED:
        return [("leases_expired", str(Reason.EXPIRED))]
    return []
