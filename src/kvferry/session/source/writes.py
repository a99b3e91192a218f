"""Claims that a source carries out itself: it writes to the target's blocks, or to slots of its staging memory."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import FerryError, TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.stretches import WHOLE, parted, stretch_tokens, stretches
from kvferry.session.commands import Command, Count, Reply
from kvferry.session.events import Acquired, Staged, TicketEnded
from kvferry.session.keys import ClaimKey
from kvferry.session.refusals import refuse
from kvferry.session.source.direct_write import DirectWrite
from kvferry.session.source.lease import Lease
from kvferry.session.source.packed_write import PackedWrite
from kvferry.session.source.targets import Targets
from kvferry.wire.messages import Aborted, Claim, Grant, Pack, Reason, Refusal

STRETCH_BYTES = 4 << 20
"""So much of a prompt that is still being computed is written at a time."""


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
        self._shares: list[tuple[DirectWrite, Lease]] = []
        self.stretch_bytes = STRETCH_BYTES

    def begin(self, peer: str, claim: Claim, lease: Lease) -> list[Command]:
        """Carry a claim out, once; a repeated claim is answered with its progress. Raises FerryError when it cannot be
        carried out; then nothing of it is."""
        key = _key_of(claim)
        if known := lease.writes.get(key):
            known.peer = peer
            return [Reply(peer, known.status())]
        try:
            return list(self._begin(key, peer, claim, lease))
        except FerryError:
            lease.writes.pop(key, None)
            raise

    def _begin(self, key: ClaimKey, peer: str, claim: Claim, lease: Lease) -> Iterator[Command]:
        request = self._targets.request(claim, lease.request)
        if claim.strategy.source_gathers:
            packing = lease.writes[key] = PackedWrite.started(key, peer, request, lease.num_ready)
            self._unplanned.append(packing)
            yield Reply(peer, packing.status())
            return
        todo = [WHOLE]
        if lease.num_ready < claim.num_tokens:
            todo = list(stretches(request.ranges, stretch_tokens(request.program, self.stretch_bytes)))
        write = lease.writes[key] = DirectWrite(key, peer, request, todo)
        yield Reply(peer, Grant(claim.claim_id, ()))
        yield from self._grow(write, lease)

    def share(self, peer: str, claim: Claim, lease: Lease) -> list[Command]:
        """Write our share of what a target reads, once, when `prepare` is called; a repeated claim is answered with its
        progress. Raises FerryError when it cannot be written."""
        key = _key_of(claim)
        if known := lease.writes.get(key):
            known.peer = peer
            # The grant of a read has block tables, and has been sent.
            has_news = isinstance(known, DirectWrite) and known.has_progressed
            return [] if known.is_open and not has_news else [Reply(peer, known.status())]
        request = self._targets.request(claim, lease.request)
        write = lease.writes[key] = DirectWrite(key, peer, request, [parted(claim.read_from)[0]])
        self._shares.append((write, lease))
        return []

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
        for write, lease in shares:
            try:
                yield from self._grow(write, lease)
            except FerryError as error:
                yield from write.fail(str(error))
                yield from refuse(write.peer, error, write.key.claim_id)

    def pack(self, peer: str, message: Pack, lease: Lease, now: float) -> Iterator[Command]:
        """Write one slot. Raises FerryError when there is no such claim or slot."""
        packing = lease.writes.get(ClaimKey(message.lease_id, message.party, message.claim_id))
        if not isinstance(packing, PackedWrite):
            what = "a staging slot for a transfer that is not packed"
            raise TransferError(Reason.NOT_CLAIMED, what, found=message.claim_id)
        yield from packing.pack(message, peer, is_advancing=now - self._moved_at < self._transfer_s)

    def grown(self, lease: Lease) -> Iterator[Command]:
        """More tokens are computed: write them, and tell targets that have slots packed."""
        for write in lease.writes.values():
            if not (write.error or write.is_written):
                try:
                    yield from self._grow(write, lease)
                except FerryError as error:
                    yield from write.fail(str(error))
                    yield from _report(write)

    def _grow(self, write: PackedWrite | DirectWrite, lease: Lease) -> Iterator[Command]:
        tables, num_ready = lease.request.block_tables, lease.num_ready
        if isinstance(write, PackedWrite):
            yield from write.grown(tables, num_ready)
            return
        if lease.ahead.num_states and not write.bundles:
            write.bundles = self._targets.bundles(write.key.party)
        yield from write.grown(tables, num_ready, lease.ahead)

    def progressed(self, event: Acquired | Staged | TicketEnded, lease: Lease, now: float) -> Iterator[Command]:
        """A slot or a ticket of a claim has made progress. Its target is told only while the lease is live; else it was
        told when the lease ended."""
        write = next((write for write in lease.writes.values() if event.key in write.uses), None)
        if write is None:
            return
        if isinstance(write, PackedWrite) and not write.is_peer_slot(event):
            self._moved_at = now
        had_error = bool(write.error)
        yield from write.handle(event)
        if write.is_aborted:
            yield from self._acknowledge(write)
        elif (write.error and not had_error) or (isinstance(write, DirectWrite) and write.is_written and lease.live):
            yield from _report(write)

    def abort(self, peer: str, key: ClaimKey, lease: Lease) -> Iterator[Command]:
        """The target has aborted a claim. This is acknowledged once nothing is written for it, and nothing ever will
        be."""
        write = lease.writes.get(key)
        if write is None:
            yield Reply(peer, Aborted(key.claim_id, self._epoch, is_clean=True))
            return
        write.peer, write.is_aborted = peer, True
        yield from write.fail("the claim has been aborted")
        yield from self._acknowledge(write)

    def _acknowledge(self, write: PackedWrite | DirectWrite) -> Iterator[Command]:
        if not write.is_open:
            yield Reply(write.peer, Aborted(write.key.claim_id, self._epoch, write.is_clean))

    def end(self, lease: Lease) -> Iterator[Command]:
        """The lease has ended: writes in flight are useless, and are cancelled."""
        for key, write in lease.writes.items():
            if write.is_written:
                continue
            # A target that has slots packed waits for the next one, or for tokens, also between two requests.
            was_open = not write.error if isinstance(write, PackedWrite) else write.is_open
            yield from write.fail("the lease has ended")
            if was_open and not write.is_aborted:
                yield from refuse(write.peer, lease.ended_error, key.claim_id)


def _key_of(claim: Claim) -> ClaimKey:
    return ClaimKey(claim.reference.lease_id, claim.party, claim.claim_id)


def _report(write: PackedWrite | DirectWrite) -> Iterator[Command]:
    status = write.status()
    yield Reply(write.peer, status)
    if isinstance(status, Refusal):
        yield Count("refusals_sent", status.reason)
