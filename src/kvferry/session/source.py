"""The source side: leases on finished prefills. The source's own record is the only authority on who may read what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.plan.layout import Layout, fingerprint
from kvferry.session.events import (
    Command,
    Count,
    FrameArrived,
    LeaseWanted,
    LeaseWithdrawn,
    Reply,
    SourceFree,
    Tick,
    Timing,
)
from kvferry.session.machine import Machine, Table
from kvferry.wire.messages import (
    WIRE_VERSION,
    Abort,
    Aborted,
    Claim,
    Grant,
    Hello,
    Landed,
    Offer,
    OfferRequest,
    Party,
    Probe,
    Reason,
    Refusal,
    Renew,
    Renewed,
    TransportOffer,
    Valid,
    Welcome,
)

__all__ = ["LEASE_TABLE", "Identity", "LeaseState", "SourceSession"]


class LeaseState(StrEnum):
    OPEN = "open"
    CLAIMED = "claimed"
    DONE = "done"
    EXPIRED = "expired"
    ABORTED = "aborted"
    WITHDRAWN = "withdrawn"


LEASE_TABLE: Table = {
    (LeaseState.OPEN, "claim"): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, "claim"): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, "all readers valid"): LeaseState.DONE,
    (LeaseState.OPEN, "deadline"): LeaseState.EXPIRED,
    (LeaseState.CLAIMED, "deadline"): LeaseState.EXPIRED,
    (LeaseState.OPEN, "abort"): LeaseState.ABORTED,
    (LeaseState.CLAIMED, "abort"): LeaseState.ABORTED,
    (LeaseState.OPEN, "withdraw"): LeaseState.WITHDRAWN,
    (LeaseState.CLAIMED, "withdraw"): LeaseState.WITHDRAWN,
}
LIVE = (LeaseState.OPEN, LeaseState.CLAIMED)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is and what it tells peers about itself."""

    party: Party
    num_ranks: int
    product_version: str
    layout: Layout
    transports: tuple[TransportOffer, ...]
    probe: Probe


@dataclass(slots=True)
class _Lease:
    wanted: LeaseWanted
    machine: Machine
    deadline: float
    readers: frozenset[int] = frozenset()
    claimed: set[Party] = field(default_factory=set)
    completed: set[Party] = field(default_factory=set)

    @property
    def live(self) -> bool:
        return self.machine.state in LIVE

    @property
    def finished(self) -> bool:
        """Every expected reader of the claiming engine has said that its bytes are there."""
        return self.readers <= {party.rank for party in self.completed}


class SourceSession:
    """Leases of one rank. Feed it events; do what its commands say.

    A lease that has ended is kept for `tombstone_s`, so that a repeated or late message gets a true answer.
    """

    def __init__(self, identity: Identity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._leases: dict[str, _Lease] = {}
        self._by_request: dict[str, str] = {}

    def handle(self, event: LeaseWanted | LeaseWithdrawn | FrameArrived | Tick, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`. Expiry is checked first, whatever the event."""
        commands = self._expire(now)
        match event:
            case LeaseWanted():
                self._open(event, now)
            case LeaseWithdrawn():
                commands += self._withdraw(event)
            case FrameArrived():
                commands += self._answer(event, now)
            case Tick():
                pass
        return commands

    def next_deadline(self) -> float:
        """When `handle(Tick())` is due next; infinity when nothing is waited for."""
        return min((lease.deadline for lease in self._leases.values()), default=float("inf"))

    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return sum(lease.live for lease in self._leases.values())

    # --- the engine's side ---

    def _open(self, wanted: LeaseWanted, now: float) -> None:
        machine = Machine(f"lease {wanted.lease_id}", LEASE_TABLE, LeaseState.OPEN)
        self._leases[wanted.lease_id] = _Lease(wanted, machine, now + self._timing.lease_s)
        self._by_request[wanted.request_id] = wanted.lease_id

    def _withdraw(self, event: LeaseWithdrawn) -> list[Command]:
        lease = self._leases.get(self._by_request.get(event.request_id, ""))
        return self._end(lease, "withdraw", "withdrawn") if lease is not None and lease.live else []

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for lease_id, lease in list(self._leases.items()):
            if lease.deadline > now:
                continue
            if lease.live:
                commands += [*self._end(lease, "deadline", Reason.EXPIRED), Count("leases_expired", Reason.EXPIRED)]
                lease.deadline = now + self._timing.tombstone_s
            else:
                del self._leases[lease_id]
        return commands

    def _end(self, lease: _Lease, event: str, reason: str) -> list[Command]:
        """Move a lease to its terminal state and give the blocks back, exactly once."""
        lease.machine.move(event)
        if self._by_request.get(lease.wanted.request_id) == lease.wanted.lease_id:
            del self._by_request[lease.wanted.request_id]
        return [SourceFree(lease.wanted.request_id, reason)]

    # --- the peers' side ---

    def _answer(self, event: FrameArrived, now: float) -> list[Command]:
        handlers: dict[type, Callable[..., list[Command]]] = {
            Hello: self._hello,
            OfferRequest: self._offer,
            Claim: self._claim,
            Landed: self._landed,
            Renew: self._renew,
            Abort: self._abort,
        }
        handler = handlers.get(type(event.message))
        if handler is None:
            return _refuse(event.peer, Reason.MALFORMED, "a target does not send this", type(event.message).__name__)
        return handler(event.peer, event.message, now)

    def _hello(self, peer: str, hello: Hello, now: float) -> list[Command]:
        ours = self._identity.party
        if hello.wire_version != WIRE_VERSION:
            return _refuse(
                peer,
                Reason.WIRE_VERSION,
                "wire versions differ",
                f"version {hello.wire_version}",
                f"version {WIRE_VERSION}",
            )
        if hello.expects_engine_id != ours.engine_id:
            return _refuse(peer, Reason.WRONG_ENGINE, "another engine", hello.expects_engine_id, ours.engine_id)
        if hello.expects_epoch != ours.epoch:
            return _refuse(peer, Reason.WRONG_EPOCH, "the engine has restarted", hello.expects_epoch, ours.epoch)
        identity = self._identity
        name = fingerprint(identity.layout)
        return [Reply(peer, Welcome(WIRE_VERSION, identity.product_version, ours, identity.num_ranks, name))]

    def _offer(self, peer: str, request: OfferRequest, now: float) -> list[Command]:
        identity = self._identity
        return [Reply(peer, Offer(identity.party, identity.layout, identity.transports, identity.probe))]

    def _claim(self, peer: str, claim: Claim, now: float) -> list[Command]:
        reference, ours = claim.reference, self._identity.party
        lease = self._leases.get(reference.lease_id)
        if reference.epoch != ours.epoch or reference.engine_id != ours.engine_id:
            return _refuse(
                peer,
                Reason.WRONG_EPOCH,
                "the cache belongs to another incarnation",
                reference.epoch,
                ours.epoch,
                reference.lease_id,
            )
        if lease is None or lease.wanted.request_id != reference.request_id:
            return _refuse(
                peer, Reason.UNKNOWN_LEASE, "no such lease", reference.lease_id, "a live lease", reference.lease_id
            )
        if refusal := self._claim_refusal(lease, claim):
            return [Reply(peer, refusal), Count("claims_refused", refusal.reason)]
        lease.machine.move("claim")
        lease.readers |= frozenset(claim.readers)
        lease.claimed.add(claim.party)
        lease.deadline = now + self._timing.lease_s
        wanted = lease.wanted
        return [Reply(peer, Grant(wanted.lease_id, wanted.block_tables, wanted.num_tokens, self._timing.lease_s))]

    def _claim_refusal(self, lease: _Lease, claim: Claim) -> Refusal | None:
        lease_id, wanted = lease.wanted.lease_id, lease.wanted
        if not lease.live:
            return Refusal(Reason.EXPIRED, "the lease has ended", lease.machine.state, "open or claimed", lease_id)
        if any((other.engine_id, other.epoch) != (claim.party.engine_id, claim.party.epoch) for other in lease.claimed):
            return Refusal(
                Reason.NOT_CLAIMED,
                "another engine has claimed this lease",
                claim.party.engine_id,
                "one engine",
                lease_id,
            )
        if claim.num_tokens > wanted.num_tokens:
            found, expected = f"{claim.num_tokens} tokens", f"at most {wanted.num_tokens}"
            return Refusal(Reason.OUT_OF_RANGE, "more tokens than were computed", found, expected, lease_id)
        return None

    def _landed(self, peer: str, landed: Landed, now: float) -> list[Command]:
        lease = self._leases.get(landed.lease_id)
        if lease is not None and landed.party in lease.completed:
            return [Reply(peer, Valid(landed.lease_id))]
        if lease is None or landed.party not in lease.claimed:
            return _refuse(peer, Reason.NOT_CLAIMED, "landed without a claim", "", "a claim first", landed.lease_id)
        if not lease.live:
            state = lease.machine.state
            refused = Refusal(
                Reason.EXPIRED, "the lease ended before the bytes were there", state, "live", landed.lease_id
            )
            return [Reply(peer, refused), Count("landed_refused", Reason.EXPIRED)]
        lease.completed.add(landed.party)
        lease.deadline = now + self._timing.lease_s
        commands: list[Command] = [Reply(peer, Valid(landed.lease_id))]
        if lease.finished:
            commands += self._end(lease, "all readers valid", "done")
            lease.deadline = now + self._timing.tombstone_s
        return commands

    def _renew(self, peer: str, renew: Renew, now: float) -> list[Command]:
        gone = []
        for lease_id in renew.lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.live or renew.party not in lease.claimed:
                gone.append(lease_id)
            else:
                lease.deadline = now + self._timing.lease_s
        return [Reply(peer, Renewed(tuple(gone)))]

    def _abort(self, peer: str, abort: Abort, now: float) -> list[Command]:
        lease = self._leases.get(abort.lease_id)
        commands: list[Command] = [Reply(peer, Aborted(abort.lease_id))]
        if lease is not None and lease.live and abort.party in lease.claimed:
            commands += self._end(lease, "abort", Reason.ABORTED)
            lease.deadline = now + self._timing.tombstone_s
        return commands


def _refuse(peer: str, reason: Reason, what: str, found: str, expected: str = "", lease_id: str = "") -> list[Command]:
    return [Reply(peer, Refusal(reason, what, found, expected, lease_id)), Count("refusals_sent", reason)]
