"""Claims that a source carries out itself: it writes to the target's blocks, or to slots of its staging memory."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import FerryError, TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Cancel, Command, Post, Reply
from kvferry.session.events import Acquired, Staged, TicketEnded
from kvferry.session.keys import ClaimKey, SlotKey
from kvferry.session.refusals import as_transfer_error, because_of, refuse
from kvferry.session.source.lease import Lease
from kvferry.session.source.packed_write import PackedWrite
from kvferry.session.source.single_write import SingleWrite
from kvferry.session.source.streamed_write import STRETCH_BYTES, StreamedWrite
from kvferry.session.source.targets import Targets
from kvferry.wire.messages import Aborted, Claim, Grant, Pack, Reason, Refusal


class Writes:
    """All of one rank; those of each lease are in `Lease.writes`. `epoch` is this rank's own; writing a slot may take
    `transfer_s`."""

    def __init__(self, targets: Targets, epoch: str, transfer_s: float) -> None:
        self._targets = targets
        self._epoch = epoch
        self._transfer_s = transfer_s
        # When any slot of this rank last made progress: while one does, claims that wait for slots are told to wait.
        # Slots of targets do not count: gathers into them go on while nothing of ours is written.
        self._moved_at = 0.0
        self._unplanned: list[PackedWrite] = []
        self._shares: list[tuple[Claim, Lease]] = []
        self.stretch_bytes = STRETCH_BYTES

    def begin(self, peer: str, claim: Claim, lease: Lease) -> list[Command]:
        """Carry a claim out, once; a repeated claim is answered with its progress. Raises TransferError when it cannot
        be carried out."""
        key = _key_of(claim)
        if known := lease.writes.get(key):
            known.peer = peer
            return [Reply(peer, known.status())]
        try:
            return list(self._begin(key, peer, claim, lease))
        except FerryError as error:
            lease.writes.pop(key, None)
            raise as_transfer_error(error) from error

    def share(self, peer: str, claim: Claim, lease: Lease) -> list[Command]:
        """Write our share of what a target reads, once, when `prepare` is called; a repeated claim is answered with its
        progress. Raises TransferError when it cannot be written."""
        key = _key_of(claim)
        if known := lease.writes.get(key):
            known.peer = peer
            status = known.status()
            # The grant of a read has block tables, and has been sent.
            return [] if isinstance(status, Grant) else [Reply(peer, status)]
        try:
            self._targets.check(claim)
        except FerryError as error:
            raise as_transfer_error(error) from error
        lease.writes[key] = SingleWrite.granted(claim.claim_id, peer)
        self._shares.append((claim, lease))
        return []

    def _begin(self, key: ClaimKey, peer: str, claim: Claim, lease: Lease) -> Iterator[Command]:
        """If this raises, none of its commands is carried out."""
        if claim.strategy.source_gathers:
            request = self._targets.request(claim, lease.wanted)
            packing = PackedWrite.started(key, peer, request, lease.num_ready)
            lease.writes[key] = packing
            self._unplanned.append(packing)
            yield Reply(peer, packing.status())
        elif lease.num_ready < claim.num_tokens:
            writes = lease.writes[key] = StreamedWrite.started(
                key, peer, self._targets.request(claim, lease.wanted), self.stretch_bytes
            )
            yield Reply(peer, Grant(claim.claim_id, ()))
            yield from self._grow(writes, lease)
        else:
            copies = self._targets.copies(claim, lease.wanted)
            write = lease.writes[key] = SingleWrite.started(claim.claim_id, peer, copies)
            yield Reply(peer, write.status())
            yield Post(key, copies, Direction.WRITE)

    def repeated(self, peer: str, claim: Claim, lease: Lease) -> list[Command]:
        """The answer to a repeated claim of which everything is written, however its lease ended; none for others."""
        write = lease.writes.get(_key_of(claim))
        if write is None or not write.is_written:
            return []
        # A target that reads a share itself still has to learn how the lease ended.
        is_over = claim.direction is Direction.WRITE or claim.party in lease.completed
        return [Reply(peer, write.status())] if is_over else []

    @property
    def has_shares(self) -> bool:
        """Whether shares wait for `prepare`."""
        return bool(self._shares)

    def prepare(self) -> Iterator[Command]:
        """Plan new claims and write shares; this is done after the grants have been sent."""
        unplanned, self._unplanned = self._unplanned, []
        for packing in unplanned:
            packing.prepare()
        shares, self._shares = self._shares, []
        for claim, lease in shares:
            yield from self._post_share(claim, lease)

    def _post_share(self, claim: Claim, lease: Lease) -> Iterator[Command]:
        write = lease.writes[_key_of(claim)]
        if not isinstance(write, SingleWrite) or not write.is_granted:
            return
        try:
            copies = self._targets.copies(claim, lease.wanted)
        except FerryError as error:
            write.ended(str(error))
            yield from refuse(write.peer, because_of(as_transfer_error(error), claim.claim_id))
            return
        write.posted(copies)
        yield Post(_key_of(claim), copies, Direction.WRITE)

    def pack(self, peer: str, message: Pack, lease: Lease, now: float) -> Iterator[Command]:
        """Write one slot. Raises TransferError when there is no such claim or slot."""
        packing = lease.writes.get(ClaimKey(message.lease_id, message.party, message.claim_id))
        if not isinstance(packing, PackedWrite):
            raise TransferError(
                Reason.NOT_CLAIMED, "a staging slot for a transfer that is not packed", found=message.claim_id
            )
        try:
            yield from packing.pack(message, peer, gets_on=now - self._moved_at < self._transfer_s)
        except FerryError as error:
            raise as_transfer_error(error) from error

    def grown(self, lease: Lease) -> Iterator[Command]:
        """More tokens are computed: write them, and tell targets that have slots packed."""
        for write in lease.writes.values():
            if isinstance(write, PackedWrite | StreamedWrite) and not (write.error or write.is_written):
                try:
                    yield from self._grow(write, lease)
                except FerryError as error:
                    yield from write.fail(str(error))
                    yield from _report(write)

    def _grow(self, write: PackedWrite | StreamedWrite, lease: Lease) -> Iterator[Command]:
        tables, num_ready = lease.wanted.block_tables, lease.num_ready
        if isinstance(write, PackedWrite):
            yield from write.grown(tables, num_ready)
            return
        if lease.ahead.num_states and not write.bundles:
            write.bundles = self._targets.bundles(write.key.party)
        yield from write.grown(tables, num_ready, lease.ahead)

    def slot_changed(self, event: Acquired | Staged | TicketEnded, lease: Lease, now: float) -> Iterator[Command]:
        """A slot of a packed claim is acquired, gathered or written."""
        key = event.key
        if not isinstance(key, SlotKey) or not isinstance(key.work, ClaimKey):
            return
        write = lease.writes.get(key.work)
        if not isinstance(write, PackedWrite | StreamedWrite) or key not in write.uses:
            return
        if isinstance(write, PackedWrite) and not write.is_far(key, event):
            self._moved_at = now
        had_error = bool(write.error)
        yield from _changed(write, event)
        if write.is_aborted:
            yield from self._acknowledge(write)
        elif (write.error and not had_error) or (isinstance(write, StreamedWrite) and write.is_written and lease.live):
            yield from _report(write)

    def ticket_ended(self, event: TicketEnded, lease: Lease) -> Iterator[Command]:
        """A write has ended. Its target is told only while the lease is live; else it was told when the lease ended."""
        write = lease.writes.get(event.key) if isinstance(event.key, ClaimKey) else None
        if not isinstance(write, SingleWrite):
            return
        write.ended(event.error)
        if write.is_aborted:
            yield from self._acknowledge(write)
        elif lease.live:
            yield from _report(write)

    def abort(self, peer: str, key: ClaimKey, lease: Lease) -> Iterator[Command]:
        """The target has aborted a claim. This is acknowledged once nothing is written for it, and nothing ever will
        be."""
        write = lease.writes.get(key)
        if write is None:
            yield Reply(peer, Aborted(key.claim_id, self._epoch, is_clean=True))
            return
        write.peer, write.is_aborted = peer, True
        if isinstance(write, PackedWrite | StreamedWrite):
            yield from write.fail("the claim has been aborted")
        yield from self._acknowledge(write)

    def _acknowledge(self, write: SingleWrite | PackedWrite | StreamedWrite) -> Iterator[Command]:
        if not write.is_open:
            yield Reply(write.peer, Aborted(write.claim_id, self._epoch, write.is_clean))

    def end(self, lease: Lease) -> Iterator[Command]:
        """The lease has ended: writes in flight are useless, and are cancelled."""
        for key, write in lease.writes.items():
            if write.is_written:
                continue
            # A target that has slots packed waits for the next one, or for tokens, also between two requests.
            was_open = not write.error if isinstance(write, PackedWrite) else write.is_open
            # So does a target that reads a share itself, until it hears that ours is written.
            was_open |= isinstance(write, SingleWrite) and write.is_granted
            yield from _stop(key, write)
            if was_open and not write.is_aborted:
                yield from refuse(write.peer, lease.refusal_of_end(key))


def _key_of(claim: Claim) -> ClaimKey:
    return ClaimKey(claim.reference.lease_id, claim.party, claim.claim_id)


def _stop(key: ClaimKey, write: SingleWrite | PackedWrite | StreamedWrite) -> Iterator[Command]:
    """Begin nothing more for a lease that has ended, and wait until its tickets have ended."""
    if isinstance(write, PackedWrite | StreamedWrite):
        yield from write.fail("the lease has ended")
    elif write.is_granted:
        write.machine.move("lease ended")
    elif write.is_open:
        write.machine.move("lease ended")
        yield Cancel(key)


def _changed(write: PackedWrite | StreamedWrite, event: Acquired | Staged | TicketEnded) -> Iterator[Command]:
    match event:
        case TicketEnded():
            yield from write.ticket_ended(event)
        case Acquired() if isinstance(write, PackedWrite):
            yield from write.acquired(event)
        case Staged() if isinstance(write, PackedWrite):
            yield from write.staged(event)


def _report(write: SingleWrite | PackedWrite | StreamedWrite) -> Iterator[Command]:
    status = write.status()
    if isinstance(status, Refusal):
        yield from refuse(write.peer, status)
    else:
        yield Reply(write.peer, status)
