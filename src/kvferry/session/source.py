"""The source side: leases on finished prefills. The source's own record is the only authority on who may read what.

A target reads by itself, or it has us write (`writes`). Then the blocks stay the lease's until our tickets have ended,
however the lease ended.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import FerryError, TransferError
from kvferry.plan.copies import Direction
from kvferry.plan.extract import Extractor
from kvferry.session.aborted import AbortedClaims
from kvferry.session.carrying import Carrying
from kvferry.session.early import Early, EarlyMessages
from kvferry.session.events import (
    Acquired,
    ClaimKey,
    Command,
    Count,
    Digest,
    Digested,
    DropDigest,
    FrameArrived,
    LeaseGrown,
    LeaseWanted,
    LeaseWithdrawn,
    PeerConnected,
    PeerUnreachable,
    Reply,
    SlotKey,
    SourceFree,
    Staged,
    Tick,
    TicketEnded,
    Timing,
)
from kvferry.session.introduction import Identity, Introduction
from kvferry.session.lease import Lease
from kvferry.session.targets import Targets
from kvferry.wire.messages import (
    Abort,
    Aborted,
    Claim,
    Grant,
    Hello,
    Landed,
    OfferRequest,
    Pack,
    Queued,
    Reason,
    Refusal,
    Renew,
    Renewed,
    TargetOffer,
    Valid,
)

__all__ = ["SourceSession"]

SourceEvent = (
    LeaseWanted
    | LeaseGrown
    | LeaseWithdrawn
    | FrameArrived
    | PeerConnected
    | PeerUnreachable
    | TicketEnded
    | Acquired
    | Staged
    | Digested
    | Tick
)


class SourceSession:
    """Leases of one rank. Feed it events; do what its commands say."""

    def __init__(self, identity: Identity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._leases: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._early = EarlyMessages()
        self._introduction = Introduction(identity, timing.handshake_s)
        self._aborted = AbortedClaims()
        self._targets = Targets(identity.layouts, identity.party.rank, timing)
        self._carrying = Carrying(self._targets, identity.party.epoch, timing.transfer_s)
        self._extractor = Extractor(identity.layout, "source")

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`. Expiry is checked first, whatever the event."""
        handlers: dict[type, Callable[..., list[Command]]] = {
            LeaseWanted: self._lease,
            LeaseGrown: self._grow,
            LeaseWithdrawn: self._withdraw,
            FrameArrived: self._answer,
            PeerConnected: self._connected,
            PeerUnreachable: self._connected,
            TicketEnded: self._ticket_ended,
            Acquired: self._slot_changed,
            Staged: self._slot_changed,
            Digested: self._digested,
            Tick: self._tick,
        }
        return [*self._expire(now), *handlers[type(event)](event, now)]

    def next_deadline(self) -> float:
        """When `handle(Tick())` is due next; infinity when nothing is waited for."""
        first = min((lease.deadline for lease in self._leases.values()), default=float("inf"))
        waiting = self._early.next_deadline(), self._aborted.next_deadline(), self._targets.next_deadline()
        return min(first, *waiting)

    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return len(self._by_request)

    def may_be_read(self, now: float) -> bool:
        """Whether a peer may be reading our memory: it tests transports with our offer, or a claim lacks its end.

        Also of a lease that has ended: its reader can use its own blocks again only when its ticket has ended.
        """
        return self._introduction.is_tested(now) or any(
            lease.claims.keys() - lease.completed.keys() for lease in self._leases.values()
        )

    # --- how leases begin and end ---

    def _lease(self, event: LeaseWanted, now: float) -> list[Command]:
        lease = Lease.opened(event, now + self._timing.lease_s)
        self._leases[event.lease_id] = self._by_request[event.request_id] = lease
        early = self._early.opened(event.lease_id)
        return [command for each in early for command in self._answer(FrameArrived(each.peer, each.message), now)]

    def _grow(self, event: LeaseGrown, now: float) -> list[Command]:
        """More tokens of a request are computed: write them, and let those read that wait for the last one."""
        lease = self._by_request.get(event.request_id)
        if lease is None or not lease.live:
            return []
        lease.grow(event)
        lease.deadline = now + self._timing.lease_s
        commands = list(self._carrying.grown(lease))
        for party, (peer, claim) in list(lease.waiting.items()):
            if claim.num_tokens <= lease.num_ready:
                del lease.waiting[party]
                commands += self._claim(peer, claim, now)
        if lease.readers and lease.finished:
            commands += self._end(lease, "all readers valid", "done", now)
        return commands

    def _tick(self, event: Tick, now: float) -> list[Command]:
        return []

    def _connected(self, event: PeerConnected | PeerUnreachable, now: float) -> list[Command]:
        return self._targets.settled(event)

    def _withdraw(self, event: LeaseWithdrawn, now: float) -> list[Command]:
        lease = self._by_request.get(event.request_id)
        return self._end(lease, "withdraw", "withdrawn", now) if lease is not None and lease.live else []

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for lease_id, lease in list(self._leases.items()):
            if lease.deadline > now:
                continue
            if lease.live:
                commands += self._end(lease, "deadline", Reason.EXPIRED, now)
            elif lease.is_writing:
                lease.deadline = now + self._timing.tombstone_s
            else:
                del self._leases[lease_id]
        for early in self._early.expired(now):
            if isinstance(early.message, Claim):
                commands += _refuse(early.peer, _unknown(early.message))
        self._aborted.expire(now)
        writing = {key.party for lease in self._leases.values() for key in lease.writes if lease.is_writing}
        return commands + self._targets.expire(writing, now)

    def _end(self, lease: Lease, event: str, reason: str, now: float) -> list[Command]:
        """Move a lease to its terminal state, and give the blocks back as soon as nothing looks at them."""
        lease.machine.move(event)
        lease.deadline, lease.ended_as = now + self._timing.tombstone_s, reason
        commands = list(self._carrying.end(lease))
        for key, peer in lease.digesting.items():
            commands += [DropDigest(key), *_refuse(peer, lease.refusal_of_end(key))]
        for peer, claim in lease.waiting.values():
            commands += _refuse(peer, Refusal(Reason.EXPIRED, "the lease has ended", reason, "live", claim.claim_id))
        lease.digesting, lease.waiting = {}, {}
        return [*self._free_when_drained(lease), *commands]

    def _free_when_drained(self, lease: Lease) -> list[Command]:
        """Exactly once."""
        if lease.live or lease.is_freed or lease.is_writing:
            return []
        lease.is_freed = True
        del self._by_request[lease.wanted.request_id]
        freed = SourceFree(lease.wanted.request_id, lease.ended_as)
        return [freed, *([Count("leases_expired", Reason.EXPIRED)] if lease.ended_as == Reason.EXPIRED else [])]

    # --- what targets send ---

    def _answer(self, event: FrameArrived, now: float) -> list[Command]:
        handlers: dict[type, Callable[..., list[Command]]] = {
            Hello: self._hello,
            OfferRequest: self._offer,
            TargetOffer: self._target_offer,
            Claim: self._claim,
            Pack: self._pack,
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
        answer = self._introduction.hello(hello)
        return _refuse(peer, answer) if isinstance(answer, Refusal) else [Reply(peer, answer)]

    def _offer(self, peer: str, request: OfferRequest, now: float) -> list[Command]:
        return [Reply(peer, self._introduction.offer(request, now))]

    def _target_offer(self, peer: str, offer: TargetOffer, now: float) -> list[Command]:
        return self._targets.offered(peer, offer, now)

    def _claim(self, peer: str, claim: Claim, now: float) -> list[Command]:
        reference, ours = claim.reference, self._identity.party
        # Whoever reads now may want to be written to later, and still count on being known.
        self._targets.heard(claim.party, now)
        if (reference.engine_id, reference.epoch) != (ours.engine_id, ours.epoch):
            what = "the cache belongs to another incarnation"
            return _refuse(peer, Refusal(Reason.WRONG_EPOCH, what, reference.epoch, ours.epoch, claim.claim_id))
        if (claim.party, claim.claim_id) in self._aborted:
            return _refuse(peer, Refusal(Reason.ABORTED, "the claim has been aborted", "", "", claim.claim_id))
        lease = self._leases.get(reference.lease_id)
        if lease is None:
            return self._wait_for_lease(peer, claim, now)
        if lease.wanted.request_id != reference.request_id:
            return _refuse(peer, _unknown(claim))
        for refusal in (*lease.refusal_of(claim), *self._refusal_of_state(lease, claim)):
            return _refuse(peer, refusal)
        if claim.direction is Direction.WRITE:
            return self._write(peer, claim, lease, now)
        if lease.num_ready < claim.num_tokens:
            lease.waiting[claim.party] = peer, claim
            lease.deadline = now + self._timing.lease_s
            return [Reply(peer, Queued(claim.claim_id))]
        lease.claim(claim, now + self._timing.lease_s)
        self._introduction.has_met(claim.party)
        return [Reply(peer, Grant(claim.claim_id, lease.wanted.block_tables))]

    def _write(self, peer: str, claim: Claim, lease: Lease, now: float) -> list[Command]:
        """Carry a claim out."""
        is_known = lease.holds(claim.party, claim.claim_id)
        try:
            commands = list(self._carrying.begin(peer, claim, lease))
        except TransferError as error:
            # A target that is not known here has to begin anew with its offer.
            claim_id = "" if error.reason == Reason.UNREACHABLE else claim.claim_id
            return _refuse(peer, _refusal_of(error, claim_id))
        if is_known:
            lease.deadline = now + self._timing.lease_s
        else:
            lease.claim(claim, now + self._timing.lease_s)
        return commands

    def _pack(self, peer: str, pack: Pack, now: float) -> list[Command]:
        """Write one slot of a claim. A question that arrives after the end of its claim must not be answered by
        writing: the target's slot may be somebody else's."""
        self._targets.heard(pack.party, now)
        lease = self._leases.get(pack.lease_id)
        if lease is None:
            return _refuse(peer, _unknown(pack))
        if (pack.party, pack.claim_id) in self._aborted or not lease.live:
            return _refuse(peer, lease.refusal_of_end(ClaimKey(pack.lease_id, pack.party, pack.claim_id)))
        try:
            commands = list(self._carrying.pack(peer, pack, lease, now))
        except TransferError as error:
            return _refuse(peer, _refusal_of(error, pack.claim_id))
        lease.deadline = now + self._timing.lease_s
        return commands

    def _slot_changed(self, event: Acquired | Staged, now: float) -> list[Command]:
        lease = self._leases.get(event.key.work.lease_id) if isinstance(event.key.work, ClaimKey) else None
        if lease is None:
            return []
        return [*self._carrying.slot_changed(event, lease, now), *self._free_when_drained(lease)]

    def _ticket_ended(self, event: TicketEnded, now: float) -> list[Command]:
        key = event.key.work if isinstance(event.key, SlotKey) else event.key
        lease = self._leases.get(key.lease_id) if isinstance(key, ClaimKey) else None
        if lease is None:
            return []
        if isinstance(event.key, SlotKey):
            commands = list(self._carrying.slot_changed(event, lease, now))
        else:
            commands = list(self._carrying.ticket_ended(event, lease))
        if lease.live:
            lease.deadline = now + self._timing.lease_s
        return [*commands, *self._free_when_drained(lease)]

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
        self._targets.heard(renew.party, now)
        gone = []
        for lease_id in renew.lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.renews(renew.party):
                gone.append(lease_id)
            else:
                lease.deadline = now + self._timing.lease_s
        return [Reply(peer, Renewed(tuple(gone)))]

    def _abort(self, peer: str, abort: Abort, now: float) -> list[Command]:
        """Only a lease's own claim ends it; before any claim, whoever knows its unguessable id.

        It is acknowledged when nothing is written for it any more and nothing ever will be.
        """
        lease = self._leases.get(abort.lease_id)
        if not self._aborted.add(abort.party, abort.claim_id, now + self._timing.tombstone_s):
            return []
        key = ClaimKey(abort.lease_id, abort.party, abort.claim_id)
        if lease is None:
            commands: list[Command] = [Reply(peer, Aborted(abort.claim_id, self._identity.party.epoch, is_clean=True))]
        else:
            commands = list(self._carrying.abort(peer, key, lease))
        if lease is None:
            self._early.add(abort.lease_id, Early(peer, abort, now + self._timing.early_claim_s))
        if lease is not None:
            lease.waiting.pop(abort.party, None)
        if lease is not None and lease.live and (not lease.claims or lease.holds(abort.party, abort.claim_id)):
            commands += self._end(lease, "abort", Reason.ABORTED, now)
        return commands


def _refusal_of(error: TransferError, claim_id: str) -> Refusal:
    return Refusal(Reason(error.reason), error.what, error.found, error.expected, claim_id)


def _unknown(about: Claim | Landed | Pack) -> Refusal:
    lease_id = about.reference.lease_id if isinstance(about, Claim) else about.lease_id
    return Refusal(Reason.UNKNOWN_LEASE, "no such lease", lease_id, "a live lease", about.claim_id)


def _refuse(peer: str, refusal: Refusal) -> list[Command]:
    return [Reply(peer, refusal), Count("refusals_sent", refusal.reason)]
