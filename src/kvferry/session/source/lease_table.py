"""All leases of a source's rank: how they begin and end, and when the engine has its blocks back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush, heapreplace
from math import inf

from kvferry.errors import TransferError
from kvferry.plan.description.prompt import UNKNOWN_PROMPT
from kvferry.session.commands import Command, Count, DropDigest, LeaseEnded
from kvferry.session.events import LeaseRequest
from kvferry.session.keys import Remote
from kvferry.session.refusals import refuse
from kvferry.session.source.direct_write import DirectWrite
from kvferry.session.source.lease import Lease
from kvferry.session.source.writes import Writes
from kvferry.session.timing import Timing
from kvferry.wire.messages import Claim, Party, Reason


class LeaseTable:
    """All leases by id, including those that have ended and are kept for late messages; and by request until its blocks
    are free."""

    def __init__(self, writes: Writes, timing: Timing) -> None:
        self._writes = writes
        self._timing = timing
        self._by_id: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        # A heap of (deadline, lease id), with each lease at its deadline or sooner: there are many tombstones, and most
        # events come when nothing is due.
        self._deadlines: list[tuple[float, str]] = []
        # Leases whose reads may still be in flight; some of them are over, which is found out when somebody asks.
        self._claimed: dict[str, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._by_id.values()))

    def get(self, lease_id: str) -> Lease | None:
        """The lease with this id. None if it is unknown or forgotten."""
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
        """Whether a granted read may still be in flight. This includes leases that have ended: their readers wait for
        their own tickets."""
        self._claimed = {key: lease for key, lease in self._claimed.items() if lease.is_read and key in self._by_id}
        return bool(self._claimed)

    @property
    def writing(self) -> set[Party]:
        """Targets that we write to, or will as soon as they ask for a slot, or tokens are computed."""
        # A lease that is written from has not released its blocks, so the many that are over need not be looked at.
        writes = (write for lease in self._by_request.values() for write in lease.writes.values())
        return {write.key.party for write in writes if write.is_open or not (write.is_written or write.error)}

    def moved(self, target: Remote, now: float) -> None:
        """Note that bytes move to a target, to tell it when it asks. Not for ever: they may be another write's."""
        for lease in self._by_request.values():
            for key, write in lease.writes.items():
                if key.party == target and isinstance(write, DirectWrite):
                    write.moving_since = write.moving_since if write.moving_since >= 0 else now
                    write.has_progressed |= now - write.moving_since < self._timing.hold_s

    def next_deadline(self) -> float:
        """When the next lease ends, or is forgotten; infinity when there is none."""
        while self._deadlines:
            deadline, lease_id = self._deadlines[0]
            lease = self._by_id.get(lease_id)
            if lease is None:
                heappop(self._deadlines)
            elif lease.deadline > deadline:
                heapreplace(self._deadlines, (lease.deadline, lease_id))
            else:
                return deadline
        return inf

    def open(self, request: LeaseRequest, now: float) -> None:
        """Add a lease that nobody has claimed yet."""
        lease = Lease.opened(request, now)
        self.renew(lease, now)
        self._by_id[request.lease_id] = self._by_request[request.request_id] = lease
        self._note_deadline(lease)

    def claim(self, lease: Lease, claim: Claim, now: float) -> None:
        """Note a granted claim, and renew the lease."""
        lease.claim(claim)
        self.renew(lease, now)
        self._claimed[lease.request.lease_id] = lease

    def renew(self, lease: Lease, now: float) -> None:
        """Make a lease last `lease_s` from now on. While it grows it lasts longer: its prompt may wait for its turn, or
        a step may take, longer than a lease lasts."""
        before, timing = lease.deadline, self._timing
        lease.deadline = now + (timing.lease_s if lease.is_computed else timing.stalled_s)
        if lease.deadline < before:
            self._note_deadline(lease)

    def expire(self, now: float) -> list[Command]:
        """End the leases whose time is over, and forget those that ended long ago."""
        commands: list[Command] = []
        due: dict[str, Lease] = {}
        while self.next_deadline() <= now:
            _, lease_id = heappop(self._deadlines)
            due[lease_id] = self._by_id[lease_id]
        for lease_id, lease in due.items():
            if lease.live:
                commands += self.end(lease, "deadline", Reason.EXPIRED, now)
            elif lease.is_writing:
                lease.deadline = now + self._timing.tombstone_s
                self._note_deadline(lease)
            else:
                del self._by_id[lease_id]
        return commands

    def end(self, lease: Lease, event: str, reason: str, now: float) -> list[Command]:
        """Move a lease to its terminal state, and release its blocks as soon as nothing reads them."""
        lease.machine.move(event)
        lease.deadline, lease.ended_as = now + self._timing.tombstone_s, reason
        self._note_deadline(lease)
        commands = list(self._writes.end(lease))
        for key, digest in lease.digests.items():
            commands += [DropDigest(key)] if digest.values is None else []
            commands += refuse(digest.peer, lease.ended_error, key.claim_id) if digest.peer else []
        for peer, claim in lease.waiting.values():
            error = TransferError(Reason.EXPIRED, "the lease has ended", found=reason, expected="live")
            commands += refuse(peer, error, claim.claim_id)
        lease.digests, lease.waiting = {}, {}
        # A lease that has ended grants no claim: it needs no megabyte of tokens.
        lease.request = replace(lease.request, prompt=UNKNOWN_PROMPT)
        return [*self.free_when_drained(lease), *commands]

    def free_when_drained(self, lease: Lease) -> list[Command]:
        """Release the blocks of a lease that has ended, exactly once, when nothing is written out of them any more."""
        if lease.live or lease.is_freed or lease.is_writing:
            return []
        lease.is_freed = True
        del self._by_request[lease.request.request_id]
        counts = [Count("leases_expired", Reason.EXPIRED)] if lease.ended_as == Reason.EXPIRED else []
        # Whoever hears of the end finds it counted.
        return [*counts, LeaseEnded(lease.request.request_id, lease.ended_as)]

    def _note_deadline(self, lease: Lease) -> None:
        """Note the deadline of a lease that is new, or that may end sooner than before."""
        heappush(self._deadlines, (lease.deadline, lease.request.lease_id))
