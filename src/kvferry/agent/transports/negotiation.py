"""Choose a transport to one peer: connect each one that both sides have, run its self-test, keep the fastest."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.agent.transports.costs import costs_of
from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.session.events import PeerConnected, PeerUnreachable
from kvferry.session.keys import PeerKey, Remote
from kvferry.transport.base import Completion, Transport
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding
from kvferry.transport.selection.awake_timeout import AwakeTimeout
from kvferry.transport.selection.candidates import choose, is_worth_testing
from kvferry.transport.selection.diagnosis import LocalContext, diagnose, is_far_slower
from kvferry.transport.selection.self_test import Measurement, Probe, SelfTest
from kvferry.wire.messages import Offer, TargetOffer

MAX_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class PeerReport:
    """How a peer is reached: all measurements, the transport that was chosen, and findings about it.

    `choice` says why that one; `direction` is the one in which this process moves bytes.
    """

    peer: Remote
    place: Place
    direction: Direction
    transport: str
    measurements: tuple[Measurement, ...]
    findings: tuple[Finding, ...]
    choice: str

    @property
    def label(self) -> str:
        """The peer in metrics; without its epoch, since dashboards outlive a restart."""
        peer = self.peer
        where = f"at {peer.address}" if isinstance(peer, PeerKey) else f"rank {peer.rank}"
        return f"{peer.engine_id} {where}"


def name_of(peer: Remote) -> str:
    """The name of a peer for transports. An engine that this rank both reads and writes has two."""
    return f"source {peer}" if isinstance(peer, PeerKey) else f"target {peer}"


class Negotiation:
    """The self-tests of the transports to one peer: one after the other, so that they do not disturb each other, and
    only those that can still be the best.

    `chosen` and `met` are empty until the choice is made. A ticket that is still open after that keeps the
    negotiation unsettled: the scratch memory of its test may still be written to.
    """

    def __init__(
        self,
        peer: Remote,
        offer: Offer | TargetOffer,
        transports: Sequence[Transport],
        tests_s: float,
        now: float,
        context: LocalContext,
    ) -> None:
        """All tests together may take `tests_s`; time that one does not need is left for the others. `now` is in
        seconds of any clock."""
        self.peer = peer
        self.chosen: tuple[Transport, ...] = ()
        self.met: tuple[PeerReport, ...] = ()
        self._context = context
        self._place = context.place_of(offer.probe.host)
        # A rank that gets the offer of a target writes to it.
        self._direction = Direction.WRITE if isinstance(offer, TargetOffer) else Direction.READ
        probe = offer.probe
        self._probe = Probe(probe.address, probe.size_bytes, probe.seed, probe.num_marks)
        self._descriptors = {each.name: each.descriptor for each in offer.transports}
        self._transports = tuple(transports)
        self._waiting = deque(transports)
        self._tests: list[tuple[str, SelfTest]] = []
        self._unconnected: list[Measurement] = []
        self._untested: list[str] = []
        self._is_over = False
        self._tests_s = tests_s
        self._asked_at = now
        # Empty before the first test.
        self._timeouts: list[AwakeTimeout] = []

    @property
    def is_settled(self) -> bool:
        """Whether there is an outcome and no test has an open ticket."""
        return self._is_over and all(test.is_settled for _, test in self._tests)

    def abandon(self) -> None:
        """Give up: only open tickets are waited for."""
        self._waiting.clear()
        self._is_over = True
        for _, test in self._tests:
            test.abandon()

    @property
    def has_begun(self) -> bool:
        """Whether a transport has been tried, or none ever will be."""
        return self._is_over or bool(self._tests or self._unconnected or self._untested)

    def may_wait(self, now: float) -> bool:
        """Whether there is time to let copies of other negotiations go first. Not for long: with many peers at once, or
        silent ones, figures that are too low are better than none."""
        return now - self._asked_at < min(MAX_WAIT_S, self._tests_s / 4)

    def is_hung(self, now: float) -> bool:
        """Whether a copy takes longer than any should."""
        return any(test.is_hung(now) for _, test in self._tests)

    def is_copying(self, now: float) -> bool:
        """Whether a copy is in progress that other work would slow down."""
        return any(test.is_copying(now) for _, test in self._tests)

    def advance(
        self, completions: Mapping[str, Sequence[Completion]], now: float, may_post: bool
    ) -> tuple[PeerConnected | PeerUnreachable, ...]:
        """Process completions, by transport name; returns the outcome once, when it is known."""
        for timeout in self._timeouts:
            timeout.advance(now)
        for name, test in self._tests:
            test.advance(completions.get(name, ()), now, may_post=may_post)
        while self._waiting and not self._is_testing:
            self._start(self._waiting.popleft(), now)
        if self._is_testing or self._is_over:
            return ()
        self._is_over = True
        return (self._outcome(),)

    @property
    def must_poll_now(self) -> bool:
        """Whether a sleep before the next poll would make a copy look slow."""
        return any(test.must_poll_now for _, test in self._tests)

    @property
    def _is_testing(self) -> bool:
        return any(test.result is None for _, test in self._tests)

    @property
    def _measured(self) -> list[Measurement]:
        return [test.result for _, test in self._tests if test.result is not None]

    def _start(self, transport: Transport, now: float) -> None:
        if not is_worth_testing(transport.copies_once, self._measured, self._direction):
            self._untested.append(transport.name)
            return
        try:
            transport.connect(name_of(self.peer), self._descriptors[transport.name])
        except TransportError as error:
            self._unconnected.append(Measurement.failed(transport.name, str(error)))
            return
        self._timeouts = self._timeouts or [AwakeTimeout(self._tests_s, now)]
        share_s = self._timeouts[0].left_s / (1 + len(self._waiting))
        test = SelfTest(transport, name_of(self.peer), self._probe, max(share_s, 0.0))
        self._tests.append((transport.name, test))
        test.start(now)

    def _outcome(self) -> PeerConnected | PeerUnreachable:
        try:
            choice = choose([*self._measured, *self._unconnected], self._untested, self._direction)
        except TransportError as error:
            return PeerUnreachable(self.peer, str(error))
        self.chosen = tuple(each for each in self._transports if each.name == choice.name)
        for transport in self._transports:
            if transport not in self.chosen:
                transport.disconnect(name_of(self.peer))
        (measured,) = [each for each in self._measured if each.name == choice.name]
        findings = diagnose(measured, self._direction, self._place, self._context)
        everything = (*self._measured, *self._unconnected)
        self.met = (
            PeerReport(self.peer, self._place, self._direction, choice.name, everything, findings, choice.reason),
        )
        is_slow = is_far_slower(measured, self._direction)
        # Where the source will write instead, the writes of this rank are the best estimate of its cost.
        is_written = is_slow and self._context.may_switch_direction
        costs = costs_of(
            measured, self._place, Direction.WRITE if is_written else self._direction, self._context.buffer_device
        )
        return PeerConnected(self.peer, choice.name, choice.reason, costs, is_slow)
