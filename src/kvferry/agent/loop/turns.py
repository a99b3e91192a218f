"""What the thread of an agent does, turn after turn: the engine's wishes, frames, transports, time.

Every event goes to a session, every command of a session is carried out.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.agent.config import Notice
from kvferry.agent.control.liveness import Knocks
from kvferry.agent.control.sockets import Arrival, ControlChannel
from kvferry.agent.loop.wakeup import Wake
from kvferry.agent.memory.digests import Digester
from kvferry.agent.memory.stager import Stager
from kvferry.agent.transports.carrier import Carrier
from kvferry.errors import WireError, WireVersionError
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from kvferry.wire.codec import decode, encode
from kvferry.wire.messages import Message, Reason, Refusal

BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.001
# So long, an agent sleeps at most: memory of peers that have ended is not kept for longer.
MAX_WAIT_S = 5.0
# After a turn of this length, what has been answered meanwhile is read before somebody is taken for silent.
LONG_TURN_S = 0.05
# So long, turns in which nothing comes in do nothing but let transports make progress for peers.
QUIET_S = 0.1
# A turn digests about this much: a few milliseconds.
DIGEST_BYTES = 16 << 20

_SourceEvent = e.LeaseRequest | e.LeaseProgress | e.LeaseWithdrawn
_TargetEvent = e.HoldRequest | e.FetchRequest | e.AbortRequest
_Work = c.Post | c.Cancel | c.Digest | c.DropDigest | c.CheckLiveness | c.Acquire | c.Release | c.Stage
_CommonEvent = e.PeerConnected | e.PeerUnreachable | e.TicketEnded | e.Digested | e.Acquired | e.Staged

Wish = _SourceEvent | _TargetEvent
"""What an engine wants."""


@dataclass(eq=False)
class Turns:
    """Of one agent, on its thread. Only `inbox`, from which wishes are taken, and `wake`, the bell that says that there
    are some, are used by other threads; `notify` tells the engine what comes of them. `counts` says how often what
    happened, and why. Until `quiet_until` a turn in which nothing comes only lets transports make progress."""

    source: SourceSession
    target: TargetSession
    control: ControlChannel
    carrier: Carrier
    stager: Stager
    digester: Digester
    knocks: Knocks
    wake: Wake
    notify: Callable[[Notice], None]
    inbox: queue.SimpleQueue[Wish] = field(default_factory=queue.SimpleQueue)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    quiet_until: float = 0.0

    def is_reached(self, now: float) -> bool:
        """Whether peers may be reading or writing memory of ours."""
        return self.source.may_be_read(now) or self.target.may_be_written()

    def take(self, wait_s: float) -> float:
        """Everything that is to do now; returns how long the next turn may wait for something new."""
        waited_from = time.monotonic()
        has_come = self._listen(wait_s)
        began = time.monotonic()
        if not has_come and began < self.quiet_until:
            return self._look(began)
        self._progress()
        now = time.monotonic()
        has_come = now - waited_from > LONG_TURN_S and self._listen(0.0)
        for counts in (self.control.take_counts(), self.carrier.take_counts()):
            if counts:
                self.counts.update(counts)
        now = time.monotonic()
        self._obey([*self.source.handle(e.Tick(), now), *self.target.handle(e.Tick(), now)])
        self.quiet_until = 0.0
        if has_come or self.digester.busy or self.stager.is_changed or self.carrier.is_fresh:
            return 0.0
        if self.carrier.busy or self.knocks.busy or self.stager.busy:
            # A transport that copies inside `poll` has more to copy; one that works elsewhere is asked again soon.
            return 0.0 if now - began > BUSY_POLL_S else IDLE_POLL_S
        deadline = min(self.source.next_deadline(), self.target.next_deadline(now))
        # Only for peers that use our memory: an agent that wakes for nothing takes the interpreter from its engine.
        if not self.is_reached(now):
            return max(0.0, min(deadline - now, MAX_WAIT_S))
        self.quiet_until = min(deadline, now + QUIET_S)
        return self._rest_s(now)

    def _look(self, now: float) -> float:
        """A turn in which nothing has come, unless to transports; returns like `take`."""
        if self._carried():
            self.quiet_until = 0.0
        return self._rest_s(now)

    def _carried(self) -> bool:
        """Whether transports have got on."""
        events = self.carrier.poll()
        self._feed_after_wishes(events)
        return bool(events)

    def _feed_after_wishes(self, events: Sequence[_CommonEvent]) -> None:
        """What has been copied, or digested, may come from blocks that the engine took back meanwhile, and what follows
        from its end may be that these bytes are good: so the engine is heard in between."""
        if events:
            self._take_wishes()
        for event in events:
            self._feed(event)

    def _rest_s(self, now: float) -> float:
        return max(0.0, min(self.quiet_until - now, self.carrier.progress_interval_s))

    def _listen(self, wait_s: float) -> bool:
        """Whether a message has come, or the bell was rung, which may also mean that a copy has ended: `_progress` must
        follow then.

        Whoever claims a lease has been told of it after the engine has told us, and who has read blocks after an
        engine took them back says so after the engine has: so what has come is looked at after the engine is heard.
        """
        arrivals = self.control.receive(wait_s)
        has_rung = self.wake.rang()
        self._take_wishes()
        for arrival in arrivals:
            self._arrived(arrival)
            self._move_slots()
        return has_rung or bool(arrivals)

    def _progress(self) -> None:
        """What has happened to work that takes several turns."""
        # What is gathered is posted, what is posted may be copied by the poll, what is sent makes room: in this order
        # no slot waits for the next turn.
        self._feed_after_wishes(self.stager.poll())
        self._carried()
        self._move_slots()
        self._feed_after_wishes(self.digester.run(DIGEST_BYTES))
        for peer in self.knocks.unanswered():
            self._feed_target(e.PeerGone(peer))

    def _move_slots(self) -> None:
        """Hand out the slots that are free at once: the copies that go with them run beside all that follows here."""
        while self.stager.is_changed:
            self._feed_after_wishes(self.stager.poll())

    def _take_wishes(self) -> None:
        while not self.inbox.empty():
            event = self.inbox.get()
            if isinstance(event, _SourceEvent):
                self._obey(self.source.handle(event, time.monotonic()))
            else:
                self._feed_target(event)

    def _arrived(self, arrival: Arrival) -> None:
        """Hand a frame to its session; one that does not decode is counted and answered with a refusal."""
        try:
            message = decode(arrival.frame)
        except WireError as error:
            reason = Reason.WIRE_VERSION if isinstance(error, WireVersionError) else Reason.MALFORMED
            self.counts["frames_refused", reason] += 1
            message = Refusal(reason, error.what, error.found, error.expected, "")
            if not arrival.link:
                self._obey([c.Reply(arrival.name, message)])
                return
        for peer in arrival.link:
            self._feed_target(e.AnswerArrived(peer, message))
        if not arrival.link:
            self._obey(self.source.handle(e.FrameArrived(arrival.name, message), time.monotonic()))

    def _feed(self, event: _CommonEvent) -> None:
        """News of what both sessions may have asked for: who did can be told from its name."""
        name = event.peer if isinstance(event, e.PeerConnected | e.PeerUnreachable) else event.key
        name = name.work if isinstance(name, k.SlotKey) else name
        if isinstance(name, k.PeerKey | k.ReadKey):
            self._feed_target(event)
        else:
            self._obey(self.source.handle(event, time.monotonic()))

    def _feed_target(self, event: _TargetEvent | _CommonEvent | e.AnswerArrived | e.PeerGone) -> None:
        self._obey(self.target.handle(event, time.monotonic()))

    def _obey(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Send(peer, message):
                self._sent(self.control.send(peer, encode(message)), message)
            case c.Reply(name, message):
                self._sent(self.control.reply(name, encode(message)), message)
            case c.Connect(peer, offer):
                self.carrier.connect(peer, offer)
            case c.Disconnect(peer):
                self.carrier.disconnect(peer)
                if isinstance(peer, k.PeerKey):
                    self.control.forget(peer)
                    self.knocks.forget(peer)
            case c.Count(what, reason):
                self.counts[what, reason] += 1
            case c.Fetched() | c.FetchFailed() | c.BlocksReleased() | c.LeaseEnded():
                self.notify(command)
            case _:
                self._work(command)

    def _work(self, command: _Work) -> None:
        """What takes several turns, and how it is ended early."""
        match command:
            case c.Post():
                self.carrier.post(command)
            case c.Cancel(key):
                self.carrier.cancel(key)
            case c.Digest(digest_key, extracts):
                self.digester.start(digest_key, extracts)
            case c.DropDigest(digest_key):
                self.digester.drop(digest_key)
            case c.CheckLiveness(peer):
                self.knocks.start(peer)
            case _:
                self._slot(command)

    def _slot(self, command: c.Acquire | c.Release | c.Stage) -> None:
        match command:
            case c.Acquire():
                self.stager.acquire(command)
            case c.Release(key):
                self.stager.release(key)
            case c.Stage():
                self.stager.stage(command)

    def _sent(self, queued: bool, message: Message) -> None:
        """A full queue drops the message: the session repeats what is not answered."""
        if not queued:
            self.counts["messages_dropped", type(message).__name__] += 1
