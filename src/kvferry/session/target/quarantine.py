"""Fetches that have failed: engine and sources are told, and the blocks stay until nothing can write to them."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import BlocksReleased, Cancel, Command, Count, Disconnect, DropDigest, FetchFailed
from kvferry.session.keys import ClaimKey, ReadKey
from kvferry.session.target.peers.handshakes import Handshakes
from kvferry.session.target.pending_aborts import PendingAborts
from kvferry.session.target.reads.fetch import Fetch, ReadState


class Quarantine:
    """The failed ones among the fetches of one rank. Those that are over are removed here."""

    def __init__(self, fetches: dict[str, Fetch], aborts: PendingAborts, peers: Handshakes) -> None:
        self._fetches = fetches
        self._aborts = aborts
        self._peers = peers

    def fail(self, fetch: Fetch, error: TransferError, now: float) -> Iterator[Command]:
        """End a fetch: tell the engine, tell every source, and keep the blocks until nothing can write to them."""
        fetch.failed = True
        yield Count("fetches_failed", error.reason)
        yield FetchFailed(fetch.wanted.request_id, error)
        for key, read in fetch.reads.items():
            if read.state is ReadState.MOVING and Direction.READ in read.movers:
                yield Cancel(fetch.key(key))
            for pipeline in read.pipeline:
                yield from pipeline.fail()
            if read.is_digesting:
                yield DropDigest(fetch.key(key))
            is_posted = read.state is ReadState.MOVING
            read.machine.move("fail")
            if not is_posted and read.is_open:
                # Our own ticket was never posted.
                read.ended(Direction.READ)
        for key in fetch.peers:
            is_exposed = key in fetch.reads and fetch.reads[key].is_exposed
            yield from self._aborts.send(fetch.wanted, key, is_exposed, now)
        for key in [key for key, read in fetch.reads.items() if read.strategy.is_staged]:
            yield from self.drained(fetch.key(key))
        yield from self.free_when_drained(fetch)

    def drained(self, work: ReadKey | ClaimKey) -> Iterator[Command]:
        """A failed read through staging memory is over when all its slots are; another one when its ticket is."""
        fetch = self._fetches.get(work.claim_id) if isinstance(work, ReadKey) else None
        if fetch is not None and isinstance(work, ReadKey) and fetch.failed and work.peer in fetch.reads:
            read = fetch.reads[work.peer]
            is_staged = read.strategy.is_staged and read.state is ReadState.DRAINING
            if is_staged and not any(pipeline.is_open for pipeline in read.pipeline):
                read.machine.move("ticket ended")
                yield from self.free_when_drained(fetch)

    def free_when_drained(self, fetch: Fetch) -> Iterator[Command]:
        """Give the blocks of a failed fetch back when no ticket of it is open."""
        if not fetch.has_open_tickets and self._fetches.get(fetch.wanted.claim_id) is fetch:
            del self._fetches[fetch.wanted.claim_id]
            yield BlocksReleased(fetch.wanted.request_id)

    def end_acknowledged(self, now: float) -> Iterator[Command]:
        """End the quarantine that waited for a source which has acknowledged, or which cannot write any more."""
        for key in self._aborts.take_finished(now):
            fetch = self._fetches.get(key.claim_id)
            if fetch is not None and key.peer in fetch.reads and fetch.reads[key.peer].is_exposed:
                read = fetch.reads[key.peer]
                if not read.strategy.is_staged:
                    read.ended(Direction.WRITE)
                for pipeline in read.pipeline:
                    yield from pipeline.fenced()
                yield from self.drained(key)
                yield from self.free_when_drained(fetch)
                if key.peer not in self._peers and not self._aborts.awaits(key.peer):
                    yield Disconnect(key.peer)
