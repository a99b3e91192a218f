"""The source side: leases on finished prefills. The source's own record is the only authority on who may read what.

A target reads by itself, or the source writes (`writes`). Blocks that are written from belong to the lease until the
tickets have ended, however the lease ended.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import FerryError, IllegalEventError, TransferError
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session import events as e
from kvferry.session.commands import Command, LeaseEnded, Reply
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.session.refusals import refuse, unknown_lease
from kvferry.session.source.completed_reads import CompletedReads
from kvferry.session.source.early_messages import AbortedClaims, EarlyMessage, EarlyMessages
from kvferry.session.source.handshake import SourceHandshake, SourceIdentity
from kvferry.session.source.lease import Lease
from kvferry.session.source.lease_table import LeaseTable
from kvferry.session.source.targets import Targets
from kvferry.session.source.writes import Writes
from kvferry.session.timing import Timing
from kvferry.wire import messages as m
from kvferry.wire.messages import Reason

_EngineEvent = e.LeaseRequest | e.LeaseProgress | e.LeaseWithdrawn | e.RanksKnown
_WriteEvent = e.TicketEnded | e.Acquired | e.Staged
_AboutPeer = e.PeerConnected | e.PeerUnreachable | e.PeerMoved
SourceEvent = _EngineEvent | _WriteEvent | e.FrameArrived | _AboutPeer | e.Digested | e.Tick

# How a lease ends that has the id of another one.
LEASE_ID_IN_USE = "lease_id_in_use"


class SourceSession:
    """Leases of one rank. Give it every event, and carry out the commands that it returns."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._early = EarlyMessages()
        self._handshake = SourceHandshake(identity, timing.handshake_s)
        self._aborted = AbortedClaims()
        # Of caches that another start of this engine has computed.
        self._foreign = AbortedClaims()
        self._targets = Targets(identity.layouts, identity.party.rank, timing)
        self._writes = Writes(self._targets, identity.party.epoch, timing.transfer_s)
        self._leases = LeaseTable(self._writes, timing)
        self._completed_reads = CompletedReads(self._leases, Extractor(identity.layout, "source"))
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            e.LeaseRequest: self._lease,
            e.LeaseProgress: self._grow,
            e.LeaseWithdrawn: self._withdraw,
            e.RanksKnown: self._introduce,
            e.FrameArrived: self._answer,
            e.PeerConnected: self._connected,
            e.PeerUnreachable: self._connected,
            e.PeerMoved: self._moved,
            e.TicketEnded: self._write_progressed,
            e.Acquired: self._write_progressed,
            e.Staged: self._write_progressed,
            e.Digested: self._completed_reads.digested,
            e.Tick: self._tick,
        }
        self._answers: dict[type, Callable[..., list[Command]]] = {
            m.Hello: self._hello,
            m.OfferRequest: self._offer,
            m.TargetOffer: self._target_offer,
            m.Claim: self._claim,
            m.Pack: self._pack,
            m.Landed: self._completed_reads.landed,
            m.Renew: self._renew,
            m.Abort: self._abort,
        }

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`. Expiry is checked first, whatever the event."""
        return [*self._expire(now), *self._handlers[type(event)](event, now)]

    def next_deadline(self) -> float:
        """When `handle(Tick())` is due next, 0 for at once; infinity when nothing is waited for."""
        if self._writes.has_shares or self._completed_reads.has_started:
            return 0.0
        parts = self._leases, self._early, self._aborted, self._foreign, self._targets
        return min(part.next_deadline() for part in parts)

    def num_live(self) -> int:
        """Leases whose blocks the engine still keeps."""
        return self._leases.num_live

    def may_be_read(self, now: float) -> bool:
        """Whether a peer may be reading our memory: it tests transports with our offer, or a claim lacks its end."""
        return self._handshake.is_tested(now) or self._leases.may_be_read

    # --- how leases begin and end ---

    def _lease(self, event: e.LeaseRequest, now: float) -> list[Command]:
        known = self._leases.get(event.lease_id)
        if known is not None and not known.is_freed and known.request.request_id != event.request_id:
            # Whoever reads by that id reads the other one's blocks, and nobody ever would these. If the other one has
            # ended, what is still written out of its blocks has to find it by its id.
            return [LeaseEnded(event.request_id, LEASE_ID_IN_USE)]
        self._leases.open(event, now)
        early = self._early.opened(event.lease_id)
        return [command for each in early for command in self._answer(e.FrameArrived(each.peer, each.message), now)]

    def _grow(self, event: e.LeaseProgress, now: float) -> list[Command]:
        """More tokens of a request are computed: write them, and grant the claims that were waiting for the last
        one."""
        lease = self._leases.of_request(event.request_id)
        if lease is None or not lease.live:
            return []
        lease.grow(event)
        self._leases.renew(lease, now)
        commands = list(self._writes.grown(lease))
        for key in lease.writes:
            self._completed_reads.started(lease, key.party)
        for party, (peer, claim) in list(lease.waiting.items()):
            if claim.num_tokens <= lease.num_ready:
                del lease.waiting[party]
                commands += self._answer(e.FrameArrived(peer, claim), now)
        if lease.readers and lease.finished:
            commands += self._leases.end(lease, "all readers valid", "done", now)
        return commands

    def _introduce(self, event: e.RanksKnown, now: float) -> list[Command]:
        self._handshake.addresses = event.addresses
        self._handshake.data_parallel_size = event.data_parallel_size
        return []

    def _tick(self, event: e.Tick, now: float) -> list[Command]:
        # What is written is posted before anything is planned that can wait.
        return list(self._writes.prepare()) or self._completed_reads.prepare()

    def _moved(self, event: e.PeerMoved, now: float) -> list[Command]:
        self._leases.moved(event.peer, now)
        return []

    def _connected(self, event: e.PeerConnected | e.PeerUnreachable, now: float) -> list[Command]:
        return self._targets.settled(event)

    def _withdraw(self, event: e.LeaseWithdrawn, now: float) -> list[Command]:
        lease = self._leases.of_request(event.request_id)
        return self._leases.end(lease, "withdraw", "withdrawn", now) if lease is not None and lease.live else []

    def _expire(self, now: float) -> list[Command]:
        if now < self.next_deadline():
            return []
        commands = self._leases.expire(now)
        for early in self._early.expired(now):
            if isinstance(early.message, m.Claim):
                unknown = unknown_lease(early.message.reference.lease_id)
                commands += refuse(early.peer, unknown, early.message.claim_id)
        self._aborted.expire(now)
        self._foreign.expire(now)
        return commands + self._targets.expire(self._leases.writing, now)

    # --- what targets send ---

    def _answer(self, event: e.FrameArrived, now: float) -> list[Command]:
        """Whatever stands in the way of an answer is a refusal. A target that is not known here has to begin again with
        its offer: that refusal is not about a claim."""
        message = event.message
        try:
            handler = self._answers.get(type(message))
            if handler is None:
                found = type(message).__name__
                raise TransferError(Reason.MALFORMED, "unexpected message from a target", found=found)
            return handler(event.peer, message, now)
        except IllegalEventError:
            raise
        except FerryError as error:
            is_unmet = isinstance(error, TransferError) and error.reason == Reason.UNREACHABLE
            return refuse(event.peer, error, "" if is_unmet else getattr(message, "claim_id", ""))

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Command]:
        return [Reply(peer, self._handshake.hello(hello))]

    def _offer(self, peer: str, request: m.OfferRequest, now: float) -> list[Command]:
        return [Reply(peer, self._handshake.offer(request, now))]

    def _target_offer(self, peer: str, offer: m.TargetOffer, now: float) -> list[Command]:
        return self._targets.offered(peer, offer, self._leases.writing, now)

    def _claim(self, peer: str, claim: m.Claim, now: float) -> list[Command]:
        """Grant a claim, if the lease's record supports it. Raises FerryError if not."""
        reference, ours = claim.reference, self._identity.party
        # A target that reads now may want to be written to later, and expects that its offer is still known.
        self._targets.heard(claim.party, now)
        self._handshake.end_test(claim.party)
        if (reference.engine_id, reference.epoch) != (ours.engine_id, ours.epoch):
            self._foreign.add(claim.party, claim.claim_id, now + self._timing.tombstone_s)
            what = "the engine has been restarted since it computed this cache"
            raise TransferError(Reason.WRONG_EPOCH, what, found=reference.epoch, expected=ours.epoch)
        if (claim.party, claim.claim_id) in self._aborted:
            raise TransferError(Reason.ABORTED, "the claim has been aborted")
        lease = self._leases.get(reference.lease_id)
        if lease is None:
            return self._wait_for_lease(peer, claim, now)
        if lease.request.request_id != reference.request_id:
            raise unknown_lease(reference.lease_id)
        if answer := self._writes.repeated(peer, claim, lease):
            return answer
        _check_share(claim)
        lease.check(claim)
        self._check_length(lease, claim)
        return (self._write if claim.direction is Direction.WRITE else self._let_read)(peer, claim, lease, now)

    def _let_read(self, peer: str, claim: m.Claim, lease: Lease, now: float) -> list[Command]:
        if lease.num_ready < claim.num_tokens:
            lease.waiting[claim.party] = peer, claim
            self._leases.renew(lease, now)
            return [Reply(peer, m.Queued(claim.claim_id))]
        shared = self._writes.share(peer, claim, lease) if claim.read_from else []
        self._leases.claim(lease, claim, now)
        self._completed_reads.started(lease, claim.party)
        return [Reply(peer, m.Grant(claim.claim_id, lease.request.block_tables)), *shared]

    def _write(self, peer: str, claim: m.Claim, lease: Lease, now: float) -> list[Command]:
        """Carry a claim out."""
        is_known = lease.has_granted(claim.party, claim.claim_id)
        commands = self._writes.begin(peer, claim, lease)
        if is_known:
            self._leases.renew(lease, now)
        else:
            self._leases.claim(lease, claim, now)
        if not claim.strategy.source_gathers:
            self._completed_reads.started(lease, claim.party)
        return commands + self._completed_reads.written(lease, now)

    def _pack(self, peer: str, pack: m.Pack, now: float) -> list[Command]:
        """Write one slot of a claim. After the end of its claim nothing may be written: the target's slot may belong to
        another transfer."""
        self._targets.heard(pack.party, now)
        lease = self._leases.get(pack.lease_id)
        if lease is None:
            raise unknown_lease(pack.lease_id)
        key = ClaimKey(pack.lease_id, pack.party, pack.claim_id)
        # What is written is confirmed again, also when the lease is over.
        is_served = lease.live or lease.is_written(key)
        if (pack.party, pack.claim_id) in self._aborted or not is_served:
            raise lease.ended_error
        commands = list(self._writes.pack(peer, pack, lease, now))
        if lease.live:
            self._leases.renew(lease, now)
            self._completed_reads.started(lease, pack.party)
        return commands

    def _write_progressed(self, event: _WriteEvent, now: float) -> list[Command]:
        """A claim that the source writes has made progress."""
        key = event.key.work if isinstance(event.key, SlotKey) else event.key
        if not isinstance(key, ClaimKey) or (lease := self._leases.get(key.lease_id)) is None:
            return []
        self._targets.heard(key.party, now)
        commands = list(self._writes.progressed(event, lease, now))
        if lease.live:
            self._leases.renew(lease, now)
        return [*commands, *self._completed_reads.written(lease, now), *self._leases.free_when_drained(lease)]

    def _check_length(self, lease: Lease, claim: m.Claim) -> None:
        """Not everything serves the beginning of what was leased. A state of fixed size is the one after the last
        token: it cannot be used after any other one. In a ring the last tokens lie where others were that a shorter
        prompt's next token sees."""
        layout, leased = self._identity.layout, lease.request.num_tokens
        named = layout.state_named()
        for placement in layout.placements if claim.num_tokens else ():
            state, kept = named[placement.state], layout.groups[placement.group].kept(leased)
            seen = state.seen_by_next(TokenRange(0, claim.num_tokens))
            if not state.per_token and claim.num_tokens != leased:
                what = "the states of fixed size belong to a prompt of another length"
            elif state.per_token and seen and seen.first < kept.first:
                what = "the tokens after this part of a prompt have been written over what is seen of it"
            else:
                continue
            found, expected = f"{claim.num_tokens} tokens", f"{leased} tokens"
            raise TransferError(Reason.OUT_OF_RANGE, what, found=found, expected=expected)

    def _wait_for_lease(self, peer: str, claim: m.Claim, now: float) -> list[Command]:
        """A claim may arrive before the engine has told this rank of the lease: it waits for that a while.

        Meanwhile a repeated claim is answered, so that the target knows that its source is alive. So is one for which
        there is no room: its target asks again.
        """
        lease_id = claim.reference.lease_id
        is_known = self._early.knows(lease_id, claim.party)
        is_kept = self._early.add(lease_id, EarlyMessage(peer, claim, now + self._timing.early_claim_s))
        return [Reply(peer, m.Renewed(()))] if is_known or not is_kept else []

    def _renew(self, peer: str, renew: m.Renew, now: float) -> list[Command]:
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
        return [Reply(peer, m.Renewed(tuple(gone), renew.padding))]

    def _abort(self, peer: str, abort: m.Abort, now: float) -> list[Command]:
        """Only a lease's own claim ends it; before any claim, whoever knows its id, which is random.

        It is acknowledged when nothing is written for it any more and nothing ever will be.
        """
        lease = self._leases.get(abort.lease_id)
        aborted = Reply(peer, m.Aborted(abort.claim_id, self._identity.party.epoch, is_clean=True))
        if (abort.party, abort.claim_id) in self._foreign:
            # The lease was another start's. In a room ours has the same id.
            return [aborted]
        if not self._aborted.add(abort.party, abort.claim_id, now + self._timing.tombstone_s):
            return []
        if lease is None:
            is_kept = self._early.add(abort.lease_id, EarlyMessage(peer, abort, now + self._timing.early_claim_s))
            return [aborted] if is_kept else []
        lease.waiting.pop(abort.party, None)
        commands = list(self._writes.abort(peer, ClaimKey(abort.lease_id, abort.party, abort.claim_id), lease))
        if lease.live and (not lease.claims or lease.has_granted(abort.party, abort.claim_id)):
            commands += self._leases.end(lease, "abort", Reason.ABORTED, now)
        return commands


def _check_share(claim: m.Claim) -> None:
    """A share can be written only of what is read directly: otherwise the target would lack the rest."""
    if claim.read_from and (claim.direction, claim.strategy) != (Direction.READ, Strategy.DIRECT):
        what, found = "only a direct read can be shared", f"direction {claim.direction}, strategy {claim.strategy}"
        raise TransferError(Reason.MALFORMED, what, found=found, expected=f"{Direction.READ}, {Strategy.DIRECT}")
