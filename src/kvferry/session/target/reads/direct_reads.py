"""Reads that move bytes straight into their blocks, and those that begin before their source has granted anything.

A source grants what it was going to grant when it handed out the reference, as a rule. So where the reference names the
blocks, a target reads from them while it asks. Safe is only what the grant says: bytes count if it names the same
blocks, and if nobody could know of the lease before all of it was computed. Otherwise they are read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.errors import RequestError
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import parted
from kvferry.plan.slots.slot_plan import Slot
from kvferry.plan.strategy.calibration import Costs
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Post
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.bindings import Binding, Bindings
from kvferry.session.target.peers.handshakes import Handshakes
from kvferry.session.target.peers.peer import Peer
from kvferry.session.target.read_strategy import StagingPolicy, beside
from kvferry.session.target.reads.fetch import Fetch
from kvferry.wire.messages import Grant


class DirectReads:
    """Of the fetches of one rank."""

    def __init__(self, staging: StagingPolicy, bindings: Bindings, peers: Handshakes) -> None:
        self._staging = staging
        self._bindings = bindings
        self._peers = peers

    def copies(self, fetch: Fetch, peer: Peer, source_tables: BlockTables) -> Copies:
        """The rows of a read, or of the part that is ours. Raises RequestError for tables that do not fit."""
        program, request = self._binding(fetch).programs[peer.key], fetch.request
        _, ours = parted(fetch.reads[peer.key].mode.read_from)
        return copies_for(program, source_tables, request.block_tables, request.ranges, ours)

    def strategy_of(self, fetch: Fetch, peer: Peer, copies: Copies) -> Strategy:
        """Whether we read the rows directly or through slots."""
        binding = self._binding(fetch)
        costs = costs_of(peer, binding, may_share=False)
        return self._staging.before_read(copies, costs, binding.programs[peer.key].starts)

    def strategy_when_cut(self, fetch: Fetch, peer: Peer, copies: Copies, slots: Sequence[Slot]) -> Strategy:
        """The same once more, with the slots of a stretch."""
        return self._staging.when_cut(copies, costs_of(peer, self._binding(fetch), may_share=False), slots)

    def post(self, fetch: Fetch, key: PeerKey, copies: Copies) -> Post:
        """Read the rows, and count them."""
        read = fetch.reads[key]
        read.num_bytes += copies.num_bytes
        read.num_rows += len(copies)
        return Post(fetch.key(key), copies)

    def speculate(self, fetch: Fetch, peer: Peer, now: float) -> Iterator[Post]:
        """Read from where the reference says that the blocks are, while the source is asked. Where it says nothing that
        makes sense, or bytes would go through staging memory, the grant is waited for."""
        request, read = fetch.request, fetch.reads[peer.key]
        tables = self._presumed_tables(fetch, peer.key)
        if not (tables and request.num_tokens and read.mode.direction is Direction.READ):
            return
        try:
            copies = self.copies(fetch, peer, tables)
        except RequestError:
            return
        if len(copies) and not self.strategy_of(fetch, peer, copies).is_staged:
            read.machine.move("posted")
            fetch.posted_at = fetch.posted_at or now
            yield self.post(fetch, peer.key, copies)

    def why_misread(self, fetch: Fetch, key: PeerKey, grant: Grant) -> str:
        """Why what was read before this grant counts for nothing, as a label; empty if it counts."""
        if grant.block_tables != self._presumed_tables(fetch, key):
            return "other_blocks"
        return "early" if grant.is_early else ""

    def _presumed_tables(self, fetch: Fetch, key: PeerKey) -> BlockTables:
        """The source's blocks as the reference has them; none where it has not as many tables as there are groups."""
        groups, tables = self._binding(fetch).layouts[key].groups, fetch.request.source_tables
        tables = tables * len(groups) if len(tables) == 1 else tables
        return tables if len(tables) == len(groups) else ()

    def _binding(self, fetch: Fetch) -> Binding:
        return self._bindings.to(fetch.peers, self._peers)


def costs_of(peer: Peer, binding: Binding, *, may_share: bool) -> Costs:
    """What a source costs, beside the others of a fetch."""
    fans = binding.fan_in[peer.key], len(binding.readers_of(peer.key))
    return beside(peer.costs, fans, peer.direction, may_share)
