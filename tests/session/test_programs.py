"""What a target rank has to do with each rank of a source engine."""

from types import SimpleNamespace

import pytest

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention, latent
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.bindings import Bindings
from kvferry.wire import messages as m

HEADS, LATENT = attention(2, 12, 4, "float32", 4), latent(1, 8, "float32", 4)


def engine(model, num_ranks, at):
    return describe(model, EngineShape(num_ranks, 1, 4, 8, "token-major"), at << 30)


def met(name, layouts):
    """The peers of an engine, as a target knows them after their handshakes."""
    return {
        PeerKey(f"tcp://127.0.0.1:{1 + number}", name, "e1"): SimpleNamespace(
            offer=m.Offer(m.Party(name, "e1", number), layout, (), m.Probe(0, 0, 0)),
            num_ranks=len(layouts),
            fingerprint=fingerprint(layout),
        )
        for number, layout in enumerate(layouts)
    }


def fans(model, num_sources, num_targets, rank):
    """The fan_in of each source rank from which something comes, or that is told, and how many it serves, by number."""
    known = met("p0", engine(model, num_sources, 1))
    peers = tuple(known)
    found = Bindings(engine(model, num_targets, 2), rank).to(peers, known)
    served = {number: len(found.readers_of(peer)) for number, peer in enumerate(peers)}
    return {peers.index(peer): found.fan_in(peer) for peer in found.programs}, served


def test_engines_that_differ_in_addresses_alone_share_all_but_those():
    bindings = Bindings(engine(HEADS, 2, 2), 0)
    first, second, other = (
        bindings.to(tuple(known), known)
        for known in (met("p0", engine(HEADS, 4, 1)), met("p1", engine(HEADS, 4, 5)), met("p2", engine(HEADS, 3, 7)))
    )
    assert first.inbound is second.inbound
    assert other.inbound is not first.inbound
    starts = [
        [int(section.source[0]) for program in binding.programs.values() for section in program.groups[0].units]
        for binding in (first, second)
    ]
    assert [there - here for here, there in zip(*starts, strict=True)] == [4 << 30] * len(starts[0])


@pytest.mark.parametrize(
    ("num_sources", "num_targets", "rank", "expected"),
    [
        (1, 1, 0, {0: 1.0}),
        (1, 2, 1, {0: 1.0}),
        (4, 1, 0, {0: 4.0, 1: 4.0, 2: 4.0, 3: 4.0}),
        (4, 2, 1, {2: 2.0, 3: 2.0}),
        (3, 2, 0, {0: 1.5, 1: 3.0}),
        (3, 2, 1, {1: 3.0, 2: 1.5}),
    ],
)
def test_so_many_times_as_much_comes_from_all_as_from_one(num_sources, num_targets, rank, expected):
    assert fans(HEADS, num_sources, num_targets, rank)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "num_sources", "num_targets", "expected"),
    [
        (HEADS, 1, 1, {0: 1}),
        (HEADS, 1, 3, {0: 3}),
        (HEADS, 4, 2, dict.fromkeys(range(4), 1)),
        (HEADS, 3, 2, {0: 1, 1: 2, 2: 1}),
        (HEADS, 2, 4, {0: 2, 1: 2}),
        # Replicas: each target rank reads one, and tells all that it has.
        (LATENT, 2, 2, {0: 1, 1: 1}),
        (LATENT, 2, 1, {0: 1, 1: 1}),
        (LATENT, 1, 4, {0: 4}),
    ],
)
def test_so_many_ranks_fetch_from_one_at_a_time(model, num_sources, num_targets, expected):
    for rank in range(num_targets):
        assert fans(model, num_sources, num_targets, rank)[1] == expected


def test_a_rank_that_is_only_told_costs_nothing():
    """All source ranks hold the same: one is read."""
    assert fans(LATENT, 2, 1, 0)[0] == {0: 1.0, 1: 1.0}
