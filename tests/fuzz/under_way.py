"""What an agent does for a session, without one: slots, copies, tickets and digests begin, and end in any order."""

import random
from collections import Counter

from engines import oracle

from kvferry.plan.description.layout import Layout
from kvferry.plan.description.tokens import TokenRange
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.wire import messages as m
from kvferry.wire.codec import decode, encode

__all__ = ["UnderWay", "as_it_arrives", "bytes_of_blocks"]

SLOTS = 1 << 50


class UnderWay:
    """Of one session. What is asked of it that makes no sense is an AssertionError."""

    def __init__(self, seed: int, session) -> None:
        self.random, self.session, self.now = random.Random(seed), session, 0.0
        self.counts: Counter[str] = Counter()
        self.waits: dict[k.SlotKey, c.Acquire] = {}
        self.held: dict[k.SlotKey, range] = {}
        self.copies: dict[k.SlotKey, c.Stage] = {}
        self.tickets: dict[object, c.Post] = {}
        self.digests: dict[object, c.Digest] = {}
        self._numbers = iter(range(1 << 20))

    def feed(self, event: object) -> None:
        """Tell the session, and do what it says."""
        for command in self.session.handle(event, self.now):
            self.counts[type(command).__name__] += 1
            self.obey(command)
        self.check()

    def obey(self, command: c.Command) -> None:
        match command:
            case c.Digest(key, _):
                assert key not in self.digests
                self.digests[key] = command
            case c.DropDigest(key):
                self.digests.pop(key, None)
            case c.Acquire(key, _):
                assert key not in self.held
                assert key not in self.waits
                self.waits[key] = command
            case c.Release(key):
                assert key not in self.copies
                assert key not in self.tickets
                self.waits.pop(key, None)
                self.held.pop(key, None)
            case _:
                self.begin(command)

    def begin(self, command: c.Command) -> None:
        match command:
            case c.Stage(key, _):
                assert key in self.held
                assert key not in self.copies
                assert key not in self.tickets
                self.expect_own(command)
                self.copies[key] = command
            case c.Post(key, _, _):
                assert key not in self.tickets
                assert key not in self.copies
                self.expect_own(command)
                self.tickets[key] = command

    def expect_own(self, command: c.Stage | c.Post) -> None:
        """Bytes only move from and to what is the request's own."""

    def check(self) -> None:
        """What holds after every event."""

    def works(self) -> list[object]:
        """On whose behalf bytes move."""
        return [key.work if isinstance(key, k.SlotKey) else key for key in (*self.copies, *self.tickets)]

    @property
    def is_idle(self) -> bool:
        return not (self.waits or self.copies or self.tickets or self.digests)

    def go_on(self) -> None:
        """Something that is under way ends, well or not."""
        under_way = [*self.waits, *self.copies, *self.tickets, *self.digests]
        if not under_way:
            return
        key, error = self.random.choice(under_way), "broken" if self.random.random() < 0.1 else ""
        if key in self.waits:
            size_bytes = self.waits.pop(key).num_bytes
            start = SLOTS + (next(self._numbers) << 32)
            self.held |= {} if error else {key: range(start, start + size_bytes)}
            self.feed(e.Acquired(key, 0 if error else start, error))
        elif key in self.copies:
            del self.copies[key]
            self.feed(e.Staged(key, error))
        elif key in self.tickets:
            del self.tickets[key]
            self.feed(e.TicketEnded(key, error))
        else:
            digest = self.digests.pop(key)
            num_values = sum(len(extract.numbers) for extract in digest.extracts)
            self.feed(e.Digested(key, () if error else (bytes(8),) * num_values, error))

    def pass_time(self) -> None:
        self.now += self.random.choice((0.01, 0.5, 3.0, 11.0))
        self.feed(e.Tick())


def as_it_arrives(message: m.Message) -> m.Message:
    """Nothing that the wire would refuse."""
    return decode(encode(message))


def bytes_of_blocks(layout: Layout, num_blocks: int, block_tokens: int) -> list[set[int]]:
    """The addresses of each block."""
    found: list[set[int]] = []
    for block in range(num_blocks):
        found.append(set())
        for placement in layout.placements:
            item_bytes = layout.state_named()[placement.state].item_bytes
            for _, _, address in oracle.element_addresses(layout, placement, ((block,),), TokenRange(0, block_tokens)):
                found[block].update(range(address, address + item_bytes))
    return found
