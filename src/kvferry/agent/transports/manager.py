"""The transports of one agent: which peer is reached over which, and which ticket belongs to what."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvferry.agent.memory.peer_slots import PeerSlots
from kvferry.agent.transports.negotiation import Negotiation, PeerReport, name_of
from kvferry.errors import MAX_TEXT, ConfigurationError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Post
from kvferry.session.events import PeerConnected, PeerMoved, PeerUnreachable, TicketEnded
from kvferry.session.keys import Remote, WorkKey
from kvferry.transport.base import Completion, Memory, NotifyingTransport, RevocableTransport, Ticket, Transport
from kvferry.transport.machine.finding import Severity
from kvferry.transport.registered_memory import check_number
from kvferry.transport.selection.candidates import candidates, check_own
from kvferry.transport.selection.diagnosis import LocalContext
from kvferry.wire.messages import Offer, Party, TargetOffer, TransportOffer

NOWHERE = LocalContext()
# So many peers are tested at a time, not counting those that are stuck: each takes memory for three probes, and time of
# the thread that does all else.
AT_ONCE = 24
logger = logging.getLogger(__name__)

# How often to look whether bytes move.
LOOK_S = 1.0
TransportEvent = TicketEnded | PeerConnected | PeerUnreachable | PeerMoved


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
        # This rank may still read over it.
        return _missing(name, str(error))


def _missing(name: str, reason: str) -> TransportOffer:
    """With a longer reason than a message may hold, nobody could read our offer."""
    return TransportOffer(name, b"", reason[:MAX_TEXT])


class TransportManager:
    """Only one thread uses it. `unavailable` has the reasons why known transports are missing; the self-tests of a peer
    may take `tests_s` together. `met` has a report on each connected peer, `moved_bytes` the bytes read and written."""

    def __init__(
        self,
        requested: str,
        transports: Sequence[Transport],
        unavailable: Mapping[str, str],
        tests_s: float,
        context: LocalContext = NOWHERE,
        peer_slots: PeerSlots | None = None,
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
        self._keys: dict[tuple[str, Ticket], WorkKey] = {}
        self._negotiations: list[Negotiation] = []
        self._events: list[TransportEvent] = []
        self._peer_slots = peer_slots
        self._must_poll_now = False
        # What the transport of each peer has last returned from `moved`, and when it is asked again.
        self._moved: dict[Remote, int] = {}
        self._look_at = 0.0
        self._notifying: set[str] = set()

    def notify_with(self, notify: Callable[[], None]) -> None:
        """Have `notify` called, on any thread, when a ticket of a transport that tells so has ended: it need not be
        polled any more. Before the first `connect`."""
        for name, transport in self._transports.items():
            if isinstance(transport, NotifyingTransport):
                transport.notify_with(notify)
                self._notifying.add(name)

    @property
    def busy(self) -> bool:
        """Whether a ticket or a self-test is in progress."""
        return bool(self._open or self._events or self._negotiations)

    @property
    def must_be_polled(self) -> bool:
        """Whether something is in progress of which nobody tells when it has ended."""
        are_open = any(each.transport.name not in self._notifying for each in self._open.values())
        return are_open or bool(self._events or self._negotiations)

    @property
    def must_poll_now(self) -> bool:
        """Whether `poll` may have something to copy at once: a ticket was posted since, or one of several has ended."""
        return self._must_poll_now

    @property
    def num_open(self) -> int:
        """Tickets that have been posted and have not ended. May be read from any thread."""
        return len(self._open)

    @property
    def progress_interval_s(self) -> float:
        """How often `poll` must run although nothing is posted here."""
        return min((transport.progress_interval_s for transport in self._transports.values()), default=float("inf"))

    def register(self, memories: Sequence[Memory]) -> None:
        """Register what peers reach with every transport; one that cannot take it becomes unavailable, with the
        reason."""
        for name, transport in list(self._transports.items()):
            try:
                check_number(len(memories))
                for memory in memories:
                    transport.register(memory)
            except TransportError as error:
                self._unavailable[name] = str(error)
                del self._transports[name]
                transport.close()

    def check_requested(self) -> None:
        """Raises ConfigurationError when the transport that the user asked for is unknown or cannot be used here."""
        check_own(self._requested, self._available())

    @property
    def revocable(self) -> frozenset[str]:
        """The names of the transports by which access is given to one source alone, and taken from it."""
        transports = self._transports.items()
        return frozenset(name for name, transport in transports if isinstance(transport, RevocableTransport))

    def offers(self) -> tuple[TransportOffer, ...]:
        """What peers need to reach the registered memory, and the reasons why other transports are missing."""
        offers = [_offer(name, transport) for name, transport in self._transports.items()]
        return (*offers, *(_missing(name, reason) for name, reason in self._unavailable.items()))

    def with_access(self, offers: Sequence[TransportOffer], source: Party) -> tuple[TransportOffer, ...]:
        """These offers with access of the source's own, where there is such a thing. Their memory is what was
        registered then: nobody else's scratch memory is in it."""
        return tuple(self._with_access(offer, source) for offer in offers)

    def _with_access(self, offer: TransportOffer, source: Party) -> TransportOffer:
        transport = self._transports.get(offer.name)
        if not offer.descriptor or not isinstance(transport, RevocableTransport):
            return offer
        return TransportOffer(offer.name, transport.descriptor_for(str(source), offer.descriptor), "")

    def revoke(self, source: Party) -> None:
        """Take the access that was a source's own: nothing that it has written by it arrives any more."""
        for transport in self._transports.values():
            if isinstance(transport, RevocableTransport):
                transport.revoke(str(source))

    def connect(self, peer: Remote, offer: Offer | TargetOffer) -> None:
        """Find out which transport reaches a peer fastest; the outcome comes out of a later `poll`."""
        offered = {each.name: each.unavailable for each in offer.transports}
        try:
            names = candidates(self._requested, offered, self._available())
        except ConfigurationError as error:
            self._events.append(PeerUnreachable(peer, str(error)))
            return
        transports = [self._transports[name] for name in names]
        if isinstance(offer, TargetOffer) and self._peer_slots is not None:
            self._peer_slots.attach(peer, offer.staging)
        negotiation = Negotiation(peer, offer, transports, self._tests_s, time.monotonic(), self._context)
        self._negotiations.append(negotiation)

    def disconnect(self, peer: Remote) -> None:
        """Disconnect a peer; its open tickets end with an error in a later `poll`."""
        self._routes.pop(peer, None)
        self.met.pop(peer, None)
        if self._peer_slots is not None:
            self._peer_slots.detach(peer)
        for negotiation in self._negotiations:
            if negotiation.peer == peer:
                negotiation.abandon()
        for transport in self._transports.values():
            transport.disconnect(name_of(peer))

    def post(self, post: Post) -> None:
        """Start a ticket; its end comes out of `poll`, also when it could not be started."""
        self._must_poll_now = True
        key, transport = post.key, self._routes.get(post.key.remote)
        if transport is None:
            self._events.append(TicketEnded(key, "the peer is not connected any more"))
            return
        try:
            ticket = transport.post(name_of(key.remote), post.copies, post.direction)
            self._open[key] = _Open(transport, ticket, post.direction, post.copies.num_bytes)
            self._keys[transport.name, ticket] = key
        except TransportError as error:
            self._events.append(TicketEnded(key, str(error)))

    def cancel(self, key: WorkKey) -> None:
        """Cancel a ticket; its end still comes out of `poll`."""
        if posted := self._open.get(key):
            posted.transport.cancel(posted.ticket)

    def poll(self) -> list[TransportEvent]:
        """Make progress on every transport; returns the tickets that have ended and the outcomes of `connect`."""
        events, self._events, self._must_poll_now = self._events, [], False
        completions = {name: transport.poll() for name, transport in self._transports.items()}
        for name, completed in completions.items():
            for completion in completed:
                if key := self._keys.pop((name, completion.ticket), None):
                    ended = self._open.pop(key)
                    self.moved_bytes[ended.direction] += 0 if completion.error else ended.num_bytes
                    events.append(TicketEnded(key, completion.error))
        events += self._advance(completions)
        events += self._look_for_progress(time.monotonic())
        self._must_poll_now = bool(self._open) and any(completions.values())
        self._must_poll_now |= any(negotiation.must_poll_now for negotiation in self._negotiations)
        return events

    def _advance(self, completions: Mapping[str, Sequence[Completion]]) -> Iterator[TransportEvent]:
        for negotiation in (current := self._current(time.monotonic())):
            # One copy at a time: work for one peer would count as time of another peer's self-test.
            now = time.monotonic()
            others = (other for other in current if other is not negotiation)
            may_post = not negotiation.may_wait(now) or not any(other.is_copying(now) for other in others)
            for outcome in negotiation.advance(completions, now, may_post):
                for transport in negotiation.chosen:
                    self._routes[negotiation.peer] = transport
                for met in negotiation.met:
                    self._record(met)
                yield self._with_reach(outcome)
        self._negotiations = [negotiation for negotiation in self._negotiations if not negotiation.is_settled]

    def _look_for_progress(self, now: float) -> Iterator[PeerMoved]:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        moved = {key.remote: posted.transport.moved(name_of(key.remote)) for key, posted in self._open.items()}
        before, self._moved = self._moved, moved
        yield from (PeerMoved(peer) for peer, number in moved.items() if number > before.get(peer, number))

    def _current(self, now: float) -> list[Negotiation]:
        """The negotiations to advance now: the oldest begin first, and none waits for a peer that is stuck."""
        current = [negotiation for negotiation in self._negotiations if negotiation.has_begun]
        num_free = AT_ONCE - sum(not negotiation.is_hung(now) for negotiation in current)
        waiting = (negotiation for negotiation in self._negotiations if not negotiation.has_begun)
        return [*current, *islice(waiting, max(num_free, 0))]

    def _with_reach(self, outcome: TransportEvent) -> TransportEvent:
        if self._peer_slots is None or not isinstance(outcome, PeerConnected):
            return outcome
        return replace(outcome, reaches_staging=self._peer_slots.reaches(outcome.peer))

    def _record(self, met: PeerReport) -> None:
        """Keep the report on a peer; log and count its findings."""
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
