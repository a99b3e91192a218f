"""Route and programs between a set of source ranks and this target rank: computed once per incarnation."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import RequestError
from kvferry.plan.layout import Layout
from kvferry.plan.program import Program, bind
from kvferry.plan.route import Route, route
from kvferry.session.events import PeerKey
from kvferry.session.handshake import Handshakes

__all__ = ["Binding", "Bindings"]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The programs of this target rank, one per source rank that it reads or tells that the request is done.

    The program of a rank that is only told moves nothing.
    """

    peers: tuple[PeerKey, ...]
    route: Route
    programs: dict[PeerKey, Program]

    def readers_of(self, peer: PeerKey) -> tuple[int, ...]:
        """All ranks of the target engine that read a source rank: its lease waits for exactly these."""
        return self.route.targets_of(self.peers.index(peer))


class Bindings:
    """Bindings by the source ranks they belong to. `layouts` are those of all ranks of the target engine."""

    def __init__(self, layouts: tuple[Layout, ...], rank: int) -> None:
        self._layouts = layouts
        self._rank = rank
        self._known: dict[tuple[PeerKey, ...], Binding] = {}

    def to(self, peers: tuple[PeerKey, ...], handshakes: Handshakes) -> Binding:
        """The binding to peers that are all ready.

        Raises RequestError when they are not the ranks that a reference names, and the planner's own errors when the
        two engines do not hold the same cache.
        """
        if peers not in self._known:
            sources = [_layout_of(rank, key, len(peers), handshakes) for rank, key in enumerate(peers)]
            self._known[peers] = self._bind(peers, sources)
        return self._known[peers]

    def forget(self, peer: PeerKey) -> None:
        """Drop what was computed for a peer that is lost."""
        self._known = {peers: binding for peers, binding in self._known.items() if peer not in peers}

    def _bind(self, peers: tuple[PeerKey, ...], sources: list[Layout]) -> Binding:
        found, own = route(sources, self._layouts), self._layouts[self._rank]
        programs = {
            peers[source]: bind(found.between(source, self._rank), sources[source], own)
            for source in found.sources_of(self._rank)
        }
        return Binding(peers, found, programs)


def _layout_of(rank: int, key: PeerKey, num_ranks: int, handshakes: Handshakes) -> Layout:
    peer = handshakes[key]
    if peer.offer is None or peer.offer.party.rank != rank or peer.num_ranks != num_ranks:
        raise RequestError(
            f"{key} is not the rank that the reference names",
            found=f"{peer.num_ranks} ranks",
            expected=f"rank {rank} of {num_ranks}",
        )
    return peer.offer.layout
