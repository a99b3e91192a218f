"""All leases of a source's rank: how they begin and end, and when the engine has its blocks back."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from kvferry.session.carrying import Carrying
from kvferry.session.events import Command, Count, DropDigest, LeaseWanted, SourceFree, Timing
from kvferry.session.lease import Lease
from kvferry.session.refusals import refuse
from kvferry.wire.messages import Party, Reason, Refusal

__all__ = ["Leases"]


class Leases:
    """By id, tombstones included; and by request as long as the engine has not got its blocks back."""

    def __init__(self, carrying: Carrying, timing: Timing) -> None:
        self._carrying = carrying
        self._timing = timing
        self._by_id: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        # No deadline is sooner than this: most events come when nothing is due.
        self._due = inf

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._by_id.values()))

    def get(self, lease_id: str) -> Lease | None:
        """None when there is no such lease, or not any more."""
        return self._by_id.get(lease_id)

    def of_request(self, request_id: str) -> Lease | None:
        """The lease on blocks that the engine still keeps for a request."""
        return self._by_request.get(request_id)

    @property
    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return len(self._by_request)

    @property
    def may_be_read(self) -> bool:
        """Whether a claim lacks its end. Also of a lease that has ended: its reader can use its own blocks again only
        when its ticket has ended."""
        return any(lease.is_read for lease in self._by_id.values())

    @property
    def writing(self) -> set[Party]:
        """Targets that we may be writing to."""
        # Whoever writes has not given the blocks back: tombstones, of which there are many, need not be looked at.
        return {key.party for lease in self._by_request.values() for key in lease.writes if lease.is_writing}

    def next_deadline(self) -> float:
        """When the next one ends, or is forgotten; infinity when there is none."""
        return min((lease.deadline for lease in self._by_id.values()), default=inf)

    def open(self, wanted: LeaseWanted, now: float) -> None:
        """Nobody has claimed it yet."""
        lease = Lease.opened(wanted, now + self._timing.lease_s)
        self._by_id[wanted.lease_id] = self._by_request[wanted.request_id] = lease
        self._due = min(self._due, lease.deadline)

    def renew(self, lease: Lease, now: float) -> None:
        """It lasts for another while from now on."""
        lease.deadline = now + self._timing.lease_s

    def expire(self, now: float) -> list[Command]:
        """End those whose time is over, and forget those that ended long ago."""
        commands: list[Command] = []
        if now < self._due:
            return commands
        for lease_id, lease in list(self._by_id.items()):
            if lease.deadline > now:
                continue
            if lease.live:
                commands += self.end(lease, "deadline", Reason.EXPIRED, now)
            elif lease.is_writing:
                lease.deadline = now + self._timing.tombstone_s
            else:
                del self._by_id[lease_id]
        self._due = self.next_deadline()
        return commands

    def end(self, lease: Lease, event: str, reason: str, now: float) -> list[Command]:
        """Move a lease to its terminal state, and give the blocks back as soon as nothing looks at them."""
        lease.machine.move(event)
        lease.deadline, lease.ended_as = now + self._timing.tombstone_s, reason
        self._due = min(self._due, lease.deadline)
        commands = list(self._carrying.end(lease))
        for key, peer in lease.digesting.items():
            commands += [DropDigest(key), *refuse(peer, lease.refusal_of_end(key))]
        for peer, claim in lease.waiting.values():
            commands += refuse(peer, Refusal(Reason.EXPIRED, "the lease has ended", reason, "live", claim.claim_id))
        lease.digesting, lease.waiting = {}, {}
        return [*self.free_when_drained(lease), *commands]

    def free_when_drained(self, lease: Lease) -> list[Command]:
        """Give the blocks of a lease that has ended back, exactly once, when nothing is written out of them."""
        if lease.live or lease.is_freed or lease.is_writing:
            return []
        lease.is_freed = True
        del self._by_request[lease.wanted.request_id]
        freed = SourceFree(lease.wanted.request_id, lease.ended_as)
        return [freed, *([Count("leases_expired", Reason.EXPIRED)] if lease.ended_as == Reason.EXPIRED else [])]
