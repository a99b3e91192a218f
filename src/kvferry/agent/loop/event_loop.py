"""The loop of an agent's thread. Each iteration handles requests of the engine, frames, transports and timeouts.

Every event is handed to a session, and every command of a session is executed.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from kvferry.agent.config import Notice
from kvferry.agent.control.channel import ControlChannel, ReceivedFrame
from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.agent.loop.wakeup import Wakeup
from kvferry.agent.memory.digests import Digester
from kvferry.agent.memory.staging_slots import StagingSlots
from kvferry.agent.transports.manager import TransportManager
from kvferry.errors import WireError, WireVersionError
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from kvferry.wire.codec import MAX_REQUEST_BYTES, decode, encode
from kvferry.wire.messages import Claim, Message, Reason, Refusal, TargetOffer

BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.001
# An agent sleeps this long at most, so that memory of peers that have ended is unmapped in time.
MAX_WAIT_S = 5.0
# After an iteration of this length, waiting frames are read before any peer is taken for silent.
LONG_ITERATION_S = 0.05
# After an iteration without any work, the next ones only poll transports for this long, as nothing else can be due.
QUIET_S = 0.1
# One iteration digests about this much: a few milliseconds.
DIGEST_BYTES = 16 << 20

_SourceEvent = e.LeaseRequest | e.LeaseProgress | e.LeaseWithdrawn | e.RanksKnown
_TargetEvent = e.LocateRequest | e.HoldRequest | e.FetchRequest | e.AbortRequest
_Work = c.Post | c.Cancel | c.Digest | c.DropDigest | c.CheckLiveness | c.Revoke | c.Acquire | c.Release | c.Stage
_PeerEvent = e.AnswerArrived | e.PeerGone | e.HostSilent | e.HandshakeRefused
_AboutPeer = e.PeerConnected | e.PeerUnreachable | e.PeerMoved
_CommonEvent = _AboutPeer | e.TicketEnded | e.Digested | e.Acquired | e.Staged

EngineRequest = _SourceEvent | _TargetEvent
"""A call of the engine, on its way to the agent's thread."""


@dataclass(eq=False)
class EventLoop:
    """The event loop of one agent. Other threads use only `inbox`, the queue of the engine's requests, and `wakeup`.
    `notify` tells the engine the outcomes, `counts` has the number of events by kind and reason. Until `quiet_until`,
    iterations without input only poll transports."""

    source: SourceSession
    target: TargetSession
    control: ControlChannel
    transports: TransportManager
    staging: StagingSlots
    digester: Digester
    liveness: LivenessProbes
    wakeup: Wakeup
    notify: Callable[[Notice], None]
    inbox: queue.SimpleQueue[EngineRequest] = field(default_factory=queue.SimpleQueue)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    quiet_until: float = 0.0

    def is_reached(self, now: float) -> bool:
        """Whether peers may be reading or writing memory of this process."""
        return self.source.may_be_read(now) or self.target.may_be_written()

    def run_once(self, wait_s: float) -> float:
        """Do all work that is due; returns how long the next iteration may wait for input."""
        waiting_since = time.monotonic()
        has_input = self._receive(wait_s)
        began = time.monotonic()
        if not has_input and began < self.quiet_until:
            return self._poll_only(began)
        self._progress()
        now = time.monotonic()
        has_input = now - waiting_since > LONG_ITERATION_S and self._receive(0.0)
        for counts in (self.control.take_counts(), self.transports.take_counts()):
            if counts:
                self.counts.update(counts)
        now = time.monotonic()
        self._execute([*self.source.handle(e.Tick(), now), *self.target.handle(e.Tick(), now)])
        self.quiet_until = 0.0
        if has_input or self.digester.busy or self.staging.is_changed or self.transports.must_poll_now:
            return 0.0
        if self.transports.must_be_polled or self.liveness.busy or self.staging.busy:
            # A transport that copies inside `poll` has more to copy; one that copies elsewhere is polled again soon.
            return 0.0 if now - began > BUSY_POLL_S else IDLE_POLL_S
        deadline = min(self.source.next_deadline(), self.target.next_deadline(now))
        # Frequent polls serve only peers that use our memory, and the look whether bytes of open tickets move: a
        # needless one takes the interpreter from the engine.
        if not (self.transports.busy or self.is_reached(now)):
            return max(0.0, min(deadline - now, MAX_WAIT_S))
        self.quiet_until = min(deadline, now + QUIET_S)
        return self._idle_s(now)

    def _poll_only(self, now: float) -> float:
        """An iteration without input that only polls transports; returns like `run_once`."""
        if self._poll_transports():
            self.quiet_until = 0.0
        return self._idle_s(now)

    def _poll_transports(self) -> bool:
        """Whether polling transports has brought any event."""
        events = self.transports.poll()
        self._feed_after_requests(events)
        return bool(events)

    def _feed_after_requests(self, events: Sequence[_CommonEvent]) -> None:
        """Copied or digested bytes may come from blocks that the engine has taken back meanwhile, and a session may
        take them for valid when it hears that the copy has ended. So the engine's requests are processed first."""
        if events:
            self._take_requests()
        for event in events:
            self._feed(event)

    def _idle_s(self, now: float) -> float:
        return max(0.0, min(self.quiet_until - now, self.transports.progress_interval_s))

    def _receive(self, wait_s: float) -> bool:
        """Whether there was a frame or a wake-up. A wake-up may also mean that a copy has ended: `_progress` must
        follow.

        A peer learns of a lease after the engine has requested it, and says that it has read blocks after the engine
        may have taken them back. So frames are processed after the engine's requests.
        """
        frames = self.control.receive(wait_s)
        is_woken = self.wakeup.consume()
        self._take_requests()
        for frame in frames:
            self._handle_frame(frame)
            self._move_slots()
        return is_woken or bool(frames)

    def _progress(self) -> None:
        """Make progress with work that takes several iterations."""
        # Gathered slots are posted, a poll may copy posted ones, and sent ones become free: in this order no slot waits
        # for the next iteration.
        self._feed_after_requests(self.staging.poll())
        self._poll_transports()
        self._move_slots()
        self._feed_after_requests(self.digester.run(DIGEST_BYTES))
        for peer in self.liveness.refused_peers():
            self._feed_target(e.PeerGone(peer))
        for peer in self.liveness.silent_peers():
            self._feed_target(e.HostSilent(peer))
        for peer in self.control.refused_by():
            self._feed_target(e.HandshakeRefused(peer))

    def _move_slots(self) -> None:
        """Grant free slots at once: their copies then run in parallel to the rest of the iteration."""
        while self.staging.is_changed:
            self._feed_after_requests(self.staging.poll())

    def _take_requests(self) -> None:
        while not self.inbox.empty():
            event = self.inbox.get()
            if isinstance(event, _SourceEvent):
                self._execute(self.source.handle(event, time.monotonic()))
            else:
                self._feed_target(event)

    def _handle_frame(self, received: ReceivedFrame) -> None:
        """Hand a frame to its session; an invalid one is counted and answered with a refusal."""
        try:
            message = decode(received.frame)
        except WireError as error:
            reason = Reason.WIRE_VERSION if isinstance(error, WireVersionError) else Reason.MALFORMED
            self.counts["frames_refused", reason] += 1
            message = Refusal(reason, error.what, error.found, error.expected, "")
            if not received.source:
                self._execute([c.Reply(received.routing_id, message)])
                return
        for peer in received.source:
            # Whoever speaks is there, whatever became of attempts to connect.
            self.liveness.forget(peer)
            self._feed_target(e.AnswerArrived(peer, message))
        if not received.source:
            self._execute(self.source.handle(e.FrameArrived(received.routing_id, message), time.monotonic()))

    def _feed(self, event: _CommonEvent) -> None:
        """Hand an event to the session that has asked for it: its key says which one."""
        name = event.peer if isinstance(event, _AboutPeer) else event.key
        name = name.work if isinstance(name, k.SlotKey) else name
        if isinstance(name, k.PeerKey | k.ReadKey):
            self._feed_target(event)
        else:
            self._execute(self.source.handle(event, time.monotonic()))

    def _feed_target(self, event: _TargetEvent | _CommonEvent | _PeerEvent) -> None:
        self._execute(self.target.handle(event, time.monotonic()))

    def _execute(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            self._execute_one(command)

    def _execute_one(self, command: c.Command) -> None:
        match command:
            case c.Send():
                self._send(command)
            case c.Reply(name, message):
                self._sent(self.control.reply(name, encode(message)), message)
            case c.Connect(peer, offer):
                self.transports.connect(peer, offer)
            case c.Disconnect(peer):
                self.transports.disconnect(peer)
                if isinstance(peer, k.PeerKey):
                    self.control.forget(peer)
                    self.liveness.forget(peer)
            case c.Count(what, reason):
                self.counts[what, reason] += 1
            case c.Fetched() | c.FetchFailed() | c.BlocksReleased() | c.LeaseEnded() | c.Located() | c.LocateFailed():
                self.notify(command)
            case _:
                self._start_work(command)

    def _start_work(self, command: _Work) -> None:
        """Start work that takes several iterations, or end it early."""
        match command:
            case c.Post():
                self.transports.post(command)
            case c.Cancel(key):
                self.transports.cancel(key)
            case c.Digest(digest_key, extracts):
                self.digester.start(digest_key, extracts)
            case c.DropDigest(digest_key):
                self.digester.drop(digest_key)
            case c.CheckLiveness(peer):
                self.liveness.start(peer)
            case c.Revoke(source):
                self.transports.revoke(source)
            case _:
                self._slot(command)

    def _slot(self, command: c.Acquire | c.Release | c.Stage) -> None:
        match command:
            case c.Acquire():
                self.staging.acquire(command)
            case c.Release(key):
                self.staging.release(key)
            case c.Stage():
                self.staging.stage(command)

    def _send(self, command: c.Send) -> None:
        peer, message = command.peer, self._with_access(command)
        if command.is_anew:
            self.control.forget(peer)
        frame = encode(message)
        if len(frame) <= MAX_REQUEST_BYTES or not isinstance(message, Claim):
            self._sent(self.control.send(peer, frame), message)
            return
        # The source would end the connection, each time that the claim is repeated.
        what, found, expected = "the claim is too long to be sent", f"{len(frame)} bytes", f"{MAX_REQUEST_BYTES} bytes"
        refusal = Refusal(Reason.OUT_OF_RANGE, what, found, f"at most {expected}", message.claim_id)
        self._feed_target(e.AnswerArrived(peer, refusal))

    def _with_access(self, command: c.Send) -> Message:
        message, source = command.message, command.access
        if source is None or not isinstance(message, TargetOffer):
            return message
        return structs.replace(message, transports=self.transports.with_access(message.transports, source))

    def _sent(self, queued: bool, message: Message) -> None:
        """Count a message that a full queue has dropped. The session repeats what is not answered."""
        if not queued:
            self.counts["messages_dropped", type(message).__name__] += 1
