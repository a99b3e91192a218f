"""What a source says once it is in: hostile layouts and block tables end its own request, and never reach elsewhere.

Whatever a source offers and grants, the target answers with commands; and what it posts is written into its own blocks
of that very request, and nowhere else.
"""

import copy
import random

import msgspec
import pytest
from engines import oracle

from kvferry.errors import WireError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout, fingerprint
from kvferry.plan.description.model import attention, latent
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import FetchFailed, Post
from kvferry.session.events import AnswerArrived, FetchRequest, PeerConnected, Tick, TicketEnded
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m
from kvferry.wire.codec import decode, frame_of

OFFERS = 1500
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 1 << 16, 1 << 20, 1 << 47, 1 << 48, (1 << 62) - 1, 1 << 62, (1 << 63) - 1)
MODELS = {
    "attention": attention(2, 4, 8, "float32", 4),
    "latent": latent(num_layers=3, dim=16, dtype="bfloat16", item_bytes=2),
}
US, THEM = m.Party("d0", "e9", 0), "p0"
TABLES, RANGES = ((1, 3),), (TokenRange(0, 11),)


class Hostile:
    """A source engine of some ranks whose descriptions have been tampered with."""

    def __init__(self, seed: int, model: str) -> None:
        self.random = random.Random(seed)
        self._model = MODELS[model]

    def layouts(self) -> list[dict]:
        num_ranks = self.random.choice((1, 1, 2))
        order = self.random.choice(("token-major", "head-major"))
        shape = EngineShape(num_ranks, 1, self.random.choice((2, 4, 6)), 8, order)
        found = [msgspec.to_builtins(layout) for layout in describe(self._model, shape, 1 << 20)]
        for layout in found:
            for _ in range(self.random.choice((0, 1, 1, 2, 3))):
                self.tamper(layout)
        return found

    def tamper(self, value: object) -> None:
        """Change one thing, anywhere inside."""
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = self.random.choice(keys)
            if isinstance(value[key], dict | list) and value[key] and self.random.random() < 0.95:
                value = value[key]
                continue
            value[key] = self.other(value[key])
            return

    def other(self, value: object) -> object:
        match value:
            case bool():
                return not value
            case int():
                return self.random.choice((value + 1, max(0, value - 1), value * 2, value // 2, *NUMBERS))
            case list():
                return (value + copy.deepcopy(value[:1]))[self.random.randint(0, 1) :]
            case _:
                return self.random.choice(("", "dim", "float32", "model.layers.0.k", "x" * 50))

    def tables(self) -> tuple[tuple[int, ...], ...]:
        ids = (0, 1, 2, 3, 4, 5, 6, 7, 8, 1 << 20, (1 << 48) - 1)
        one = tuple(self.random.choice(ids) for _ in range(self.random.choice((0, 3, 6, 6, 12))))
        fine = tuple(self.random.sample(range(8), 6))
        return self.random.choice(((), (one,), (fine,), (fine,), (fine, one)))


def decoded(layout: dict) -> list[Layout]:
    """The layout as it would arrive; empty when it would not."""
    party = {"engine_id": "p0", "epoch": "e1", "rank": 0}
    probe = {"address": 0, "size_bytes": 0, "seed": 0}
    body = {"type": "offer", "party": party, "layout": layout, "transports": [], "probe": probe}
    try:
        return [decode(frame_of(msgspec.msgpack.encode(body))).layout]
    except WireError:
        return []


def meet(target: TargetSession, layouts: list[Layout], hostile: Hostile) -> list:
    """A whole conversation; returns all commands."""
    keys = [PeerKey(f"tcp://127.0.0.1:{rank + 1}", THEM, "e1") for rank in range(len(layouts))]
    addresses = tuple(key.address for key in keys)
    wanted = FetchRequest("q1", m.Reference(THEM, "e1", "r1", "l1"), addresses, TABLES, RANGES)
    said = list(target.handle(wanted, 0.0))
    for rank, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
        party = m.Party(THEM, "e1", rank)
        welcome = m.Welcome(m.WIRE_VERSION, "0.1.0", party, len(layouts), fingerprint(layout))
        offer = m.Offer(party, layout, (), m.Probe(0, 0, 0))
        for event in (AnswerArrived(key, welcome), AnswerArrived(key, offer), PeerConnected(key, "tcp", "")):
            said += target.handle(event, 0.1)
    for key in keys:
        said += target.handle(AnswerArrived(key, m.Grant("q1", hostile.tables())), 0.2)
    for post in [command for command in said if isinstance(command, Post)]:
        said += target.handle(TicketEnded(post.key, ""), 0.3)
    said += target.handle(Tick(), 0.4)
    return said


def expect_inside(posts: list[Post], ours: Layout) -> None:
    """Every byte that is written is one of an element of the wanted tokens, in the wanted blocks."""
    allowed: set[int] = set()
    for placement in ours.placements:
        item_bytes = ours.state_named()[placement.state].item_bytes
        for _, _, address in oracle.element_addresses(ours, placement, TABLES, RANGES[0]):
            allowed.update(range(address, address + item_bytes))
    for post in posts:
        for address, length in zip(post.copies.target.tolist(), post.copies.length.tolist(), strict=True):
            assert length <= len(allowed)
            assert set(range(address, address + length)) <= allowed


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_hostile_source_harms_only_its_own_request(model, seed):
    hostile, outcomes = Hostile(seed, model), {"refused": 0, "failed": 0, "posted": 0}
    ours = describe(MODELS[model], EngineShape(1, 1, 8, 4, "token-major"), 1 << 40)
    for _ in range(OFFERS // 4):
        layouts = [layout for each in hostile.layouts() for layout in decoded(each)]
        if not layouts:
            outcomes["refused"] += 1
            continue
        said = meet(TargetSession(TargetIdentity(US, "0.1.0", ours), Timing()), layouts, hostile)
        posts = [command for command in said if isinstance(command, Post)]
        expect_inside(posts, ours[0])
        outcomes["posted" if posts else "failed"] += 1
        assert posts or any(isinstance(command, FetchFailed) for command in said)
    assert min(outcomes.values()) > OFFERS / 200, outcomes
