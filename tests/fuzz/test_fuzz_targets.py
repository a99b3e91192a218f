"""What a target says once it is in: hostile claims end themselves, and never reach into blocks of other requests.

Whatever targets say, in whatever order, the source answers with commands. What it gathers or writes comes out of blocks
that are lent, and of the request that was claimed; each lease gives its blocks back once, when nothing looks at them.
"""

from collections import Counter, deque

import pytest
from msgspec import structs
from under_way import UnderWay, as_it_arrives, bytes_of_blocks

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import NOTHING, DigestPolicy, Part, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

RUNS, STEPS = 250, 150
MODEL = attention(2, 4, 4, "float32", 4)
SOURCES = describe(MODEL, EngineShape(1, 1, 4, 32, "token-major"), 1 << 20)
TARGETS = describe(MODEL, EngineShape(2, 1, 8, 8, "head-major"), 1 << 40)
NUM_TOKENS, NUM_BLOCKS = 13, 32
US = m.Party("p0", "e1", 0)
THEM = [m.Party(engine, epoch, rank) for engine, epoch, rank in (("d0", "e9", 0), ("d0", "e9", 1), ("d1", "e3", 0))]
STATES = tuple(state.name for state in SOURCES[0].states)
TIMING = Timing(lease_s=10.0, tombstone_s=30.0, early_claim_s=5.0, idle_peer_s=200.0)
FOREVER_S = 1e5


class Engine(UnderWay):
    """The source's engine and agent: what is lent, and what is under way on behalf of whom."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, SourceSession(SourceIdentity(US, "0.1.0", SOURCES, (), m.Probe(0, 0, 0)), TIMING))
        self.lent: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.free = list(range(NUM_BLOCKS))
        self._ids = iter(range(1 << 20))

    def lend(self) -> None:
        """A lease on four blocks of its own, computed or not."""
        if len(self.free) < 4:
            return
        number, is_growing = next(self._ids), self.random.random() < 0.4
        table = tuple(self.free.pop(self.random.randrange(len(self.free))) for _ in range(4))
        self.lent[f"l{number}"] = table, is_growing
        tables = ((),) if is_growing else (table,)
        self.feed(e.LeaseRequest(f"r{number}", f"l{number}", tables, NUM_TOKENS, is_growing))

    def grow(self) -> None:
        growing = [lease_id for lease_id, (_, grows) in self.lent.items() if grows]
        if growing:
            lease_id = self.random.choice(growing)
            num_ready = self.random.randint(0, NUM_TOKENS)
            table = self.lent[lease_id][0][: -(-num_ready // 4)]
            self.feed(e.LeaseProgress(f"r{lease_id[1:]}", (table,), num_ready))

    def withdraw(self) -> None:
        if self.lent:
            self.feed(e.LeaseWithdrawn(f"r{self.random.choice(list(self.lent))[1:]}"))

    def hear(self, message: m.Message) -> None:
        self.feed(e.FrameArrived("x", as_it_arrives(message)))

    def check(self) -> None:
        assert {key.lease_id for key in self.digests} <= set(self.lent)

    def obey(self, command: c.Command) -> None:
        match command:
            case c.Connect(party, _):
                self.feed(e.PeerConnected(party, "shm", ""))
            case c.LeaseEnded(request_id, _):
                self.take_back(f"l{request_id[1:]}")
            case c.Reply(_, message):
                self.counts[type(message).__name__] += 1
            case _:
                super().obey(command)

    def expect_own(self, command: c.Stage | c.Post) -> None:
        """What is looked at are blocks that are lent, or what has been gathered out of them."""
        key = command.key
        copies = rows_of(command.tiles) if isinstance(command, c.Stage) else command.copies
        if isinstance(command, c.Post) and key in self.held:
            allowed = self.held[key]
        else:
            lease_id = (key.work if isinstance(key, k.SlotKey) else key).lease_id
            allowed = set().union(*(OF_BLOCKS[block] for block in self.lent[lease_id][0]))
        for address, length in zip(copies.source.tolist(), copies.length.tolist(), strict=True):
            assert address in allowed
            assert all(each in allowed for each in range(address, address + length))

    def take_back(self, lease_id: str) -> None:
        table, _ = self.lent.pop(lease_id)
        assert lease_id not in {work.lease_id for work in self.works()}
        self.free += table


OF_BLOCKS = bytes_of_blocks(SOURCES[0], NUM_BLOCKS, 4)


def _subject(policy: DigestPolicy, states: tuple[str, ...], box: tuple[Span, ...], last: int) -> Subject:
    return Subject(policy, 3, (Part(states, box, ALL_TOKENS, TokenRange(0, last)),))


BOX = Span(0, 2), Span(0, 4)
SUBJECT = _subject(DigestPolicy.FULL, STATES, BOX, 6)
WRONG = {
    "num_tokens": (0, 5, NUM_TOKENS + 1, 1 << 40),
    "readers": ((0,), (1,), (7,)),
    "direction": (Direction.READ,),
    "block_tables": ((), ((),), ((1,),), ((99, 1),), ((-1, 3),), ((1, 1),), ((1, 6), (2, 3))),
    "ranges": tuple(
        tuple(TokenRange(first, last) for first, last in ranges)
        for last in (0, 6, NUM_TOKENS)
        for first in (3, last, last + 4, -5, -(1 << 40), -(1 << 63))
        for ranges in ((), [(first, last)], [(0, last), (first, last)])
    ),
    "strategy": tuple(Strategy),
    "slot_bytes": (0, 1, 7, 1 << 20, 1 << 32),
    "subject": (
        _subject(DigestPolicy.SAMPLED, STATES[:1], (Span(0, 9),), 6),
        _subject(DigestPolicy.SAMPLED, STATES, BOX, 99),
        _subject(DigestPolicy.FULL, ("none",), BOX, 6),
        _subject(DigestPolicy.FULL, STATES * 2, BOX, 6),
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
        return m.Renew(self.party(), (self.lease_id(), self.lease_id()), bytes(self.random.choice((0, 1000))))


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
    for _ in range(4):
        while not engine.is_idle:
            engine.go_on()
        engine.now += FOREVER_S
        engine.feed(e.Tick())
    assert engine.is_idle
    assert not engine.lent
    assert not engine.held
    assert engine.session.num_live() == 0
    assert not list(engine.session._leases)


@pytest.mark.parametrize("seed", range(4))
def test_hostile_targets_harm_only_their_own_requests(seed):
    counts: Counter[str] = Counter()
    for run in range(RUNS):
        counts += play(seed * RUNS + run)
    for what in ("Grant", "Packed", "Written", "Valid", "Refusal", "Aborted", "Queued", "Stage", "LeaseEnded"):
        assert counts[what] > RUNS / 10, counts
