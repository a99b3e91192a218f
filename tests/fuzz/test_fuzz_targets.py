"""What a target says once it is in: hostile claims end themselves, and never reach into blocks of other requests.

Whatever targets say, in whatever order, the source answers with commands. What it gathers or writes comes out of blocks
that are lent, and of the request that was claimed; each lease gives its blocks back once, when nothing looks at them.
"""

import random
from collections import Counter, deque

import pytest
from msgspec import structs

from kvferry.plan.copies import Direction
from kvferry.plan.describe import EngineShape, describe
from kvferry.plan.digest import NOTHING, Part, Policy, Subject
from kvferry.plan.layout import Layout
from kvferry.plan.model import attention
from kvferry.plan.span import Span
from kvferry.plan.staged import Strategy
from kvferry.plan.tiles import rows_of
from kvferry.plan.tokens import ALL_TOKENS, TokenRange
from kvferry.session import events as e
from kvferry.session.introduction import Identity
from kvferry.session.source import SourceSession
from kvferry.testing import oracle
from kvferry.wire import messages as m
from kvferry.wire.codec import decode, encode

RUNS, STEPS = 250, 150
MODEL = attention(2, 4, 4, "float32", 4)
SOURCES = describe(MODEL, EngineShape(1, 1, 4, 32, "token-major"), 1 << 20)
TARGETS = describe(MODEL, EngineShape(2, 1, 8, 8, "head-major"), 1 << 40)
NUM_TOKENS = 13
US = m.Party("p0", "e1", 0)
THEM = [m.Party(engine, epoch, rank) for engine, epoch, rank in (("d0", "e9", 0), ("d0", "e9", 1), ("d1", "e3", 0))]
STATES = tuple(state.name for state in SOURCES[0].states)
TIMING = e.Timing(lease_s=10.0, tombstone_s=30.0, early_claim_s=5.0, idle_peer_s=200.0)
FOREVER_S = 1e5


class Engine:
    """The source's engine and agent: what is lent, and what is under way on behalf of whom."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.session = SourceSession(Identity(US, "0.1.0", SOURCES, (), m.Probe(0, 0, 0)), TIMING)
        self.now = 0.0
        self.lent: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.waits: dict[e.SlotKey, e.Acquire] = {}
        self.held: set[e.SlotKey] = set()
        self.gathers: dict[e.SlotKey, e.Stage] = {}
        self.tickets: dict[object, e.Post] = {}
        self.digests: dict[object, e.Digest] = {}
        self.free = list(range(32))
        self.counts: Counter[str] = Counter()
        self._numbers = iter(range(1 << 20))

    def lend(self) -> None:
        """A lease on four blocks of its own, computed or not."""
        if len(self.free) < 4:
            return
        number, is_growing = next(self._numbers), self.random.random() < 0.4
        table = tuple(self.free.pop(self.random.randrange(len(self.free))) for _ in range(4))
        self.lent[f"l{number}"] = table, is_growing
        tables = ((),) if is_growing else (table,)
        self.feed(e.LeaseWanted(f"r{number}", f"l{number}", tables, NUM_TOKENS, is_growing))

    def grow(self) -> None:
        growing = [lease_id for lease_id, (_, grows) in self.lent.items() if grows]
        if growing:
            lease_id = self.random.choice(growing)
            num_ready = self.random.randint(0, NUM_TOKENS)
            table = self.lent[lease_id][0][: -(-num_ready // 4)]
            self.feed(e.LeaseGrown(f"r{lease_id[1:]}", (table,), num_ready))

    def withdraw(self) -> None:
        if self.lent:
            self.feed(e.LeaseWithdrawn(f"r{self.random.choice(list(self.lent))[1:]}"))

    def pass_time(self) -> None:
        self.now += self.random.choice((0.01, 0.5, 3.0, 11.0))
        self.feed(e.Tick())

    def go_on(self) -> None:
        """Something that is under way ends, well or not."""
        error = "broken" if self.random.random() < 0.1 else ""
        under_way = [*self.waits, *self.gathers, *self.tickets, *self.digests]
        if not under_way:
            return
        key = self.random.choice(under_way)
        if key in self.waits:
            del self.waits[key]
            self.held |= set() if error else {key}
            self.feed(e.Acquired(key, 0 if error else (1 << 50), error))
        elif key in self.gathers:
            del self.gathers[key]
            self.feed(e.Staged(key, error))
        elif key in self.tickets:
            del self.tickets[key]
            self.feed(e.TicketEnded(key, error))
        else:
            digest = self.digests.pop(key)
            num_values = sum(len(extract.numbers) for extract in digest.extracts)
            self.feed(e.Digested(key, () if error else (bytes(8),) * num_values, error))

    def hear(self, message: m.Message) -> None:
        """What would arrive: nothing that the wire refuses."""
        self.feed(e.FrameArrived("x", decode(encode(message))))

    def feed(self, event: object) -> None:
        for command in self.session.handle(event, self.now):
            self.counts[type(command).__name__] += 1
            self.obey(command)
        assert {key.lease_id for key in self.digests} <= set(self.lent)

    def obey(self, command: e.Command) -> None:
        match command:
            case e.Connect(party, _):
                self.feed(e.PeerConnected(party, "shm", ""))
            case e.Digest(key, _):
                assert key.lease_id in self.lent
                self.digests[key] = command
            case e.DropDigest(key):
                self.digests.pop(key, None)
            case e.SourceFree(request_id, _):
                self.take_back(f"l{request_id[1:]}")
            case e.Reply(_, message):
                self.counts[type(message).__name__] += 1
            case _:
                self.move(command)

    def move(self, command: e.Command) -> None:
        """Slots and copies."""
        match command:
            case e.Acquire(key, _):
                assert key not in self.held
                self.waits[key] = command
            case e.Release(key):
                assert key not in self.gathers
                assert key not in self.tickets
                self.waits.pop(key, None)
                self.held.discard(key)
            case e.Stage(key, tiles):
                assert key in self.held
                self.expect_lent(key.work.lease_id, rows_of(tiles))
                self.gathers[key] = command
            case e.Post(key, copies, direction):
                assert direction is Direction.WRITE
                assert key not in self.tickets
                if key not in self.held:
                    self.expect_lent((key.work if isinstance(key, e.SlotKey) else key).lease_id, copies)
                self.tickets[key] = command

    def expect_lent(self, lease_id: str, copies) -> None:
        """All that is looked at belongs to the blocks of this lease."""
        lent = set().union(*(OF_BLOCKS[block] for block in self.lent[lease_id][0]))
        for address, length in zip(copies.source.tolist(), copies.length.tolist(), strict=True):
            assert lent.issuperset(range(address, address + length))

    def take_back(self, lease_id: str) -> None:
        table, _ = self.lent.pop(lease_id)
        works = [key.work if isinstance(key, e.SlotKey) else key for key in (*self.gathers, *self.tickets)]
        assert lease_id not in {work.lease_id for work in works}
        self.free += table


def of_blocks(layout: Layout) -> dict[int, set[int]]:
    """The bytes of each block."""
    found: dict[int, set[int]] = {}
    for block in range(32):
        found[block] = set()
        for placement in layout.placements:
            item_bytes = layout.state_named()[placement.state].item_bytes
            for _, _, address in oracle.element_addresses(layout, placement, ((block,),), TokenRange(0, 4)):
                found[block].update(range(address, address + item_bytes))
    return found


OF_BLOCKS = of_blocks(SOURCES[0])


def _subject(policy: Policy, states: tuple[str, ...], box: tuple[Span, ...], last: int) -> Subject:
    return Subject(policy, 3, (Part(states, box, ALL_TOKENS, TokenRange(0, last)),))


BOX = Span(0, 2), Span(0, 4)
SUBJECT = _subject(Policy.FULL, STATES, BOX, 6)
WRONG = {
    "num_tokens": (0, 5, NUM_TOKENS + 1, 1 << 40),
    "readers": ((0,), (1,), (7,)),
    "direction": (Direction.READ,),
    "block_tables": ((), ((),), ((1,),), ((99, 1),), ((-1, 3),), ((1, 1),), ((1, 6), (2, 3))),
    "ranges": tuple(
        tuple(TokenRange(first, last) for first, last in ranges)
        for last in (0, 6, NUM_TOKENS)
        for ranges in ((), [(last, last)], [(last + 4, last)], [(-5, last)], [(3, last)], [(0, last), (0, last)])
    ),
    "strategy": tuple(Strategy),
    "slot_bytes": (0, 1, 7, 1 << 20, 1 << 32),
    "subject": (
        _subject(Policy.SAMPLED, STATES[:1], (Span(0, 9),), 6),
        _subject(Policy.SAMPLED, STATES, BOX, 99),
        _subject(Policy.FULL, ("none",), BOX, 6),
        _subject(Policy.FULL, STATES * 2, BOX, 6),
    ),
}


class Hostile:
    """Targets that say what they like, often what is almost right."""

    def __init__(self, engine: Engine) -> None:
        self.random, self._engine = engine.random, engine
        self._claims: deque[m.Claim] = deque(maxlen=4)

    def one_of(self, likely, *others):
        return likely if self.random.random() < 0.7 else self.random.choice(others)

    def party(self) -> m.Party:
        return self.random.choice(THEM)

    def lease_id(self) -> str:
        return self.one_of(self.random.choice([*self._engine.lent, "l0"]), "l0", "l1", "none")

    def claim_id(self) -> str:
        return self.one_of("c0", "c1", "c2")

    def message(self) -> m.Message:
        make = self.random.choice(
            (*(self.claim,) * 8, *(self.pack,) * 16, *(self.landed,) * 3, *(self.renew,) * 2, self.offer, self.abort)
        )
        message = make()
        if isinstance(message, m.Claim):
            self._claims.append(message)
        return message

    def whose(self) -> tuple[m.Party, str, str]:
        """Mostly of what has been claimed."""
        if self._claims and self.random.random() < 0.9:
            claim = self.random.choice(self._claims)
            return claim.party, claim.claim_id, claim.reference.lease_id
        return self.party(), self.claim_id(), self.lease_id()

    def offer(self) -> m.TargetOffer:
        layouts = self.one_of(TARGETS, TARGETS[:1], SOURCES)
        return m.TargetOffer(self.party(), layouts, (), m.Probe(0, 0, 0))

    def claim(self) -> m.Claim:
        """A good one as often as not; else up to three things are wrong with it."""
        lease_id, last = self.lease_id(), self.one_of(NUM_TOKENS, 0, 1, 6, NUM_TOKENS + 1)
        reference = m.Reference("p0", "e1", f"r{lease_id[1:]}", lease_id)
        strategy = self.random.choice((Strategy.PACK, Strategy.DIRECT))
        claim = m.Claim(self.party(), self.claim_id(), reference, last, (0, 1))
        if self.random.random() < 0.2:
            return structs.replace(claim, subject=SUBJECT)
        tables, ranges = ((1, 6),), (TokenRange(0, last),)
        claim = structs.replace(claim, direction=Direction.WRITE, block_tables=tables, ranges=ranges, strategy=strategy)
        claim = structs.replace(claim, slot_bytes=256, subject=self.random.choice((NOTHING, SUBJECT)))
        num_wrong = self.random.choice((0, 0, 0, 1, 2, 3))
        wrong = self.random.sample(list(WRONG), num_wrong)
        return structs.replace(claim, **{name: self.random.choice(WRONG[name]) for name in wrong})

    def pack(self) -> m.Pack:
        numbers = self.random.randint(0, 4), self.one_of(0, 0, 1, 1 << 40)
        return m.Pack(*self.whose(), *numbers, address=1 << 45)

    def landed(self) -> m.Landed:
        return m.Landed(*self.whose())

    def abort(self) -> m.Abort:
        return m.Abort(*self.whose())

    def renew(self) -> m.Renew:
        return m.Renew(self.party(), (self.lease_id(), self.lease_id()))


def play(seed: int) -> Counter[str]:
    engine = Engine(seed)
    hostile = Hostile(engine)
    for party in THEM:
        engine.hear(m.TargetOffer(party, TARGETS, (), m.Probe(0, 0, 0)))
    for _ in range(STEPS):
        kind = engine.random.choices(("lend", "grow", "withdraw", "time", "go on", "hear"), (4, 5, 1, 2, 30, 40))[0]
        match kind:
            case "lend":
                engine.lend()
            case "grow":
                engine.grow()
            case "withdraw":
                engine.withdraw()
            case "time":
                engine.pass_time()
            case "go on":
                engine.go_on()
            case _:
                engine.hear(hostile.message())
    leave(engine)
    return engine.counts


def leave(engine: Engine) -> None:
    """When nobody says anything any more, all that is under way ends, and nothing is left."""
    while engine.waits or engine.gathers or engine.tickets or engine.digests:
        engine.go_on()
    for _ in range(4):
        engine.now += FOREVER_S
        engine.feed(e.Tick())
        while engine.waits or engine.gathers or engine.tickets or engine.digests:
            engine.go_on()
    assert not engine.lent
    assert not engine.held
    assert engine.session.num_live() == 0
    assert not list(engine.session._leases)


@pytest.mark.parametrize("seed", range(4))
def test_hostile_targets_harm_only_their_own_requests(seed):
    counts: Counter[str] = Counter()
    for run in range(RUNS):
        counts += play(seed * RUNS + run)
    for what in ("Grant", "Packed", "Written", "Valid", "Refusal", "Aborted", "Queued", "Stage", "SourceFree"):
        assert counts[what] > RUNS / 10, counts
