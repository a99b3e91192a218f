"""Who uses staging memory at the same time: the stages of one read, and peers that all want more than there is."""

from __future__ import annotations

import threading
from math import inf

import pytest
from agent_support import (
    BYTES_PER_TOKEN,
    NUM_TOKENS,
    SOURCE,
    TARGET,
    check,
    leased,
    moved,
    until,
    until_slots_are_free,
    wire_only,
)
from faulty_transport import GatedTransport

from kvferry.agent.cache import host_mover
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Fetched
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.reads.slot_pipeline import WINDOW
from kvferry.session.timing import Timing

DEADLINE_S = 30.0
# Six slots per request.
STAGING = StagingPolicy((Strategy.PACK,), 5 * BYTES_PER_TOKEN)


class Turnstile:
    """Lets everybody through, until it is told how many. Then the next one stands before it, and that can be seen."""

    def __init__(self) -> None:
        self._left = inf
        self._reached = threading.Event()

    def allow(self, num: float) -> None:
        self._left = num

    def is_shut(self) -> bool:
        """Asked by the agent's thread, once per copy or ticket."""
        if self._left > 0:
            self._left -= 1
            return False
        self._reached.set()
        return True

    def wait_until_reached(self) -> None:
        assert self._reached.wait(DEADLINE_S)


class GatedMover:
    """Passes everything on to `inner`, when the turnstile lets it. What it gathers goes over the wire."""

    notifies = reaches_peer_memory = False

    def __init__(self, inner, turnstile) -> None:
        self._inner = inner
        self._turnstile = turnstile
        self._waiting = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._inner.busy

    def start(self, key, tiles, far=None) -> None:
        self._waiting.append((key, tiles))
        self._let_in()

    def poll(self):
        self._let_in()
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()

    def _let_in(self) -> None:
        while self._waiting and not self._turnstile.is_shut():
            self._inner.start(*self._waiting.pop(0))


class Recording(GatedTransport):
    """Notes whom each ticket is for."""

    def __init__(self, inner, turnstile) -> None:
        super().__init__(inner, turnstile.is_shut)
        self.posts = []

    def post(self, peer, copies, direction):
        self.posts.append(peer)
        return super().post(peer, copies, direction)


def behind(turnstile):
    """What makes a mover behind it."""
    return lambda near, notify: GatedMover(host_mover(near, notify), turnstile)


def test_while_one_slot_is_gathered_another_is_on_the_wire_and_a_third_is_scattered(make_rank):
    gather, wire, scatter = Turnstile(), Turnstile(), Turnstile()

    def wrap(transport):
        return GatedTransport(transport, wire.is_shut)

    source = make_rank("p0", SOURCE, wrap=wrap, mover=behind(gather), staging=STAGING)
    target = make_rank("d0", TARGET, mover=behind(scatter), staging=STAGING)
    moved(source, target)
    for turnstile, num_done in ((gather, 2), (wire, 1), (scatter, 0)):
        turnstile.allow(num_done)
    target.fetch(source, leased(source, "r2"), "q2")
    for turnstile in (gather, wire, scatter):
        turnstile.wait_until_reached()
    for turnstile in (gather, wire, scatter):
        turnstile.allow(inf)
    assert target.next_notice(Fetched).report.num_bytes == NUM_TOKENS * BYTES_PER_TOKEN
    check(target)


def test_who_wants_little_is_served_in_turn_with_those_who_want_far_more_than_there_is(make_rank):
    """Room for two slots at the source. Two targets want 120 of them each, then a third one wants six."""
    wire, recorded = Turnstile(), []

    def wrap(transport):
        recorded.append(Recording(transport, wire))
        return recorded[-1]

    source = make_rank("p0", SOURCE, wrap=wrap, mover=wire_only, staging_bytes=4 << 12, staging=STAGING)
    greedy, other, modest = (make_rank(name, TARGET, staging=STAGING) for name in ("greedy", "other", "modest"))
    names = []
    for target in (greedy, other, modest):
        target.fetch(source, leased(source, f"to meet {id(target)}"))
        target.next_notice(Fetched)
        names.append(recorded[0].posts[-1])
    posts = recorded[0].posts
    posts.clear()
    wire.allow(0)
    for number in range(20):
        for target in (greedy, other):
            reference = leased(source, f"{number} of {id(target)}")
            target.fetch(source, reference, f"q{number}")
    until(lambda: source.agent.num_slots == 40 * WINDOW)
    # One has no more than half of them, however early it came.
    until(lambda: sorted(posts) == sorted(names[:2]))
    modest.fetch(source, leased(source, "modest"), "modest")
    until(lambda: source.agent.num_slots == 41 * WINDOW)
    wire.allow(inf)
    modest.next_notice(Fetched)
    for target in [greedy, other] * 20:
        target.next_notice(Fetched)
    # Whoever gives its slot back first: two were before it in line.
    assert names[2] in posts[2:5]
    until_slots_are_free(source, greedy, other, modest)


class LateMover:
    """Its copies end right after it was asked whether they have, so that only its notification can tell."""

    reaches_peer_memory = True

    def __init__(self, memories, notify):
        self._has_ended = threading.Event()
        self._inner, self._notify = host_mover(memories, self._has_ended.set), notify
        self._told = False

    def start(self, key, tiles, far=None):
        self._told = False
        self._inner.start(key, tiles, far)

    def poll(self):
        if not self._inner.busy or self._told:
            return self._inner.poll()
        assert self._has_ended.wait(DEADLINE_S)
        self._has_ended.clear()
        self._told = True
        self._notify()
        return []

    @property
    def busy(self):
        return self._inner.busy

    @property
    def notifies(self):
        return True

    def close(self):
        self._inner.close()


@pytest.mark.parametrize("long_turn_s", [-1.0, 1000.0])
def test_a_copy_that_ends_when_nobody_looks_is_heard_of_by_its_bell(make_rank, monkeypatch, long_turn_s):
    """Whether that is at the end of a turn or at the beginning of a quiet one. Without it the next look would be at the
    next heartbeat."""
    monkeypatch.setattr("kvferry.agent.loop.event_loop.LONG_ITERATION_S", long_turn_s)
    monkeypatch.setattr("kvferry.agent.loop.event_loop.QUIET_S", 1000.0)
    timing = Timing(lease_s=1000.0, heartbeat_s=300.0, resend_s=300.0, handshake_s=25.0, transfer_s=1000.0)
    source = make_rank("p0", SOURCE, timing=timing, mover=LateMover)
    one_slot = StagingPolicy((Strategy.PACK,), 1 << 20)
    target = make_rank("d0", TARGET, timing=timing, mover=LateMover, staging=one_slot)
    moved(source, target)
