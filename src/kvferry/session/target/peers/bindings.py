"""Route and programs between a set of source ranks and this target rank: computed once per incarnation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvferry.errors import RequestError
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import NOTHING, DigestPolicy, PartTemplate, Subject, seed_of, subject_of, templates_of
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.request import volume
from kvferry.plan.routing.route import Route, route
from kvferry.session.events import FetchRequest
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import Handshakes

READABLE_KINDS = frozenset(["dram"])
"""Kinds of memory that the CPU reads, so that digests of it can be made."""

A_PROMPT = TokenRange(0, 4096)


@dataclass(frozen=True, eq=False)
class InboundRoute:
    """The route from a source engine's ranks to this target rank, whatever their addresses: equal engines share it.

    For each source rank, `templates` says what can be digested of it, and `fan_in` how many times as much comes from
    all of them as from this one.
    """

    route: Route
    templates: dict[int, tuple[PartTemplate, ...]]
    fan_in: dict[int, float]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The programs of this target rank, one per source rank that it reads or tells that the request is done.

    The program of a rank that is only told about the end moves nothing. `unreadable` names the kinds of memory, on
    either side, that the CPU cannot read: empty when digests can be made.
    """

    peers: tuple[PeerKey, ...]
    inbound: InboundRoute
    programs: dict[PeerKey, Program]
    layouts: dict[PeerKey, Layout]
    unreadable: str

    def verified_by(self, policy: DigestPolicy) -> str:
        """How a fetch was verified, as its report says it."""
        return "unreadable" if self.unreadable and policy is not DigestPolicy.OFF else str(policy)

    def subject(self, peer: PeerKey, request: FetchRequest, policy: DigestPolicy) -> Subject:
        """What is digested of one read. Raises LayoutError when that falls into too many parts."""
        seed = seed_of(f"{request.reference.lease_id}/{request.request_id}")
        # Without tokens nothing has been read, no state of fixed size either.
        is_empty = self.unreadable or not request.num_tokens
        if is_empty:
            return NOTHING
        return subject_of(self.inbound.templates[self.peers.index(peer)], request.ranges, policy, seed)

    def fan_in(self, peer: PeerKey) -> float:
        """How many times as much comes from all source ranks as from this one."""
        return self.inbound.fan_in[self.peers.index(peer)]

    def readers_of(self, peer: PeerKey) -> tuple[int, ...]:
        """All ranks of the target engine that read a source rank: its lease waits for exactly these."""
        return self.inbound.route.targets_of(self.peers.index(peer))


class Bindings:
    """Bindings by the source ranks they belong to. `layouts` are those of all ranks of the target engine."""

    def __init__(self, layouts: tuple[Layout, ...], rank: int) -> None:
        self._layouts = layouts
        self._rank = rank
        self._known: dict[tuple[PeerKey, ...], Binding] = {}
        # Inbound routes by the fingerprints of the source ranks' layouts.
        self._inbound: WeakValueDictionary[tuple[str, ...], InboundRoute] = WeakValueDictionary()

    def to(self, peers: tuple[PeerKey, ...], handshakes: Handshakes) -> Binding:
        """The binding to peers that are all ready.

        Raises RequestError when they are not the ranks that a reference names, and the planner's own errors when the
        two engines do not hold the same cache.
        """
        if peers not in self._known:
            sources = [_layout_of(rank, key, len(peers), handshakes) for rank, key in enumerate(peers)]
            self._known[peers] = self._bind(peers, sources, tuple(handshakes[key].fingerprint for key in peers))
        return self._known[peers]

    def forget(self, peer: PeerKey) -> None:
        """Drop what was computed for a peer that is lost."""
        self._known = {peers: binding for peers, binding in self._known.items() if peer not in peers}

    def _bind(self, peers: tuple[PeerKey, ...], sources: list[Layout], names: tuple[str, ...]) -> Binding:
        inbound, programs = self._planned(sources, names)
        kinds = {region.kind for layout in (self._layouts[self._rank], *sources) for region in layout.regions}
        named = {peers[source]: program for source, program in programs.items()}
        layouts = dict(zip(peers, sources, strict=True))
        return Binding(peers, inbound, named, layouts, ", ".join(sorted(kinds - READABLE_KINDS)))

    def _planned(self, sources: list[Layout], names: tuple[str, ...]) -> tuple[InboundRoute, dict[int, Program]]:
        own, known = self._layouts[self._rank], self._inbound.get(names)
        found = known.route if known else route(sources, self._layouts)
        programs = {
            source: bind(found.between(source, self._rank), sources[source], own)
            for source in found.sources_of(self._rank)
        }
        return known or self._inbound.setdefault(names, self._inbound_route(found, programs)), programs

    def _inbound_route(self, found: Route, programs: Mapping[int, Program]) -> InboundRoute:
        own = self._layouts[self._rank]
        templates = {source: templates_of(found.between(source, self._rank), own) for source in programs}
        return InboundRoute(found, templates, _fan_in(programs, len(own.groups)))


def _fan_in(programs: Mapping[int, Program], num_groups: int) -> dict[int, float]:
    """How many times as much of `A_PROMPT` comes from all source ranks as from each; 1 where nothing comes from it."""
    shares = {source: volume(program, (A_PROMPT,) * num_groups)[1] for source, program in programs.items()}
    return {source: sum(shares.values()) / share if share else 1.0 for source, share in shares.items()}


def _layout_of(rank: int, key: PeerKey, num_ranks: int, handshakes: Handshakes) -> Layout:
    peer = handshakes[key]
    if peer.offer is None or peer.offer.party.rank != rank or peer.num_ranks != num_ranks:
        raise RequestError(
            f"{key} is not the rank that the reference names",
            found=f"{peer.num_ranks} ranks",
            expected=f"rank {rank} of {num_ranks}",
        )
    return peer.offer.layout
