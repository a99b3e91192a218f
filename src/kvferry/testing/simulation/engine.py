"""An engine: its ranks start, are killed and start again as another incarnation at the same addresses."""

from __future__ import annotations

from kvferry.plan.programs.copies import Direction
from kvferry.session.events import LeaseRequest
from kvferry.testing.simulation.memory import Tables
from kvferry.testing.simulation.node import Habits, Lent, Node, Wiring
from kvferry.testing.simulation.prompts import Asked
from kvferry.testing.simulation.shapes import Side
from kvferry.testing.simulation.site import Site
from kvferry.wire.messages import Party, Reference

NUM_NAMES = 4


class Engine:
    """All ranks of one engine. `habits` say how the bytes move that it fetches.

    Ids start again with every incarnation, and those of requests are used again.
    """

    def __init__(self, wiring: Wiring, name: str, side: Side) -> None:
        self.name = name
        self.habits = _drawn(wiring.site)
        self.nodes: tuple[Node, ...] = ()
        self._wiring = wiring
        self._side = side
        self._num_starts = 0
        self._leases: dict[str, str] = {}
        self._num_fetches = 0

    def start(self) -> None:
        """A new incarnation. Some engines have another id after every start, most keep theirs."""
        world = self._wiring.site.world
        self._num_starts += 1
        self._leases, self._num_fetches = {}, 0
        renamed = self._num_starts > 1 and world.chance(0.3)
        engine_id = f"{self.name}-{self._num_starts}" if renamed else self.name
        epoch = f"e{self._num_starts}"
        parties = [Party(engine_id, epoch, rank) for rank in range(len(self._side.layouts))]
        self.nodes = tuple(Node(self._wiring, self.name, party, self._side, self.habits) for party in parties)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where its ranks answer."""
        return tuple(node.address for node in self.nodes)

    @property
    def runs(self) -> bool:
        """Whether it is up."""
        return all(node.alive for node in self.nodes)

    def kill(self) -> None:
        """All ranks are gone, with all they had."""
        outlived = self._wiring.site.world.chance(self._wiring.site.faults.outlives)
        for node in self.nodes:
            node.die(outlived)
        for node in self.nodes:
            for fetching in list(node.fetching.values()):
                fetching.attempt.killed()

    def take(self, num_tokens: int) -> tuple[Tables, ...]:
        """Blocks for a request on every rank; empty when there is no room."""
        taken: list[Tables] = []
        for node in self.nodes:
            found = node.pool.take(num_tokens)
            if not found:
                for other, tables in zip(self.nodes, taken, strict=False):
                    other.pool.give_back(tables)
                return ()
            taken += found
        return tuple(taken)

    def lend(self, asked: Asked, tables: tuple[Tables, ...], is_growing: bool) -> Reference:
        """Fill blocks as a prefill does, or will do, under an id that no other request has at the moment."""
        used = {request_id for node in self.nodes for request_id in node.lent}
        names = [f"r{number}" for number in range(NUM_NAMES + len(used))]
        request_id = next(name for name in names if name not in used)
        lease_id = f"l{len(self._leases) + 1}"
        self._leases[lease_id] = request_id
        for node, own in zip(self.nodes, tables, strict=True):
            told = ((),) * len(own) if is_growing else own
            wanted = LeaseRequest(request_id, lease_id, told, asked.num_tokens, is_growing, prompt=asked.prompt)
            node.lend(Lent(wanted, own), asked.salt)
        party = self.nodes[0].party
        return Reference(party.engine_id, party.epoch, request_id, lease_id)

    def leases_of_others(self, reference: Reference) -> dict[str, str]:
        """The leases of requests with another id than the one that a reference names, with these ids."""
        return {lease: request_id for lease, request_id in self._leases.items() if request_id != reference.request_id}

    def next_fetch_id(self) -> str:
        """Every attempt has an id of its own, within one incarnation."""
        self._num_fetches += 1
        return f"{self.name}-q{self._num_fetches}"


def _drawn(site: Site) -> Habits:
    dice, staging = site.world.dice, site.staging
    half_bytes = staging.half_bytes
    if site.world.chance(site.faults.cramped):
        half_bytes = max(1, staging.largest_slot_bytes // 2)
    return Habits(dice.choice(list(Direction)), staging.policy(dice), half_bytes)
