"""An engine: its ranks start, are killed and start again as another incarnation at the same addresses."""

from __future__ import annotations

from kvferry.plan.programs.copies import Direction
from kvferry.session.events import LeaseRequest
from kvferry.wire.messages import Party, Reference
from simulator.context import RunContext
from simulator.engines.node import Networks, Node, TransferOptions
from simulator.state.memory import Tables
from simulator.state.prompts import PrefillRequest
from simulator.state.rank import LeasedBlocks
from simulator.state.shapes import Side

NUM_NAMES = 4


class Engine:
    """All ranks of one engine. `options` say how the bytes move that it fetches.

    Ids start again with every incarnation, and those of requests are used again.
    """

    def __init__(self, networks: Networks, name: str, side: Side) -> None:
        self.name = name
        self.options = _drawn(networks.context)
        self.nodes: tuple[Node, ...] = ()
        self._networks = networks
        self._side = side
        self._num_starts = 0
        self._leases: dict[str, str] = {}
        self._num_fetches = 0

    def start(self) -> None:
        """A new incarnation. Some engines have another id after every start, most keep theirs."""
        scheduler = self._networks.context.scheduler
        self._num_starts += 1
        self._leases, self._num_fetches = {}, 0
        renamed = self._num_starts > 1 and scheduler.chance(0.3)
        engine_id = f"{self.name}-{self._num_starts}" if renamed else self.name
        epoch = f"e{self._num_starts}"
        parties = [Party(engine_id, epoch, rank) for rank in range(len(self._side.layouts))]
        self.nodes = tuple(Node(self._networks, self.name, party, self._side, self.options) for party in parties)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where its ranks answer."""
        return tuple(node.rank.address for node in self.nodes)

    @property
    def runs(self) -> bool:
        """Whether it is up."""
        return all(node.rank.alive for node in self.nodes)

    def kill(self) -> None:
        """All ranks are gone, with all they had."""
        outlived = self._networks.context.scheduler.chance(self._networks.context.faults.outlives)
        for node in self.nodes:
            node.die(outlived)
        for node in self.nodes:
            for fetching in list(node.rank.fetching.values()):
                fetching.killed()

    def take(self, num_tokens: int) -> tuple[Tables, ...]:
        """Blocks for a request on every rank; empty when there is no room."""
        taken: list[Tables] = []
        for node in self.nodes:
            found = node.rank.pool.take(num_tokens)
            if not found:
                for other, tables in zip(self.nodes, taken, strict=False):
                    other.rank.pool.give_back(tables)
                return ()
            taken += found
        return tuple(taken)

    def lease_blocks(self, request: PrefillRequest, tables: tuple[Tables, ...], is_growing: bool) -> Reference:
        """Fill blocks as a prefill does, or will do, under an id that no other request has at the moment."""
        used = {request_id for node in self.nodes for request_id in node.rank.leased}
        names = [f"r{number}" for number in range(NUM_NAMES + len(used))]
        request_id = next(name for name in names if name not in used)
        lease_id = f"l{len(self._leases) + 1}"
        self._leases[lease_id] = request_id
        for node, own in zip(self.nodes, tables, strict=True):
            told_tables = ((),) * len(own) if is_growing else own
            wanted = LeaseRequest(
                request_id, lease_id, told_tables, request.num_tokens, is_growing, prompt=request.prompt
            )
            node.lease_blocks(LeasedBlocks(wanted, own), request.salt)
        party = self.nodes[0].rank.party
        return Reference(party.engine_id, party.epoch, request_id, lease_id)

    def leases_of_others(self, reference: Reference) -> dict[str, str]:
        """The leases of requests with another id than the one that a reference names, with these ids."""
        return {lease: request_id for lease, request_id in self._leases.items() if request_id != reference.request_id}

    def next_fetch_id(self) -> str:
        """Every attempt has an id of its own, within one incarnation."""
        self._num_fetches += 1
        return f"{self.name}-q{self._num_fetches}"


def _drawn(context: RunContext) -> TransferOptions:
    rng, staging = context.scheduler.rng, context.staging
    half_bytes = staging.half_bytes
    if context.scheduler.chance(context.faults.cramped):
        half_bytes = max(1, staging.largest_slot_bytes // 2)
    return TransferOptions(rng.choice(list(Direction)), staging.policy(rng), half_bytes)
