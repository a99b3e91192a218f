"""What sources say in the middle of fetches: lies end the fetch that they are about, and never reach other blocks.

Whatever sources answer, in whatever order, the target answers with commands. What it reads or scatters goes to blocks
of the fetch that it belongs to, while these are that fetch's; each fetch ends once, and nothing is left of it.
"""

from collections import Counter, deque
from dataclasses import dataclass

import pytest
from under_way import UnderWay, as_it_arrives, bytes_of_blocks

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

RUNS, STEPS = 200, 150
MODEL = attention(2, 4, 4, "float32", 4)
SOURCES = describe(MODEL, EngineShape(2, 1, 4, 32, "token-major"), 1 << 20)
TARGETS = describe(MODEL, EngineShape(1, 1, 8, 16, "head-major"), 1 << 40)
NUM_BLOCKS, SLOT_BYTES = 16, 256
US = m.Party("d0", "e9", 0)
OF_ADDRESSES = (e.PeerGone, e.HostSilent, e.HandshakeRefused)
ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
TIMING = Timing(heartbeat_s=1.0, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, idle_peer_s=60.0, hold_s=30.0)
WAYS = [
    (Direction.READ, (Strategy.DIRECT,)),
    (Direction.READ, (Strategy.SCATTER,)),
    (Direction.READ, (Strategy.PACK,)),
    (Direction.WRITE, (Strategy.DIRECT, Strategy.PACK)),
]


@dataclass
class Fetch:
    """One that is not over: its blocks, and whether it has failed."""

    blocks: tuple[int, ...]
    has_failed: bool = False


class Engine(UnderWay):
    """The target's engine and agent. `asked` is what sources were asked and have not answered."""

    def __init__(self, seed: int) -> None:
        direction, allowed = WAYS[seed % len(WAYS)]
        policy = (DigestPolicy.OFF, DigestPolicy.SAMPLED, DigestPolicy.FULL)[seed % 3]
        staging = StagingPolicy(allowed, SLOT_BYTES)
        ours = TargetIdentity(
            US, "0.1.0", TARGETS, policy, direction=direction, may_switch_direction=seed % 5 == 0, staging=staging
        )
        super().__init__(seed, TargetSession(ours, TIMING))
        self.fetches: dict[str, Fetch] = {}
        self.free = list(range(NUM_BLOCKS))
        self.asked: deque[tuple[k.PeerKey, m.Message]] = deque(maxlen=60)
        self._ids = iter(range(1 << 20))

    def fetch(self) -> None:
        """Two blocks of its own, for some tokens of a cache."""
        if len(self.free) < 2:
            return
        number, epoch = next(self._ids), self.random.choice(("e1", "e1", "e1", "e1", "e2"))
        blocks = tuple(self.free.pop(self.random.randrange(len(self.free))) for _ in range(2))
        reference = m.Reference("p0", epoch, f"r{number}", f"l{number}")
        last = self.random.choice((13, 13, 13, 0, 1, 16))
        wanted = e.FetchRequest(f"q{number}", reference, ADDRESSES, (blocks,), (TokenRange(min(last, 2), last),))
        self.fetches[wanted.request_id] = Fetch(blocks)
        if self.random.random() < 0.2:
            self.feed(e.HoldRequest(reference, ADDRESSES))
        self.feed(wanted)

    def abort(self) -> None:
        if self.fetches:
            self.feed(e.AbortRequest(self.random.choice(list(self.fetches))))

    def hear(self, peer: k.PeerKey, message: m.Message) -> None:
        self.feed(e.AnswerArrived(peer, as_it_arrives(message)))

    def obey(self, command: c.Command) -> None:
        match command:
            case c.Send(peer, message):
                self.asked.append((peer, as_it_arrives(message)))
            case c.Connect(peer, _):
                is_slow = self.random.random() < 0.2
                self.feed(e.PeerConnected(peer, "shm", "", is_slow=is_slow))
            case c.FetchFailed(request_id, _):
                assert not self.fetches[request_id].has_failed
                self.fetches[request_id].has_failed = True
            case c.BlocksReleased(request_id):
                assert self.fetches[request_id].has_failed
                self.release(request_id)
            case c.Fetched(request_id, _):
                assert not self.fetches[request_id].has_failed
                self.end(request_id)
            case _:
                super().obey(command)

    def end(self, request_id: str) -> None:
        """Nothing moves for it any more, and no slot is its own."""
        assert request_id not in {work.claim_id for work in self.works()}
        assert request_id not in {key.work.claim_id for key in self.held}
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """No scatter and no read brings bytes into its blocks. Slots may still be filled that it had."""
        assert request_id not in {key.work.claim_id for key in self.copies}
        assert request_id not in {key.claim_id for key in self.tickets if isinstance(key, k.ReadKey)}
        self.free += self.fetches.pop(request_id).blocks

    def check(self) -> None:
        assert {key.claim_id for key in self.digests} <= set(self.fetches)
        assert {key.work.claim_id for key in self.waits} <= set(self.fetches)

    def expect_own(self, command: c.Stage | c.Post) -> None:
        key = command.key
        copies = rows_of(command.tiles) if isinstance(command, c.Stage) else command.copies
        if isinstance(command, c.Post):
            assert command.direction is Direction.READ
        if isinstance(command, c.Post) and isinstance(key, k.SlotKey):
            allowed = self.held[key]
        else:
            fetch = self.fetches[(key.work if isinstance(key, k.SlotKey) else key).claim_id]
            assert not fetch.has_failed
            allowed = set().union(*(OF_BLOCKS[block] for block in fetch.blocks))
        for address, length in zip(copies.target.tolist(), copies.length.tolist(), strict=True):
            assert length <= 1 << 20
            assert all(each in allowed for each in range(address, address + length))


OF_BLOCKS = bytes_of_blocks(TARGETS[0], NUM_BLOCKS, 8)


class Hostile:
    """Source ranks that answer what they were asked, or something else."""

    def __init__(self, engine: Engine) -> None:
        self.random, self._engine = engine.random, engine

    def answer(self) -> None:
        """What a good source would say to something that it was asked, perhaps for the second time."""
        if self._engine.asked:
            peer, question = self.random.choice(self._engine.asked)
            self.say(peer, self.good(peer, question))

    def say(self, peer: k.PeerKey, messages: tuple[m.Message, ...]) -> None:
        for message in messages:
            self._engine.hear(peer, message)

    def good(self, peer: k.PeerKey, question: m.Message) -> tuple[m.Message, ...]:
        rank = ADDRESSES.index(peer.address)
        party = m.Party(peer.engine_id, peer.epoch, rank)
        match question:
            case m.Hello():
                return (m.Welcome(m.WIRE_VERSION, "0.1.0", party, 2, fingerprint(SOURCES[rank])),)
            case m.OfferRequest():
                return (m.Offer(party, SOURCES[rank], (), m.Probe(0, 0, 0)),)
            case m.TargetOffer():
                return (m.Reached("shm", ""),)
            case m.Claim():
                return self.of_claim(question)
            case m.Pack():
                packed = m.Packed(question.claim_id, question.stretch, question.number)
                return (packed, self.valid(question.claim_id)) if self.random.random() < 0.3 else (packed,)
            case m.Landed():
                return (self.valid(question.claim_id),)
            case m.Abort():
                return (m.Aborted(question.claim_id, peer.epoch),)
        return (m.Renewed(()),)

    def of_claim(self, claim: m.Claim) -> tuple[m.Message, ...]:
        tables = tuple(self.random.sample(range(32), 4)) if claim.direction is Direction.READ else ()
        grant = m.Grant(claim.claim_id, (tables,) if tables else (), self.random.choice((0, 0, 0, 5)))
        if claim.direction is Direction.READ or claim.strategy is Strategy.PACK:
            return (grant,)
        return (grant, m.Written(claim.claim_id, 1 << 10, 3), self.valid(claim.claim_id))

    def valid(self, claim_id: str) -> m.Valid:
        """With the values that our digests have, mostly."""
        claimed = [question for _, question in self._engine.asked if isinstance(question, m.Claim)]
        names = [len(claim.subject.names) for claim in claimed if claim.claim_id == claim_id]
        num_values = names[0] if names and self.random.random() < 0.95 else 3
        return m.Valid(claim_id, (bytes(8),) * num_values)

    def lie(self) -> None:
        epoch = self.random.choice(("e1", "e1", "e1", "e2"))
        peer = k.PeerKey(self.random.choice(ADDRESSES), "p0", epoch)
        request_id = self.random.choice([*self._engine.fetches, "q0", ""])
        tables = self.random.choice(((), ((),), ((1, 2),), ((99, 1, 2, 3),), ((1, 1, 1, 1),), ((1, 2, 3, 4), (5,))))
        number = self.random.choice((0, 0, 1, 2, 1 << 40))
        lies: tuple[m.Message, ...] = (
            m.Grant(request_id, tables, self.random.choice((0, 3, 99, 1 << 40))),
            m.Packed(request_id, self.random.randint(0, 4), number, self.random.choice((0, 5, 1 << 40))),
            m.Queued(request_id),
            m.Written(request_id, 1 << 47, 1 << 47),
            m.Valid(request_id, (bytes(8),) * self.random.choice((0, 1, 4, 99))),
            m.Renewed((f"l{request_id[1:]}",)),
            m.Aborted(request_id, self.random.choice(("e1", "e2")), self.random.random() < 0.5),
            m.Refusal(
                self.random.choice(list(m.Reason)), "no", "", "", self.random.choice((request_id, request_id, ""))
            ),
            m.Reached("nixl", ""),
            m.Welcome(m.WIRE_VERSION, "0.1.0", m.Party("p0", epoch, 0), self.random.choice((1, 2, 7)), "other"),
            m.Offer(m.Party("p0", epoch, 1), SOURCES[0], (), m.Probe(0, 0, 0), is_staged=self.random.random() < 0.5),
            m.Claim(m.Party("p0", epoch, 0), "c", m.Reference("d0", "e9", "r", "l"), 1, (0,)),
        )
        self._engine.hear(peer, self.random.choice(lies))

    def go(self) -> None:
        peer = k.PeerKey(self.random.choice(ADDRESSES), "p0", self.random.choice(("e1", "e2")))
        self._engine.feed(self.random.choice([*(kind(peer) for kind in OF_ADDRESSES), e.PeerUnreachable(peer, "no")]))


def play(seed: int) -> Counter[str]:
    engine = Engine(seed)
    hostile = Hostile(engine)
    deeds = [engine.fetch, engine.abort, engine.pass_time, engine.go_on, hostile.answer, hostile.lie, hostile.go]
    for _ in range(STEPS):
        engine.random.choices(deeds, (6, 0.5, 2, 40, 60, 3, 0.1))[0]()
    leave(engine, hostile)
    return engine.counts


def leave(engine: Engine, hostile: Hostile) -> None:
    """When nobody wants anything any more and sources say the truth, all that is under way ends; nothing is left."""
    for request_id, fetch in list(engine.fetches.items()):
        if not fetch.has_failed:
            engine.feed(e.AbortRequest(request_id))
    for _ in range(100):
        while not engine.is_idle:
            engine.go_on()
        for peer, question in [each for each in engine.asked if isinstance(each[1], m.Abort)]:
            hostile.say(peer, hostile.good(peer, question))
        engine.asked.clear()
        engine.now += 1.0
        engine.feed(e.Tick())
    assert not engine.fetches
    assert not engine.held
    assert not engine.waits
    assert engine.session.num_open() == 0
    assert engine.session.next_deadline(engine.now) == float("inf")


@pytest.mark.parametrize("seed", range(4))
def test_hostile_sources_harm_only_fetches_from_them(seed):
    counts: Counter[str] = Counter()
    for run in range(RUNS):
        counts += play(seed * RUNS + run)
    for what in ("Post", "Stage", "Release", "Fetched", "FetchFailed", "BlocksReleased", "Digest", "Disconnect"):
        assert counts[what] > RUNS / 10, counts
