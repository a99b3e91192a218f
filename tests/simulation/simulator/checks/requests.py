"""What must never happen, whatever goes wrong. The first thing that does happen ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvferry.plan.programs.request import volume
from kvferry.session.commands import Command, Count, FetchFailed, LeaseEnded
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey, SlotKey
from kvferry.wire.messages import Party, Reason
from simulator.checks.slots import slot_lands, slot_leaves
from simulator.state.naming import request_of
from simulator.state.programs import programs_between
from simulator.state.rank import Copy, Fetching, LeasedBlocks, Rank
from simulator.state.shapes import Shape
from simulator.state.ticket import Ticket
from simulator.violation import Violation

COUNTED = ("fetches_failed", "leases_expired")


class Checks:
    """Watches all ranks of a run, and the tickets that are open. `outcomes` counts how requests ended."""

    def __init__(self, shape: Shape, open_tickets: Sequence[Ticket]) -> None:
        self._shape = shape
        self._open_tickets = open_tickets
        self.outcomes: Counter[str] = Counter()
        self._arrived: dict[tuple[Rank, str], list[Ticket]] = {}
        self._started: dict[tuple[Party, str], Fetching] = {}
        self._in_place: Counter[tuple[Party, str, PeerKey]] = Counter()
        self._packed: dict[tuple[Party, str, PeerKey], dict[SlotKey, int]] = {}

    def began(self, rank: Rank, fetching: Fetching) -> None:
        """Note what a rank wants."""
        self._started[rank.party, fetching.wanted.request_id] = fetching

    # --- bytes ---

    def moves(self, ticket: Ticket) -> None:
        """I8, I9: bytes only move into blocks that still belong to the request they were asked for. A source that
        writes only looks at blocks that it still keeps."""
        if ticket.target_rank.alive:
            self.lands(ticket)
        if ticket.is_write and ticket.is_staged:
            slot_leaves(ticket)
        elif ticket.is_write and not _keeps(ticket):
            raise Violation(f"{ticket.source_rank.name}: {ticket.request_id} is written from blocks freed since")

    def lands(self, ticket: Ticket) -> None:
        """I9: bytes that were sent before only land where they were meant to, and before anybody uses them."""
        if ticket.is_staged:
            slot_lands(ticket)
            return
        fetching = ticket.target_rank.fetching.get(ticket.request_id)
        if fetching is None or fetching.status == "fetched":
            raise Violation(f"{ticket.target_rank.name}: late bytes of {ticket.request_id} move into blocks used since")

    def ended(self, ticket: Ticket, error: str) -> None:
        """Note what has arrived as a whole."""
        if not error:
            self._arrived.setdefault((ticket.target_rank, ticket.request_id), []).append(ticket)
            whose = ticket.target_rank.party, ticket.request_id, ticket.source_rank.peer_key
            if not ticket.is_staged:
                self._in_place[whose] += len(ticket.source)
            elif ticket.is_write and isinstance(ticket.key, SlotKey):
                self._packed.setdefault(whose, {})[ticket.key] = len(ticket.source)

    def copied(self, rank: Rank, copy: Copy) -> None:
        """Note what has come to its blocks out of a slot, and what was gathered into a target's slot."""
        work = copy.key.work
        if isinstance(work, ReadKey):
            self._in_place[rank.party, request_of(work.claim_id), work.peer] += len(copy.source)
        elif copy.far is not None:
            whose = work.party, request_of(work.claim_id), rank.peer_key
            self._packed.setdefault(whose, {})[copy.key] = len(copy.source)

    def fetched(self, rank: Rank, fetching: Fetching) -> None:
        """A request may be answered: from its own bytes, read while its lease was live (I8)."""
        request_id, lease_id = fetching.wanted.request_id, fetching.wanted.reference.lease_id
        if self._moving(rank, request_id):
            raise Violation(f"{rank.name}: {request_id} is there, but bytes of it still move")
        if rank.slots_of(request_id):
            raise Violation(f"{rank.name}: {request_id} is there, but still has slots of staging memory")
        for ticket in self._arrived.get((rank, request_id), ()):
            if ticket.source_rank.freed_at.get(lease_id, float("inf")) < ticket.ended_at:
                raise Violation(f"{rank.name}: {request_id} was read from blocks that were freed meanwhile")
        self.bytes_are_its_own(rank, fetching)

    def bytes_are_its_own(self, rank: Rank, fetching: Fetching) -> None:
        """Every byte that was wanted."""
        wanted = fetching.wanted
        wrong = rank.memory.wrong_bytes(wanted.salt, fetching.tables, wanted.ranges) if fetching.tables else 0
        if wrong:
            raise Violation(f"{rank.name}: {wanted.request_id} is answered from {wrong} bytes that are not its own")

    def digested(self, rank: Rank, key: ReadKey | ClaimKey) -> None:
        """A digest only looks at blocks that still belong to its request."""
        held = request_of(key.claim_id) in rank.fetching if isinstance(key, ReadKey) else rank.keeps(key.lease_id)
        if not held:
            raise Violation(f"{rank.name}: the digest of {key} has looked at blocks freed since")

    # --- blocks ---

    def target_freed(self, rank: Rank, request_id: str) -> None:
        """I9: a failed request's blocks come back once, when no ticket and no scatter can write to them any more. Slots
        of staging memory may still be filled."""
        fetching = rank.fetching.get(request_id)
        if fetching is None or fetching.status != "failed":
            status = "unknown" if fetching is None else fetching.status
            raise Violation(f"{rank.name}: the blocks of {request_id} are freed again, it is {status}")
        if any(not _fills_slot(rank, ticket) for ticket in self._moving(rank, request_id)):
            raise Violation(f"{rank.name}: the blocks of {request_id} are freed while a ticket may write to them")
        if rank.scatters_for(request_id):
            raise Violation(f"{rank.name}: the blocks of {request_id} are freed while a slot is scattered into them")

    def source_freed(self, rank: Rank, request_id: str, reason: str) -> None:
        """A lease ends once, and not while we write out of it; it is done only when each of its readers has all."""
        leased = rank.leased.get(request_id)
        if leased is None:
            raise Violation(f"{rank.name}: the lease of {request_id} has ended twice")
        if reason == "done" and not self._readers(rank, leased) >= leased.readers:
            raise Violation(f"{rank.name}: the lease of {request_id} is done, but not every reader has all bytes")
        leaving = [ticket for ticket in self._open_tickets if ticket.source_rank is rank]
        moving = [ticket for ticket in leaving if _claim_of(ticket) in leased.claims]
        if moving and (reason == "done" or any(ticket.is_write for ticket in moving)):
            raise Violation(f"{rank.name}: the lease of {request_id} has ended, but its bytes still move")
        if rank.gathers_for(leased.wanted.lease_id):
            raise Violation(f"{rank.name}: the lease of {request_id} has ended, but its bytes are being gathered")

    def _readers(self, rank: Rank, leased: LeasedBlocks) -> set[int]:
        return {party.rank for party, claim_id in leased.claims if self._has_all(rank, party, request_of(claim_id))}

    def _has_all(self, rank: Rank, party: Party, request_id: str) -> bool:
        """Whether everything that a reader has claimed of a source rank has come to its blocks, or out of ours."""
        fetching = self._started.get((party, request_id))
        if fetching is None:
            return False
        shape = self._shape
        _, programs = programs_between(shape.source.layouts, shape.target.layouts, party.rank)
        is_something = rank.party.rank in programs and any(tokens.last for tokens in fetching.wanted.ranges)
        num_bytes = volume(programs[rank.party.rank], fetching.wanted.ranges)[1] if is_something else 0
        whose = party, request_id, rank.peer_key
        return max(self._in_place[whose], sum(self._packed.get(whose, {}).values())) >= num_bytes

    # --- ends ---

    def counted(self, rank: Rank, commands: Sequence[Command]) -> None:
        """Every failure and every lease that expires moves exactly one counter, labelled with the reason."""
        labels = [label for command in commands for label in _labels(command)]
        if not labels:
            return
        counts = [command for command in commands if isinstance(command, Count) and command.what in COUNTED]
        counted = Counter((count.what, str(count.reason)) for count in counts)
        if counted != Counter(labels):
            raise Violation(f"{rank.name}: {labels} happened, but {dict(counted)} is counted")

    def quiet(self, rank: Rank, left: Mapping[str, int]) -> None:
        """When nothing happens any more, nothing is left."""
        if found := {name: number for name, number in left.items() if number}:
            raise Violation(f"{rank.name}: left at the end: {found}")

    def _moving(self, rank: Rank, request_id: str) -> list[Ticket]:
        """What may still move bytes of a request."""
        arriving = [each for each in self._open_tickets if each.target_rank is rank and not each.is_revoked]
        return [each for each in arriving if each.request_id == request_id]


def _claim_of(ticket: Ticket) -> tuple[Party, str]:
    """By whom and under which id: ids are used again by the next incarnation."""
    return ticket.target_rank.party, ticket.request_id


def _fills_slot(rank: Rank, ticket: Ticket) -> bool:
    """Whether a ticket moves bytes into a slot of its target's, which the target then has."""
    key = ticket.key
    slots = [(slot.stretch, slot.number) for slot in rank.slots_of(ticket.request_id)]
    return isinstance(key, SlotKey) and (key.stretch, key.number) in slots


def _keeps(ticket: Ticket) -> bool:
    """Whether the source still keeps the blocks of a write."""
    work = ticket.key.work if isinstance(ticket.key, SlotKey) else ticket.key
    return isinstance(work, ClaimKey) and ticket.source_rank.keeps(work.lease_id)


def _labels(command: Command) -> list[tuple[str, str]]:
    """The counter that a command must come with."""
    if isinstance(command, FetchFailed):
        return [("fetches_failed", str(command.error.reason))]
    if isinstance(command, LeaseEnded) and command.reason == Reason.EXPIRED:
        return [("leases_expired", str(Reason.EXPIRED))]
    return []
