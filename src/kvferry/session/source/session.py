"""The source side: leases on finished prefills. The source's own record is the only authority on who may read what.

A target reads by itself, or the source writes (`writes`). Blocks that are written from belong to the lease until the
tickets have ended, however the lease ended.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import TransferError
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Command, Reply
from kvferry.session.events import (
    Acquired,
    Digested,
    FrameArrived,
    LeaseProgress,
    LeaseRequest,
    LeaseWithdrawn,
    PeerConnected,
    PeerUnreachable,
    Staged,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.session.refusals import because_of, refuse, unknown_lease
from kvferry.session.source.aborted_claims import AbortedClaims
from kvferry.session.source.completed_reads import CompletedReads
from kvferry.session.source.early_messages import EarlyMessage, EarlyMessages
from kvferry.session.source.handshake import SourceHandshake, SourceIdentity
from kvferry.session.source.lease import Lease
from kvferry.session.source.lease_table import LeaseTable
from kvferry.session.source.targets import Targets
from kvferry.session.source.writes import Writes
from kvferry.session.timeouts import Timing
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
)

SourceEvent = (
    LeaseRequest
    | LeaseProgress
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
    """Leases of one rank. Give it every event, and carry out the commands that it returns."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._early = EarlyMessages()
        self._handshake = SourceHandshake(identity, timing.handshake_s)
        self._aborted = AbortedClaims()
        self._targets = Targets(identity.layouts, identity.party.rank, timing)
        self._writes = Writes(self._targets, identity.party.epoch, timing.transfer_s)
        self._leases = LeaseTable(self._writes, timing)
        self._completed_reads = CompletedReads(self._leases, Extractor(identity.layout, "source"))
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            LeaseRequest: self._lease,
            LeaseProgress: self._grow,
            LeaseWithdrawn: self._withdraw,
            FrameArrived: self._answer,
            PeerConnected: self._connected,
            PeerUnreachable: self._connected,
            TicketEnded: self._write_progressed,
            Acquired: self._write_progressed,
            Staged: self._write_progressed,
            Digested: self._completed_reads.digested,
            Tick: self._tick,
        }
        self._answers: dict[type, Callable[..., list[Command]]] = {
            Hello: self._hello,
            OfferRequest: self._offer,
            TargetOffer: self._target_offer,
            Claim: self._claim,
            Pack: self._pack,
            Landed: self._completed_reads.landed,
            Renew: self._renew,
            Abort: self._abort,
        }

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`. Expiry is checked first, whatever the event."""
        return [*self._expire(now), *self._handlers[type(event)](event, now)]

    def next_deadline(self) -> float:
        """When `handle(Tick())` is due next, 0 for at once; infinity when nothing is waited for."""
        if self._writes.has_shares:
            return 0.0
        waiting = self._early.next_deadline(), self._aborted.next_deadline(), self._targets.next_deadline()
        return min(self._leases.next_deadline(), self._completed_reads.next_deadline(), *waiting)

    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return self._leases.num_live

    def may_be_read(self, now: float) -> bool:
        """Whether a peer may be reading our memory: it tests transports with our offer, or a claim lacks its end."""
        return self._handshake.is_tested(now) or self._leases.may_be_read

    # --- how leases begin and end ---

    def _lease(self, event: LeaseRequest, now: float) -> list[Command]:
        self._leases.open(event, now)
        early = self._early.opened(event.lease_id)
        return [command for each in early for command in self._answer(FrameArrived(each.peer, each.message), now)]

    def _grow(self, event: LeaseProgress, now: float) -> list[Command]:
        """More tokens of a request are computed: write them, and grant the claims that were waiting for the last
        one."""
        lease = self._leases.of_request(event.request_id)
        if lease is None or not lease.live:
            return []
        lease.grow(event)
        self._leases.renew(lease, now)
        commands = list(self._writes.grown(lease))
        for key in lease.writes:
            self._completed_reads.started(lease, key.party, now)
        for party, (peer, claim) in list(lease.waiting.items()):
            if claim.num_tokens <= lease.num_ready:
                del lease.waiting[party]
                commands += self._claim(peer, claim, now)
        if lease.readers and lease.finished:
            commands += self._leases.end(lease, "all readers valid", "done", now)
        return commands

    def _tick(self, event: Tick, now: float) -> list[Command]:
        return [*self._writes.prepare(), *self._completed_reads.prepare(now)]

    def _connected(self, event: PeerConnected | PeerUnreachable, now: float) -> list[Command]:
        return self._targets.settled(event)

    def _withdraw(self, event: LeaseWithdrawn, now: float) -> list[Command]:
        lease = self._leases.of_request(event.request_id)
        return self._leases.end(lease, "withdraw", "withdrawn", now) if lease is not None and lease.live else []

    def _expire(self, now: float) -> list[Command]:
        if now < self.next_deadline():
            return []
        commands = self._leases.expire(now)
        for early in self._early.expired(now):
            if isinstance(early.message, Claim):
                commands += refuse(early.peer, unknown_lease(early.message))
        self._aborted.expire(now)
        return commands + self._targets.expire(self._leases.writing, now)

    # --- what targets send ---

    def _answer(self, event: FrameArrived, now: float) -> list[Command]:
        handler = self._answers.get(type(event.message))
        if handler is None:
            found = type(event.message).__name__
            return refuse(event.peer, Refusal(Reason.MALFORMED, "unexpected message from a target", found, "", ""))
        return handler(event.peer, event.message, now)

    def _hello(self, peer: str, hello: Hello, now: float) -> list[Command]:
        answer = self._handshake.hello(hello)
        return refuse(peer, answer) if isinstance(answer, Refusal) else [Reply(peer, answer)]

    def _offer(self, peer: str, request: OfferRequest, now: float) -> list[Command]:
        return [Reply(peer, self._handshake.offer(request, now))]

    def _target_offer(self, peer: str, offer: TargetOffer, now: float) -> list[Command]:
        return self._targets.offered(peer, offer, self._leases.writing, now)

    def _claim(self, peer: str, claim: Claim, now: float) -> list[Command]:
        reference, ours = claim.reference, self._identity.party
        # A target that reads now may want to be written to later, and expects that its offer is still known.
        self._targets.heard(claim.party, now)
        self._handshake.end_test(claim.party)
        if (reference.engine_id, reference.epoch) != (ours.engine_id, ours.epoch):
            what = "the engine has been restarted since it computed this cache"
            return refuse(peer, Refusal(Reason.WRONG_EPOCH, what, reference.epoch, ours.epoch, claim.claim_id))
        if (claim.party, claim.claim_id) in self._aborted:
            return refuse(peer, Refusal(Reason.ABORTED, "the claim has been aborted", "", "", claim.claim_id))
        lease = self._leases.get(reference.lease_id)
        return self._wait_for_lease(peer, claim, now) if lease is None else self._open(peer, claim, lease, now)

    def _open(self, peer: str, claim: Claim, lease: Lease, now: float) -> list[Command]:
        """Grant a claim, if the lease's record supports it."""
        if lease.wanted.request_id != claim.reference.request_id:
            return refuse(peer, unknown_lease(claim))
        if answer := self._writes.repeated(peer, claim, lease):
            return answer
        for refusal in (*_refusal_of_share(claim), *lease.refusal_of(claim), *self._refusal_of_state(lease, claim)):
            return refuse(peer, refusal)
        if claim.direction is Direction.WRITE:
            return self._write(peer, claim, lease, now)
        if lease.num_ready < claim.num_tokens:
            lease.waiting[claim.party] = peer, claim
            self._leases.renew(lease, now)
            return [Reply(peer, Queued(claim.claim_id))]
        try:
            shared = self._writes.share(peer, claim, lease) if claim.read_from else []
        except TransferError as error:
            return refuse(peer, _of_writing(error, claim))
        self._leases.claim(lease, claim, now)
        self._completed_reads.started(lease, claim.party, now)
        return [Reply(peer, Grant(claim.claim_id, lease.wanted.block_tables)), *shared]

    def _write(self, peer: str, claim: Claim, lease: Lease, now: float) -> list[Command]:
        """Carry a claim out."""
        is_known = lease.has_granted(claim.party, claim.claim_id)
        try:
            commands = self._writes.begin(peer, claim, lease)
        except TransferError as error:
            return refuse(peer, _of_writing(error, claim))
        if is_known:
            self._leases.renew(lease, now)
        else:
            self._leases.claim(lease, claim, now)
        if not claim.strategy.source_gathers:
            self._completed_reads.started(lease, claim.party, now)
        return commands + self._completed_reads.written(lease, now)

    def _pack(self, peer: str, pack: Pack, now: float) -> list[Command]:
        """Write one slot of a claim. After the end of its claim nothing may be written: the target's slot may belong to
        another transfer."""
        self._targets.heard(pack.party, now)
        lease = self._leases.get(pack.lease_id)
        if lease is None:
            return refuse(peer, unknown_lease(pack))
        key = ClaimKey(pack.lease_id, pack.party, pack.claim_id)
        # What is written is confirmed again, also when the lease is over.
        is_served = lease.live or lease.is_written(key)
        if (pack.party, pack.claim_id) in self._aborted or not is_served:
            return refuse(peer, lease.refusal_of_end(key))
        try:
            commands = list(self._writes.pack(peer, pack, lease, now))
        except TransferError as error:
            return refuse(peer, because_of(error, pack.claim_id))
        if lease.live:
            self._leases.renew(lease, now)
            self._completed_reads.started(lease, pack.party, now)
        return commands

    def _write_progressed(self, event: TicketEnded | Acquired | Staged, now: float) -> list[Command]:
        """A claim that the source writes has made progress."""
        key = event.key.work if isinstance(event.key, SlotKey) else event.key
        if not isinstance(key, ClaimKey) or (lease := self._leases.get(key.lease_id)) is None:
            return []
        self._targets.heard(key.party, now)
        if isinstance(event, TicketEnded) and not isinstance(event.key, SlotKey):
            commands = list(self._writes.ticket_ended(event, lease))
        else:
            commands = list(self._writes.slot_changed(event, lease, now))
        if lease.live:
            self._leases.renew(lease, now)
        return [*commands, *self._completed_reads.written(lease, now), *self._leases.free_when_drained(lease)]

    def _refusal_of_state(self, lease: Lease, claim: Claim) -> tuple[Refusal, ...]:
        """A state of fixed size is the one after the last token: it cannot be used after any other token."""
        layout = self._identity.layout
        named = layout.state_named()
        is_fixed = any(not named[placement.state].per_token for placement in layout.placements)
        if not is_fixed or claim.num_tokens in (0, lease.wanted.num_tokens):
            return ()
        what, expected = (
            "the states of fixed size belong to a prompt of another length",
            f"{lease.wanted.num_tokens} tokens",
        )
        return (Refusal(Reason.OUT_OF_RANGE, what, f"{claim.num_tokens} tokens", expected, claim.claim_id),)

    def _wait_for_lease(self, peer: str, claim: Claim, now: float) -> list[Command]:
        """A claim may arrive before the engine has told this rank of the lease: it waits for that a while.

        Meanwhile a repeated claim is answered, so that the target knows that its source is alive.
        """
        lease_id = claim.reference.lease_id
        repeated = self._early.knows(lease_id, claim.party)
        if not self._early.add(lease_id, EarlyMessage(peer, claim, now + self._timing.early_claim_s)):
            return refuse(peer, unknown_lease(claim))
        return [Reply(peer, Renewed(()))] if repeated else []

    def _renew(self, peer: str, renew: Renew, now: float) -> list[Command]:
        self._targets.heard(renew.party, now)
        if not renew.lease_ids:
            self._handshake.end_test(renew.party)
        gone = []
        for lease_id in renew.lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.serves(renew.party):
                gone.append(lease_id)
            elif lease.live:
                self._leases.renew(lease, now)
        return [Reply(peer, Renewed(tuple(gone)))]

    def _abort(self, peer: str, abort: Abort, now: float) -> list[Command]:
        """Only a lease's own claim ends it; before any claim, whoever knows its unguessable id.

        It is acknowledged when nothing is written for it any more and nothing ever will be.
        """
        lease = self._leases.get(abort.lease_id)
        if not self._aborted.add(abort.party, abort.claim_id, now + self._timing.tombstone_s):
            return []
        if lease is None:
            self._early.add(abort.lease_id, EarlyMessage(peer, abort, now + self._timing.early_claim_s))
            return [Reply(peer, Aborted(abort.claim_id, self._identity.party.epoch, is_clean=True))]
        lease.waiting.pop(abort.party, None)
        commands = list(self._writes.abort(peer, ClaimKey(abort.lease_id, abort.party, abort.claim_id), lease))
        if lease.live and (not lease.claims or lease.has_granted(abort.party, abort.claim_id)):
            commands += self._leases.end(lease, "abort", Reason.ABORTED, now)
        return commands


def _refusal_of_share(claim: Claim) -> tuple[Refusal, ...]:
    """A share can be written only of what is read directly: otherwise the target would lack the rest."""
    if not claim.read_from or (claim.direction, claim.strategy) == (Direction.READ, Strategy.DIRECT):
        return ()
    found = f"direction {claim.direction}, strategy {claim.strategy}"
    what, expected = "only a direct read can be shared", f"{Direction.READ}, {Strategy.DIRECT}"
    return (Refusal(Reason.MALFORMED, what, found, expected, claim.claim_id),)


def _of_writing(error: TransferError, claim: Claim) -> Refusal:
    """The refusal of a write. A target that is not known here has to begin again with its offer."""
    return because_of(error, "" if error.reason == Reason.UNREACHABLE else claim.claim_id)
