"""The transports of one agent: which peer is reached over which, and which ticket belongs to what."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.agent.memory.peer_slots import FarSlots
from kvferry.agent.transports.negotiation import Meeting, PeerReport, name_of
from kvferry.errors import ConfigurationError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Post
from kvferry.session.events import PeerConnected, PeerUnreachable, TicketEnded
from kvferry.session.keys import Remote, WorkKey
from kvferry.transport.base import Completion, Memory, Ticket, Transport
from kvferry.transport.machine.finding import Severity
from kvferry.transport.selection.candidates import candidates
from kvferry.transport.selection.local_context import LocalContext
from kvferry.wire.messages import Offer, TargetOffer, TransportOffer

NOWHERE = LocalContext()
logger = logging.getLogger(__name__)

CarrierEvent = TicketEnded | PeerConnected | PeerUnreachable


@dataclass(frozen=True, slots=True)
class _Open:
    transport: Transport
    ticket: Ticket
    direction: Direction
    num_bytes: int


def _offer(name: str, transport: Transport) -> TransportOffer:
    try:
        return TransportOffer(name, transport.descriptor(), "")
    except TransportError as error:
        # It may still fetch for us.
        return TransportOffer(name, b"", str(error))


class Carrier:
    """Belongs to one thread. `unavailable` says why a transport that users know is not there; all tests of a peer's
    transports together may take `tests_s`. `met` says how each connected peer is reached, `moved_bytes` how much was
    read and written."""

    def __init__(
        self,
        requested: str,
        transports: Sequence[Transport],
        unavailable: Mapping[str, str],
        tests_s: float,
        context: LocalContext = NOWHERE,
        far: FarSlots | None = None,
    ) -> None:
        self.met: dict[Remote, PeerReport] = {}
        self.moved_bytes = dict.fromkeys(Direction, 0)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._context = context
        self._requested = requested
        self._tests_s = tests_s
        self._transports = {transport.name: transport for transport in transports}
        self._unavailable = dict(unavailable)
        self._routes: dict[Remote, Transport] = {}
        self._open: dict[WorkKey, _Open] = {}
        self._meetings: list[Meeting] = []
        self._events: list[CarrierEvent] = []
        self._far = far
        self._is_fresh = False

    @property
    def busy(self) -> bool:
        """Whether a ticket or a self-test is under way."""
        return bool(self._open or self._events or self._meetings)

    @property
    def is_fresh(self) -> bool:
        """Whether `poll` may have something to copy at once: a ticket was posted since, or has ended and others have
        not."""
        return self._is_fresh

    @property
    def num_open(self) -> int:
        """Tickets that have been posted and have not ended. May be asked from any thread."""
        return len(self._open)

    @property
    def progress_interval_s(self) -> float:
        """How often `poll` must run although nothing is posted here."""
        return min((transport.progress_interval_s for transport in self._transports.values()), default=float("inf"))

    def register(self, memories: Sequence[Memory]) -> None:
        """Register memory with every transport; one that cannot take it becomes unavailable, with the reason."""
        for name, transport in list(self._transports.items()):
            try:
                for memory in memories:
                    transport.register(memory)
            except TransportError as error:
                self._unavailable[name] = str(error)
                del self._transports[name]
                transport.close()

    def check_requested(self) -> None:
        """Raises ConfigurationError when the transport that the user asked for is unknown or cannot be used here."""
        candidates(self._requested, dict.fromkeys(self._transports, ""), self._available())

    def offers(self) -> tuple[TransportOffer, ...]:
        """What peers need to reach the registered memory, and why the other transports are not there."""
        ours = [_offer(name, transport) for name, transport in self._transports.items()]
        missing = [TransportOffer(name, b"", reason) for name, reason in self._unavailable.items()]
        return (*ours, *missing)

    def connect(self, peer: Remote, offer: Offer | TargetOffer) -> None:
        """Find out which transport reaches a peer fastest; the outcome comes out of a later `poll`."""
        offered = {each.name: each.unavailable for each in offer.transports}
        try:
            names = candidates(self._requested, offered, self._available())
        except ConfigurationError as error:
            self._events.append(PeerUnreachable(peer, str(error)))
            return
        transports = [self._transports[name] for name in names]
        if isinstance(offer, TargetOffer) and self._far is not None:
            self._far.attach(peer, offer.staging)
        self._meetings.append(Meeting(peer, offer, transports, self._tests_s, self._context))

    def disconnect(self, peer: Remote) -> None:
        """Forget a peer; its open tickets end with an error in a later `poll`."""
        self._routes.pop(peer, None)
        self.met.pop(peer, None)
        if self._far is not None:
            self._far.detach(peer)
        for meeting in self._meetings:
            if meeting.peer == peer:
                meeting.abandon()
        for transport in self._transports.values():
            transport.disconnect(name_of(peer))

    def post(self, post: Post) -> None:
        """Start a ticket; its end comes out of `poll`, also when it could not be started."""
        self._is_fresh = True
        key, transport = post.key, self._routes.get(post.key.remote)
        if transport is None:
            self._events.append(TicketEnded(key, "the peer is not connected any more"))
            return
        try:
            ticket = transport.post(name_of(key.remote), post.copies, post.direction)
            self._open[key] = _Open(transport, ticket, post.direction, post.copies.num_bytes)
        except TransportError as error:
            self._events.append(TicketEnded(key, str(error)))

    def cancel(self, key: WorkKey) -> None:
        """Lose interest in a ticket; its end still comes out of `poll`."""
        if posted := self._open.get(key):
            posted.transport.cancel(posted.ticket)

    def poll(self) -> list[CarrierEvent]:
        """Make progress on every transport; returns the tickets that have ended and the outcomes of `connect`."""
        events, self._events, self._is_fresh = self._events, [], False
        completions = {name: transport.poll() for name, transport in self._transports.items()}
        keys = {(posted.transport.name, posted.ticket): key for key, posted in self._open.items()}
        for name, completed in completions.items():
            for completion in completed:
                key = keys.get((name, completion.ticket))
                if key is not None:
                    ended = self._open.pop(key)
                    self.moved_bytes[ended.direction] += 0 if completion.error else ended.num_bytes
                    events.append(TicketEnded(key, completion.error))
        events += self._meet(completions)
        self._is_fresh = bool(self._open) and any(completions.values())
        self._is_fresh |= any(meeting.is_fresh for meeting in self._meetings)
        return events

    def _meet(self, completions: Mapping[str, Sequence[Completion]]) -> Iterator[CarrierEvent]:
        for meeting in self._meetings:
            # One copy at a time: what is done for one peer would count as the time of another one's.
            now = time.monotonic()
            others = (other for other in self._meetings if other is not meeting)
            may_post = not meeting.may_wait or not any(other.is_copying(now) for other in others)
            for outcome in meeting.advance(completions, now, may_post):
                for transport in meeting.chosen:
                    self._routes[meeting.peer] = transport
                for met in meeting.met:
                    self._take_note(met)
                yield self._with_reach(outcome)
        self._meetings = [meeting for meeting in self._meetings if not meeting.is_settled]

    def _with_reach(self, outcome: CarrierEvent) -> CarrierEvent:
        if self._far is None or not isinstance(outcome, PeerConnected):
            return outcome
        return replace(outcome, reaches_staging=self._far.reaches(outcome.peer))

    def _take_note(self, met: PeerReport) -> None:
        """Keep what was found about a peer. What is wrong is said at once, by log and by counter."""
        self.met[met.peer] = met
        for finding in met.findings:
            if finding.severity is Severity.NOTE:
                logger.info("%s: %s", met.peer, finding)
                continue
            self._counts["transport_warnings", met.transport] += 1
            logger.warning("%s: %s", met.peer, finding)

    def take_counts(self) -> Mapping[tuple[str, str], int]:
        """Warnings about transports since the last time: (`transport_warnings`, transport)."""
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return counts

    def _available(self) -> dict[str, str]:
        return dict.fromkeys(self._transports, "") | self._unavailable

    def close(self) -> None:
        """Close every transport. Safe to call twice."""
        for transport in self._transports.values():
            transport.close()
