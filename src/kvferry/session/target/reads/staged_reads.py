"""Reads that go through staging memory: they go on when a slot is acquired, filled or scattered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import FerryError, TransferError
from kvferry.plan.slots.slot_plan import SlotPlan
from kvferry.session.commands import Release
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import PeerKey, ReadKey, SlotKey
from kvferry.session.refusals import as_transfer_error
from kvferry.session.target.reads.fetch import Fetch, FetchBroken, Read, Step
from kvferry.session.target.reads.slot_pipeline import SlotPipeline
from kvferry.wire.messages import Grant, Packed, Party, Reason


class StagedReads:
    """The reads of one rank that are staged. `land` continues with a read whose bytes are all in their blocks."""

    def __init__(
        self, ours: Party, fetches: dict[str, Fetch], land: Callable[[Fetch, PeerKey, float], Iterator[Step]]
    ) -> None:
        self._ours = ours
        self._fetches = fetches
        self._land = land
        # When any slot last made progress, or had a reason to wait. As long as one does, others may wait for slots.
        self.moved_at = 0.0

    def begin(self, fetch: Fetch, key: PeerKey, plan: SlotPlan, grant: Grant, now: float) -> Iterator[Step]:
        """A source has granted a claim."""
        read = fetch.reads[key]
        names = fetch.request.reference.lease_id, self._ours
        pipeline = SlotPipeline(fetch.key(key), plan, read.strategy, names, grant.num_missing_tokens)
        read.pipeline = (pipeline,)
        yield from self._on(fetch, key, pipeline.go_on(), now)

    def acquired(self, event: Acquired, now: float) -> Iterator[Step]:
        """A slot is ours. If its fetch is over, it is released at once."""
        for fetch, peer, pipeline in self._of(event.key):
            self.moved_at = now
            if event.error:
                yield FetchBroken(fetch, TransferError(Reason.TRANSPORT, "no staging memory", found=event.error))
            else:
                yield from self._on(fetch, peer, pipeline.acquired(event.key, event.address, now), now)
            return
        if not event.error:
            yield Release(event.key)

    def filled(self, key: SlotKey, error: str, now: float) -> Iterator[Step]:
        """The transfer into a slot has ended, here or at the source."""
        for fetch, peer, pipeline in self._of(key):
            self.moved_at = now
            if error and not fetch.failed:
                yield FetchBroken(fetch, TransferError(Reason.TRANSPORT, "the read failed", found=error))
            yield from self._on(fetch, peer, pipeline.filled(key), now)

    def packed(self, key: SlotKey, packed: Packed, now: float) -> Iterator[Step]:
        """The source has written a slot, and says how many tokens are still missing."""
        yield from self.filled(key, "", now)
        for fetch, peer, _ in self._of(key):
            yield from self.computed(fetch, peer, packed.num_missing_tokens, now)

    def computed(self, fetch: Fetch, peer: PeerKey, num_missing: int, now: float) -> Iterator[Step]:
        """The source has computed more of what it packs. If it has not, the deadline stays."""
        for pipeline in fetch.reads[peer].pipeline:
            if not fetch.failed and pipeline.is_news(num_missing):
                yield from self._on(fetch, peer, pipeline.computed(num_missing), now)

    def staged(self, event: Staged, now: float) -> Iterator[Step]:
        """A slot has been scattered into its blocks."""
        for fetch, peer, pipeline in self._of(event.key):
            self.moved_at = now
            if event.error and not fetch.failed:
                yield FetchBroken(fetch, TransferError(Reason.TRANSPORT, "the scatter failed", found=event.error))
            steps = pipeline.ended(event.key) if fetch.failed else pipeline.emptied(event.key)
            yield from self._on(fetch, peer, steps, now)

    def retry(self, fetch: Fetch, read: Read, now: float, resend_s: float) -> Iterator[Step]:
        """Ask again for slots that were not written. A read may wait for slots as long as others make progress."""
        if read.awaits_slots:
            read.moved_at = max(read.moved_at, self.moved_at)
        for pipeline in read.pipeline:
            if not fetch.failed:
                yield from pipeline.repeat(now, resend_s)

    def _of(self, key: SlotKey) -> Iterator[tuple[Fetch, PeerKey, SlotPipeline]]:
        """The fetch, the peer and the pipeline that a slot belongs to; nothing when they are over."""
        work = key.work
        fetch = self._fetches.get(work.claim_id) if isinstance(work, ReadKey) else None
        if fetch is not None and isinstance(work, ReadKey) and work.peer in fetch.reads:
            for pipeline in fetch.reads[work.peer].pipeline:
                if key in pipeline:
                    yield fetch, work.peer, pipeline

    def _on(self, fetch: Fetch, peer: PeerKey, steps: Iterator[Step], now: float) -> Iterator[Step]:
        """Yield the next steps of a read, and `land` it when nothing is left to do."""
        read = fetch.reads[peer]
        read.moved_at = read.progressed_at = now
        try:
            yield from steps
        except FerryError as error:
            yield FetchBroken(fetch, as_transfer_error(error))
        if not fetch.failed and all(pipeline.is_done for pipeline in read.pipeline):
            read.num_bytes = sum(pipeline.num_bytes for pipeline in read.pipeline)
            read.num_rows = sum(pipeline.num_rows for pipeline in read.pipeline)
            read.machine.move("ticket ended")
            yield from self._land(fetch, peer, now)
