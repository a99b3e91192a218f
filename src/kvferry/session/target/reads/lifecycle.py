"""The reads of all fetches, from the claim to the valid bytes: answers of sources and tickets move them forward.

`fetch.READ_TABLE` has the states in which a read can be, in order. What has landed is `valid` once `verification` here
and the source's record of the lease (`kvferry.session.source.completed_reads`) agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from msgspec import structs

from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.copies import NOTHING, Direction
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import parted
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest, any_tables
from kvferry.plan.strategy.calibration import Costs
from kvferry.plan.strategy.strategies import Side
from kvferry.session.commands import Fetched, Post, Send
from kvferry.session.events import FetchRequest, PeerMoved
from kvferry.session.keys import PeerKey, SlotKey
from kvferry.session.refusals import as_transfer_error
from kvferry.session.target.peers.bindings import Binding, Bindings
from kvferry.session.target.peers.handshakes import Handshakes, TargetIdentity
from kvferry.session.target.peers.peer import CanWrite, Peer
from kvferry.session.target.read_strategy import TransferMode, beside, cannot_write
from kvferry.session.target.reads.fetch import (
    ASKING,
    UNGRANTED,
    Fetch,
    FetchBroken,
    ReadState,
    Step,
    is_needed,
    reads_of,
)
from kvferry.session.target.reads.staged_reads import StagedReads
from kvferry.session.target.reads.verification import Verifier, unreadable_error
from kvferry.session.timing import Timing
from kvferry.wire.messages import Claim, Grant, Packed, Queued, Reason, Written


class Reads:
    """The reads of all fetches of one rank. `fetches` is the session's own record; a fetch that is over leaves it."""

    def __init__(self, ours: TargetIdentity, peers: Handshakes, fetches: dict[str, Fetch], timing: Timing) -> None:
        self._ours = ours.party
        self._timing = timing
        self._peers = peers
        self._fetches = fetches
        self._staging = ours.staging
        self._may_share = ours.may_switch_direction
        self.bindings = Bindings(ours.layouts, ours.party.rank)
        self.verifier = Verifier(ours, peers, fetches)
        self.staged = StagedReads(ours.party, fetches, self.verifier.landed)

    def claim_when_ready(self, fetch: Fetch, now: float) -> Iterator[Step]:
        """Once all sources of a fetch have been met, claim from those that have something for us."""
        if fetch.failed or fetch.reads or not all(self._peers[key].ready for key in fetch.peers):
            return
        try:
            binding = self._binding(fetch)
            modes = {key: self._mode_for(fetch.request, self._peers[key], binding, now) for key in binding.programs}
            offering = [self._peers[key] for key, mode in modes.items() if _needs_offer(self._peers[key], mode)]
            for peer in offering:
                yield from self._peers.offer_memory(peer, now)
            if not offering:
                yield from self._claim(fetch, binding, modes, now)
        except FerryError as error:
            yield FetchBroken(fetch, as_transfer_error(error))

    def _binding(self, fetch: Fetch) -> Binding:
        """Raises TransferError when the two engines do not fit together."""
        try:
            binding = self.bindings.to(fetch.peers, self._peers)
        except FerryError as error:
            raise TransferError(Reason.INCOMPATIBLE, str(error)) from error
        if binding.unreadable and self.verifier.policy is DigestPolicy.FULL:
            raise unreadable_error(binding.unreadable)
        return binding

    def _claim(self, fetch: Fetch, binding: Binding, modes: dict[PeerKey, TransferMode], now: float) -> Iterator[Step]:
        for key in binding.programs:
            if not is_needed(key, self._fetches):
                # It had no reason to send anything until now: its silence counts from here.
                self._peers[key].last_heard = now
        fetch.start_reads(modes, self.verifier.subjects(fetch.request, binding), now)
        fetch.verified = binding.verified_by(self.verifier.policy)
        for key in binding.programs:
            fetch.reads[key].access = self._peers[key].access
            yield Send(key, self._claim_of(fetch, key))
        for key in fetch.peers:
            if key not in binding.programs:
                yield from self._peers.tell_unneeded(self._peers[key])
        if not fetch.reads:
            # Other ranks of our engine read everything, and tell the sources.
            fetch.granted_at = fetch.landed_at = now
            del self._fetches[fetch.request.claim_id]
            yield Fetched(fetch.request.request_id, fetch.report("", "", now))

    def _mode_for(self, request: FetchRequest, peer: Peer, binding: Binding, now: float) -> TransferMode:
        """Who moves the bytes from one source, and how. Raises TransferError when it cannot be as it has to be."""
        mode = TransferMode(peer.direction)
        if request.num_tokens:
            costs = _costs(peer, binding, may_share=self._may_share and peer.can_write is not CanWrite.NO)
            mode = self._staging.before_claim(binding.programs[peer.key], request.ranges, costs, peer.direction)
        if request.num_tokens and peer.is_staged:
            mode = self._staging.packing_only(str(peer.key))
        if not mode.strategy.source_gathers or peer.can_write is not CanWrite.NO:
            return mode
        if not (self._staging.is_packing_only or peer.is_staged):
            return TransferMode(peer.direction)
        if now - peer.not_reached_at < self._timing.handshake_s:
            raise cannot_write(str(peer.key))
        # It may have been too busy, as all are when a fleet starts, and nothing else is left: it is asked again.
        peer.can_write = CanWrite.UNKNOWN
        return mode

    def _claim_of(self, fetch: Fetch, key: PeerKey) -> Claim:
        """The claim on one source. A source that writes is told where; one that packs, how large the slots are."""
        request, read, mode = fetch.request, fetch.reads[key], fetch.reads[key].mode
        readers = self.bindings.to(fetch.peers, self._peers).readers_of(key)
        names = self._ours, request.claim_id, request.reference
        claim = Claim(*names, request.num_tokens, readers, subject=read.subject, prompt=request.prompt)
        if mode.direction is Direction.WRITE or mode.read_from:
            where = {"block_tables": request.block_tables, "ranges": request.ranges}
            written = {
                "direction": mode.direction,
                "read_from": mode.read_from,
                "handshake": self._peers[key].handshake,
            }
            claim = structs.replace(claim, **written, **where)
        if mode.strategy.source_gathers:
            claim = structs.replace(claim, strategy=mode.strategy, slot_bytes=self._slot_bytes(key))
        return claim

    def _slot_bytes(self, key: PeerKey) -> int:
        """The size of a slot that both sides have room for."""
        offer = self._peers[key].offer
        return min(self._staging.slot_bytes, offer.slot_bytes) if offer is not None else self._staging.slot_bytes

    def grant(self, peer: Peer, grant: Grant, now: float) -> Iterator[Step]:
        """A source lets us read, or has begun to write. While it packs, a repeated grant says that more is computed."""
        for fetch, read in reads_of(self._fetches, peer.key, grant.claim_id, *UNGRANTED):
            if read.strategy.source_gathers:
                fetch.granted(read, now)
                read.machine.move("granted")
                for plan in read.plans or (self._plan_of(fetch, peer.key),):
                    yield from self.staged.begin(fetch, peer.key, plan, grant, now)
            elif read.direction is Direction.READ:
                yield from self._post(fetch, peer, grant, now)
            else:
                read.machine.move("granted")
                fetch.granted(read, now)
            return
        for fetch, read in reads_of(self._fetches, peer.key, grant.claim_id, ReadState.MOVING):
            if read.awaits_tokens:
                # Its source is alive and still computes.
                read.moved_at = now
            yield from self.staged.computed(fetch, peer.key, grant.num_missing_tokens, now)

    def _post(self, fetch: Fetch, peer: Peer, grant: Grant, now: float) -> Iterator[Step]:
        binding = self.bindings.to(fetch.peers, self._peers)
        request, read, costs = fetch.request, fetch.reads[peer.key], _costs(peer, binding, may_share=False)
        try:
            # Without tokens nothing is read, no state of fixed size either: the source only has to be told.
            copies = NOTHING
            if request.num_tokens:
                tables, (_, ours) = (grant.block_tables, request.block_tables), parted(read.mode.read_from)
                copies = copies_for(binding.programs[peer.key], *tables, request.ranges, ours)
        except RequestError as error:
            yield FetchBroken(fetch, as_transfer_error(error))
            return
        read.machine.move("granted")
        fetch.granted(read, now)
        if len(copies) and not read.mode.read_from:
            read.strategy = self._staging.before_read(copies, costs, binding.programs[peer.key].starts)
        if read.strategy.is_staged:
            plan = self._plan_of(fetch, peer.key, grant.block_tables)
            # An error here is reported when the plan is carried out.
            with suppress(FerryError):
                read.strategy = self._staging.when_cut(copies, costs, plan.slots(0))
        if read.strategy.is_staged:
            read.movers.clear()
            yield from self.staged.begin(fetch, peer.key, plan, grant, now)
            return
        read.num_bytes += copies.num_bytes
        read.num_rows += len(copies)
        yield Post(fetch.key(peer.key), copies)

    def _plan_of(self, fetch: Fetch, key: PeerKey, source_tables: BlockTables = ()) -> SlotPlan:
        """How a read is cut into slots. Where it is packed, its blocks are the source's business, and some may not be
        computed yet."""
        binding, request = self.bindings.to(fetch.peers, self._peers), fetch.request
        strategy = fetch.reads[key].strategy
        if strategy.source_gathers:
            source_tables = any_tables(binding.layouts[key], request.num_tokens)
        staged = StagedRequest(
            binding.programs[key],
            source_tables,
            request.block_tables,
            request.ranges,
            strategy,
            self._slot_bytes(key) if strategy.source_gathers else self._staging.slot_bytes,
        )
        return SlotPlan(staged, Side.TARGET)

    def packed(self, peer: Peer, packed: Packed, now: float) -> Iterator[Step]:
        """The source has written a slot. This is ignored for slots that we fill ourselves."""
        for fetch, read in reads_of(self._fetches, peer.key, packed.claim_id, ReadState.MOVING, ReadState.DRAINING):
            if read.strategy.source_gathers:
                key = SlotKey(fetch.key(peer.key), packed.stretch, packed.number)
                yield from self.staged.packed(key, packed, now)

    def queued(self, peer: Peer, queued: Queued, now: float) -> Iterator[Step]:
        """The source is alive and will continue later. A read that holds slots, which others want, waits for that only
        `hold_s` long."""
        for _, read in reads_of(
            self._fetches, peer.key, queued.claim_id, ReadState.CLAIMING, ReadState.EXPOSED, ReadState.MOVING
        ):
            if not read.pipeline:
                read.moved_at = now
            elif now - read.progressed_at < self._timing.hold_s:
                read.moved_at = self.staged.moved_at = now
        yield from ()

    def moved(self, event: PeerMoved, now: float) -> Iterator[Step]:
        """Note that bytes of direct reads come, or of reads before them: none is given up before `hold_s`."""
        if isinstance(event.peer, PeerKey):
            for fetch in self._fetches.values():
                read = fetch.reads.get(event.peer)
                began = max(read.granted_at, fetch.began) if read is not None else now
                if read is not None and not read.pipeline and now - began < self._timing.hold_s:
                    read.moved_at = now
        yield from ()

    def written(self, peer: Peer, written: Written, now: float) -> Iterator[Step]:
        """The source's own ticket has ended well. For packed reads it says so slot by slot instead."""
        for fetch, read in reads_of(self._fetches, peer.key, written.claim_id, ReadState.EXPOSED, ReadState.MOVING):
            if read.is_exposed and not read.strategy.is_staged:
                read.num_bytes += written.num_bytes
                read.num_rows += written.num_rows
                fetch.granted(read, now)
                read.ended(Direction.WRITE)
                if not read.movers:
                    yield from self.verifier.landed(fetch, peer.key, now)

    def ticket_ended(self, fetch: Fetch, key: PeerKey, error: str, now: float) -> Iterator[Step]:
        """Go on with a read whose ticket, posted by this rank, has ended."""
        if error:
            yield FetchBroken(fetch, TransferError(Reason.TRANSPORT, "the read failed", found=error))
        elif not fetch.reads[key].movers:
            yield from self.verifier.landed(fetch, key, now)

    def _take_turn(self, fetch: Fetch, now: float) -> Iterator[Step]:
        """Do what had to wait until messages were sent: plan slots and digests while answers are awaited, and digest
        what has landed. Errors of plans are reported when these are used."""
        for key, read in fetch.reads.items():
            if read.awaits_plans:
                read.may_prepare = False
                with suppress(FerryError):
                    self._prepare(fetch, key)
        for key, read in fetch.reads.items():
            # A digest that cannot be made has ended the fetch, and with it the other reads.
            if read.awaits_digest:
                yield from self.verifier.digest(fetch, key, now)

    def _prepare(self, fetch: Fetch, key: PeerKey) -> None:
        read = fetch.reads[key]
        if read.strategy.source_gathers:
            read.plans = (self._plan_of(fetch, key),)
            read.plans[0].slots(0)
        self.verifier.prepare(fetch, key)

    def retry(self, fetch: Fetch, now: float) -> Iterator[Step]:
        """Repeat what was not answered, end what takes too long, and plan what comes next."""
        yield from self._take_turn(fetch, now)
        for error in fetch.overdue(self._timing, now):
            yield FetchBroken(fetch, error)
            return
        for key, read in fetch.reads.items():
            yield from self.staged.retry(fetch, read, now, self._timing.resend_s)
            if now - read.last_sent < self._timing.resend_s:
                continue
            read.last_sent = now
            is_writing = read.is_exposed and not read.strategy.is_staged
            if read.state in UNGRANTED or ((is_writing or read.awaits_tokens) and not fetch.failed):
                # A source that writes answers a repeated claim with its progress.
                yield Send(key, self._claim_of(fetch, key))
            elif read.state in ASKING:
                yield Send(key, self.verifier.landed_of(fetch))


def _costs(peer: Peer, binding: Binding, *, may_share: bool) -> Costs:
    """The costs of a source, beside the other sources of a fetch."""
    fans = binding.fan_in(peer.key), len(binding.readers_of(peer.key))
    return beside(peer.costs, fans, peer.direction, may_share)


def _needs_offer(peer: Peer, mode: TransferMode) -> bool:
    """Whether a source that we read from has to connect to our memory first, blocks or staging."""
    return (mode.strategy.source_gathers or mode.read_from > 0) and peer.can_write is CanWrite.UNKNOWN
