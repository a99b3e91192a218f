"""The source side: leases on finished prefills. The source's own record is the only authority on who may read what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import FerryError
from kvferry.plan.extract import Extractor
from kvferry.plan.layout import Layout, fingerprint
from kvferry.session.early import Early, EarlyMessages
from kvferry.session.events import (
    ClaimKey,
    Command,
    Count,
    Digest,
    Digested,
    DropDigest,
    FrameArrived,
    LeaseWanted,
    LeaseWithdrawn,
    Reply,
    SourceFree,
    Tick,
    Timing,
)
from kvferry.session.lease import Lease
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

__all__ = ["Identity", "SourceSession"]

SourceEvent = LeaseWanted | LeaseWithdrawn | FrameArrived | Digested | Tick


MAX_OFFERED = 512


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is and what it tells peers about itself."""

    party: Party
    num_ranks: int
    product_version: str
    layout: Layout
    transports: tuple[TransportOffer, ...]
    probe: Probe


class SourceSession:
    """Leases of one rank. Feed it events; do what its commands say."""

    def __init__(self, identity: Identity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._leases: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._early = EarlyMessages()
        self._offered: dict[Party, float] = {}
        self._extractor = Extractor(identity.layout, "source")

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`. Expiry is checked first, whatever the event."""
        commands = self._expire(now)
        match event:
            case LeaseWanted():
                lease = Lease.opened(event, now + self._timing.lease_s)
                self._leases[event.lease_id] = self._by_request[event.request_id] = lease
                for early in self._early.opened(event.lease_id):
                    commands += self._answer(FrameArrived(early.peer, early.message), now)
            case LeaseWithdrawn():
                commands += self._withdraw(event, now)
            case FrameArrived():
                commands += self._answer(event, now)
            case Digested():
                commands += self._digested(event, now)
            case Tick():
                pass
        return commands

    def next_deadline(self) -> float:
        """When `handle(Tick())` is due next; infinity when nothing is waited for."""
        first = min((lease.deadline for lease in self._leases.values()), default=float("inf"))
        return min(first, self._early.next_deadline())

    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return len(self._by_request)

    def may_be_read(self, now: float) -> bool:
        """Whether a peer may be reading our memory: it has a claim, or it has our offer and tests transports."""
        is_tested = any(until > now for until in self._offered.values())
        return is_tested or any(lease.live and lease.claims for lease in self._leases.values())

    # --- how leases end ---

    def _withdraw(self, event: LeaseWithdrawn, now: float) -> list[Command]:
        lease = self._by_request.get(event.request_id)
        return [] if lease is None else self._end(lease, "withdraw", "withdrawn", now)

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for lease_id, lease in list(self._leases.items()):
            if lease.deadline > now:
                continue
            if lease.live:
                commands += self._end(lease, "deadline", Reason.EXPIRED, now)
                commands.append(Count("leases_expired", Reason.EXPIRED))
            else:
                del self._leases[lease_id]
        for early in self._early.expired(now):
            if isinstance(early.message, Claim):
                commands += _refuse(early.peer, _unknown(early.message))
        return commands

    def _end(self, lease: Lease, event: str, reason: str, now: float) -> list[Command]:
        """Move a lease to its terminal state and give the blocks back, exactly once."""
        lease.machine.move(event)
        lease.deadline = now + self._timing.tombstone_s
        del self._by_request[lease.wanted.request_id]
        commands: list[Command] = [SourceFree(lease.wanted.request_id, reason)]
        for key, peer in lease.digesting.items():
            commands += [DropDigest(key), *_refuse(peer, lease.refusal_of_digest(key))]
        lease.digesting = {}
        return commands

    # --- what targets send ---

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
            found = type(event.message).__name__
            return _refuse(event.peer, Refusal(Reason.MALFORMED, "a target does not send this", found, "", ""))
        return handler(event.peer, event.message, now)

    def _hello(self, peer: str, hello: Hello, now: float) -> list[Command]:
        ours, theirs = self._identity.party, hello
        checks = (
            (Reason.WIRE_VERSION, "wire versions differ", str(theirs.wire_version), str(WIRE_VERSION)),
            (Reason.WRONG_ENGINE, "another engine listens here", theirs.expects_engine_id, ours.engine_id),
            (Reason.WRONG_EPOCH, "the engine has restarted", theirs.expects_epoch, ours.epoch),
        )
        for reason, what, found, expected in checks:
            if found != expected:
                return _refuse(peer, Refusal(reason, what, found, expected, ""))
        identity = self._identity
        name = fingerprint(identity.layout)
        return [Reply(peer, Welcome(WIRE_VERSION, identity.product_version, ours, identity.num_ranks, name))]

    def _offer(self, peer: str, request: OfferRequest, now: float) -> list[Command]:
        identity = self._identity
        self._offered = {party: until for party, until in self._offered.items() if until > now}
        if len(self._offered) < MAX_OFFERED:
            self._offered[request.party] = now + self._timing.handshake_s
        return [Reply(peer, Offer(identity.party, identity.layout, identity.transports, identity.probe))]

    def _claim(self, peer: str, claim: Claim, now: float) -> list[Command]:
        reference, ours = claim.reference, self._identity.party
        if (reference.engine_id, reference.epoch) != (ours.engine_id, ours.epoch):
            what = "the cache belongs to another incarnation"
            return _refuse(peer, Refusal(Reason.WRONG_EPOCH, what, reference.epoch, ours.epoch, claim.claim_id))
        lease = self._leases.get(reference.lease_id)
        if lease is None:
            return self._wait_for_lease(peer, claim, now)
        if lease.wanted.request_id != reference.request_id:
            return _refuse(peer, _unknown(claim))
        for refusal in (*lease.refusal_of(claim), *self._refusal_of_state(lease, claim)):
            return _refuse(peer, refusal)
        lease.claim(claim, now + self._timing.lease_s)
        self._offered.pop(claim.party, None)
        return [Reply(peer, Grant(claim.claim_id, lease.wanted.block_tables))]

    def _refusal_of_state(self, lease: Lease, claim: Claim) -> tuple[Refusal, ...]:
        """A state of fixed size is that after the last token: it is no good to whoever goes on from another one."""
        layout = self._identity.layout
        named = layout.state_named()
        is_fixed = any(not named[placement.state].per_token for placement in layout.placements)
        if not is_fixed or claim.num_tokens in (0, lease.wanted.num_tokens):
            return ()
        what, expected = "the states of fixed size are those after other tokens", f"{lease.wanted.num_tokens} tokens"
        return (Refusal(Reason.OUT_OF_RANGE, what, f"{claim.num_tokens} tokens", expected, claim.claim_id),)

    def _wait_for_lease(self, peer: str, claim: Claim, now: float) -> list[Command]:
        """The reference may travel faster than the engine's own word to this rank: a claim waits a moment for it.

        Meanwhile a repeated claim is told that somebody is here.
        """
        lease_id = claim.reference.lease_id
        repeated = self._early.knows(lease_id, claim.party)
        if not self._early.add(lease_id, Early(peer, claim, now + self._timing.early_claim_s)):
            return _refuse(peer, _unknown(claim))
        return [Reply(peer, Renewed(()))] if repeated else []

    def _landed(self, peer: str, landed: Landed, now: float) -> list[Command]:
        lease = self._leases.get(landed.lease_id)
        if lease is None:
            return _refuse(peer, _unknown(landed))
        for refusal in lease.refusal_of_landed(landed):
            return _refuse(peer, refusal)
        if landed.party in lease.completed:
            return [Reply(peer, Valid(landed.claim_id, lease.completed[landed.party]))]
        key = ClaimKey(landed.lease_id, landed.party, landed.claim_id)
        if landed.subject.parts:
            return self._digest(peer, key, landed, now)
        return self._complete(peer, key, (), now)

    def _digest(self, peer: str, key: ClaimKey, landed: Landed, now: float) -> list[Command]:
        """Look at our own blocks before the answer. A repeated question is told that somebody is here."""
        lease = self._leases[key.lease_id]
        if key in lease.digesting:
            lease.digesting[key] = peer
            return [Reply(peer, Renewed(()))]
        try:
            wanted = lease.wanted
            extracts = self._extractor.extracts(landed.subject, wanted.block_tables, wanted.num_tokens)
        except FerryError as error:
            return _refuse(peer, Refusal(Reason.OUT_OF_RANGE, error.what, error.found, error.expected, key.claim_id))
        lease.digesting[key] = peer
        lease.deadline = now + self._timing.lease_s
        return [Digest(key, extracts)]

    def _digested(self, event: Digested, now: float) -> list[Command]:
        """Only of a lease that is still live: else it is not known whose bytes those were, and the reader has been told
        when it ended."""
        key = event.key
        lease = self._leases.get(key.lease_id) if isinstance(key, ClaimKey) else None
        if lease is None or not isinstance(key, ClaimKey) or key not in lease.digesting:
            return []
        peer = lease.digesting.pop(key)
        if event.error:
            return _refuse(peer, Refusal(Reason.DIGEST, "no digest can be made", event.error, "", key.claim_id))
        return self._complete(peer, key, event.values, now)

    def _complete(self, peer: str, key: ClaimKey, digests: tuple[bytes, ...], now: float) -> list[Command]:
        """One reader has its bytes; when all have, the blocks are free."""
        lease = self._leases[key.lease_id]
        commands: list[Command] = [Reply(peer, Valid(key.claim_id, digests))]
        lease.completed[key.party] = digests
        if lease.finished:
            commands += self._end(lease, "all readers valid", "done", now)
        else:
            lease.deadline = now + self._timing.lease_s
        return commands

    def _renew(self, peer: str, renew: Renew, now: float) -> list[Command]:
        gone = []
        for lease_id in renew.lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.renews(renew.party):
                gone.append(lease_id)
            else:
                lease.deadline = now + self._timing.lease_s
        return [Reply(peer, Renewed(tuple(gone)))]

    def _abort(self, peer: str, abort: Abort, now: float) -> list[Command]:
        """Only a lease's own claim ends it; before any claim, whoever knows its unguessable id."""
        lease = self._leases.get(abort.lease_id)
        commands: list[Command] = [Reply(peer, Aborted(abort.claim_id))]
        if lease is None:
            self._early.add(abort.lease_id, Early(peer, abort, now + self._timing.early_claim_s))
        if lease is not None and lease.live and (not lease.claims or lease.holds(abort.party, abort.claim_id)):
            commands += self._end(lease, "abort", Reason.ABORTED, now)
        return commands


def _unknown(about: Claim | Landed) -> Refusal:
    lease_id = about.reference.lease_id if isinstance(about, Claim) else about.lease_id
    return Refusal(Reason.UNKNOWN_LEASE, "no such lease", lease_id, "a live lease", about.claim_id)


def _refuse(peer: str, refusal: Refusal) -> list[Command]:
    return [Reply(peer, refusal), Count("refusals_sent", refusal.reason)]
