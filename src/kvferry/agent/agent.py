"""One thread per rank that owns the sockets, the transports and both sessions.

The loop: take what the engine wants, receive frames, poll transports, let time pass; every event goes to a session,
every command is carried out. It does not depend on the engine's step, so heartbeats go on through a long one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeVar

from kvferry import __version__
from kvferry.agent.carrier import Carrier
from kvferry.agent.config import AgentConfig, Host
from kvferry.agent.control import Arrival, ControlChannel
from kvferry.agent.digests import Digester, HostBytes
from kvferry.agent.knocks import Knocks
from kvferry.agent.lent_memory import Arena
from kvferry.agent.meeting import Met
from kvferry.agent.ourselves import ourselves_of
from kvferry.agent.own_probe import allocate_probe, describe_probe
from kvferry.agent.stager import Stager
from kvferry.agent.surroundings import surroundings_here
from kvferry.agent.wake import Wake
from kvferry.errors import RequestError, WireError, WireVersionError
from kvferry.plan.copies import Direction
from kvferry.session import events as e
from kvferry.session.introduction import Identity
from kvferry.session.source import SourceSession
from kvferry.session.target import TargetSession
from kvferry.transport.base import Transport
from kvferry.transport.memory_kind import HOST
from kvferry.wire.codec import decode, encode
from kvferry.wire.messages import Message, Party, Reason, Reference, Refusal

__all__ = ["Agent"]

BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.001
MAX_WAIT_S = 60.0
# After a turn of this length, what has been answered meanwhile is read before somebody is taken for silent.
LONG_TURN_S = 0.05
# So long, turns in which nothing comes in do nothing but let transports make progress for peers.
QUIET_S = 0.1
MAX_ID_LENGTH = 256
# Of a handshake, for finding a transport: those that hang one after the other still leave room for the rest.
TESTS_SHARE = 0.9
# A turn digests about this much: a few milliseconds.
DIGEST_BYTES = 16 << 20

logger = logging.getLogger(__name__)

_Lent = TypeVar("_Lent", bound=Arena)
_SourceEvent = e.LeaseWanted | e.LeaseGrown | e.LeaseWithdrawn
_TargetEvent = e.HoldWanted | e.FetchWanted | e.AbortWanted
_Work = e.Post | e.Cancel | e.Digest | e.DropDigest | e.Knock | e.Acquire | e.Release | e.Stage
_CommonEvent = e.PeerConnected | e.PeerUnreachable | e.TicketEnded | e.Digested | e.Acquired | e.Staged


class Agent:
    """Moves caches for one rank. Its methods may be called from any thread and never wait for the network."""

    def __init__(
        self, config: AgentConfig, host: Host, transports: Sequence[Transport], unavailable: Mapping[str, str]
    ) -> None:
        """Take over the transports and listen; nothing moves before `start`.

        Raises ConfigurationError when the port or the wanted transport cannot be had, TransportError when shared
        memory cannot.
        """
        self.party = Party(config.engine_id, config.epoch, config.rank)
        self.counts: Counter[tuple[str, str]] = Counter()
        self._notify = host.notify
        self._inbox: queue.SimpleQueue[_SourceEvent | _TargetEvent] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-agent", daemon=True)
        self._still_written: tuple[Arena, ...] = ()
        self._quiet_until = 0.0
        with ExitStack() as undo:
            # Closed last: whoever finds nobody at the address knows that nothing of ours moves any more.
            self._control = undo.enter_context(closing(ControlChannel(config.host, config.port, config.token)))
            # Closed after everything that copies.
            self._arena = self._lent(host.arena(config.staging_bytes), undo)
            self._probe = self._lent(allocate_probe(), undo)
            self._carrier = undo.enter_context(closing(_carrier(config, transports, unavailable)))
            self._carrier.register([*host.memories, self._probe.memory, self._arena.memory])
            self._carrier.check_requested()
            self._knocks = undo.enter_context(closing(Knocks()))
            self._wake = undo.enter_context(closing(Wake()))
            self._control.watch(self._wake.fileno())
            mover = undo.enter_context(closing(host.mover([*host.memories, self._arena.memory], self._wake.ring)))
            self._stager = undo.enter_context(closing(Stager(self._arena.memory, mover)))
            identity = self._identity(host)
            self._source = SourceSession(identity, config.timing)
            self._target = TargetSession(ourselves_of(identity, config), config.timing)
            readable = [memory for memory in host.memories if memory.device == HOST]
            self._digester = Digester(HostBytes(readable, identity.layout.regions))
            self.address = self._control.address
            self._resources = undo.pop_all()

    def _lent(self, memory: _Lent, undo: ExitStack) -> _Lent:
        """Have memory closed by what is known then of those that may still write to it."""
        undo.callback(lambda: memory.close(may_be_written=memory in self._still_written))
        return memory

    def _identity(self, host: Host) -> Identity:
        """What peers are told; the probe is filled for them."""
        offers, probe = self._carrier.offers(), describe_probe(self._probe)
        return Identity(self.party, __version__, host.layouts, offers, probe, host.is_staged(self.party.rank))

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it ends only by `close` or by a defect, which is logged."""
        return self._thread.is_alive()

    @property
    def num_open_reads(self) -> int:
        """Reads and writes of ours that are under way."""
        return self._carrier.num_open

    @property
    def moved_bytes(self) -> Mapping[Direction, int]:
        """Bytes that reads and writes of ours have moved since the start. May be asked from any thread."""
        return self._carrier.moved_bytes

    @property
    def num_slots(self) -> int:
        """Slots of staging memory that are held or waited for."""
        return self._stager.num_slots

    @property
    def written_ids(self) -> frozenset[str]:
        """Requests to whose blocks a source may be writing, also after our end. For whoever has heard `Stopped`."""
        return self._target.written_ids()

    @property
    def met(self) -> tuple[Met, ...]:
        """How each peer is reached that is connected now. May be asked from any thread."""
        return tuple(self._carrier.met.copy().values())

    # --- what engines call ---

    def start(self) -> None:
        """Begin to answer and to move."""
        self._thread.start()

    def lease(self, wanted: e.LeaseWanted) -> Reference:
        """Let a target read a finished request's cache. The blocks stay the lease's until `SourceFree`.

        Raises RequestError for an id that cannot travel.
        """
        _check_id(wanted.request_id)
        self._submit(wanted)
        return Reference(self.party.engine_id, self.party.epoch, wanted.request_id, wanted.lease_id)

    def grow(self, event: e.LeaseGrown) -> None:
        """More tokens of a growing lease are computed: what has been claimed of them can be sent."""
        self._submit(event)

    def withdraw(self, request_id: str) -> None:
        """End a request's lease early; `SourceFree` follows."""
        self._submit(e.LeaseWithdrawn(request_id))

    def hold(self, wanted: e.HoldWanted) -> None:
        """Keep a remote lease alive until its request's turn comes, and meet its source meanwhile."""
        self._submit(wanted)

    def fetch(self, wanted: e.FetchWanted) -> None:
        """Bring a remote cache into own blocks; `Fetched`, or `Failed` and later `TargetFree`, follow.

        Raises RequestError for an id that cannot travel.
        """
        _check_id(wanted.request_id)
        self._submit(wanted)

    def abort(self, request_id: str) -> None:
        """End a fetch early; `Failed` and `TargetFree` follow unless it is over already."""
        self._submit(e.AbortWanted(request_id))

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and release everything. Raises TimeoutError when the thread does not stop in time."""
        self._stopping.set()
        if self._thread.ident is None:
            self._resources.close()
            return
        self._wake.ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the agent's thread has not stopped within {timeout_s:g} s")

    def _submit(self, event: _SourceEvent | _TargetEvent) -> None:
        self._inbox.put(event)
        self._wake.ring()

    # --- the thread ---

    def _run(self) -> None:
        try:
            wait_s = 0.0
            while not self._stopping.is_set():
                wait_s = self._turn(wait_s)
        except Exception:
            # The top of the thread. Without it nothing moves: `alive` turns false and health checks see it.
            logger.exception("the transfer agent of %s has stopped", self.party.engine_id)
        finally:
            try:
                self._still_written = tuple(self._written_by_peers())
                self._resources.close()
            finally:
                self._notify(e.Stopped())

    def _written_by_peers(self) -> Iterator[Arena]:
        """Memory of ours into which bytes may still come when nothing of ours runs any more."""
        if self._stager.num_slots:
            yield self._arena
        # Testing is nowhere said to have ended; who may reach us at all may still do it.
        if self._is_reached(time.monotonic()):
            yield self._probe

    def _is_reached(self, now: float) -> bool:
        """Whether peers may be reading or writing memory of ours."""
        return self._source.may_be_read(now) or self._target.may_be_written()

    def _turn(self, wait_s: float) -> float:
        """Everything that is to do now; returns how long the next turn may wait for something new."""
        waited_from = time.monotonic()
        has_come = self._listen(wait_s)
        began = time.monotonic()
        if not has_come and began < self._quiet_until:
            return self._look(began)
        self._progress()
        now = time.monotonic()
        has_come = now - waited_from > LONG_TURN_S and self._listen(0.0)
        self.counts.update(self._control.take_counts() + self._carrier.take_counts())
        now = time.monotonic()
        self._obey([*self._source.handle(e.Tick(), now), *self._target.handle(e.Tick(), now)])
        self._quiet_until = 0.0
        if has_come or self._digester.busy or self._stager.is_changed or self._carrier.is_fresh:
            return 0.0
        if self._carrier.busy or self._knocks.busy or self._stager.busy:
            # A transport that copies inside `poll` has more to copy; one that works elsewhere is asked again soon.
            return 0.0 if now - began > BUSY_POLL_S else IDLE_POLL_S
        deadline = min(self._source.next_deadline(), self._target.next_deadline(now))
        # Only for peers that use our memory: an agent that wakes for nothing takes the interpreter from its engine.
        if not self._is_reached(now):
            return max(0.0, min(deadline - now, MAX_WAIT_S))
        self._quiet_until = min(deadline, now + QUIET_S)
        return self._rest_s(now)

    def _look(self, now: float) -> float:
        """A turn in which nothing has come, unless to transports; returns like `_turn`."""
        for event in self._carrier.poll():
            self._feed(event)
            self._quiet_until = 0.0
        return self._rest_s(now)

    def _rest_s(self, now: float) -> float:
        return max(0.0, min(self._quiet_until - now, self._carrier.progress_interval_s))

    def _listen(self, wait_s: float) -> bool:
        """Whether a message has come, or the bell was rung, which may also mean that a copy has ended: `_progress` must
        follow then.

        Whoever claims a lease has been told of it after the engine has told us, and who has read blocks after an
        engine took them back says so after the engine has: so what has come is looked at after the engine is heard.
        """
        arrivals = self._control.receive(wait_s)
        has_rung = self._wake.rang()
        self._take_wishes()
        for arrival in arrivals:
            self._arrived(arrival)
            self._move_slots()
        return has_rung or bool(arrivals)

    def _progress(self) -> None:
        """What has happened to work that takes several turns."""
        # What is gathered is posted, what is posted may be copied by the poll, what is sent makes room: in this order
        # no slot waits for the next turn.
        for slot_event in self._stager.poll():
            self._feed(slot_event)
        for event in self._carrier.poll():
            self._feed(event)
        self._move_slots()
        for digested in self._digester.run(DIGEST_BYTES):
            self._feed(digested)
        for peer in self._knocks.unanswered():
            self._feed_target(e.PeerGone(peer))

    def _move_slots(self) -> None:
        """Hand out the slots that are free at once: the copies that go with them run beside all that follows here."""
        while self._stager.is_changed:
            for event in self._stager.poll():
                self._feed(event)

    def _take_wishes(self) -> None:
        while not self._inbox.empty():
            event = self._inbox.get()
            if isinstance(event, _SourceEvent):
                self._obey(self._source.handle(event, time.monotonic()))
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
                self._obey([e.Reply(arrival.name, message)])
                return
        for peer in arrival.link:
            self._feed_target(e.AnswerArrived(peer, message))
        if not arrival.link:
            self._obey(self._source.handle(e.FrameArrived(arrival.name, message), time.monotonic()))

    def _feed(self, event: _CommonEvent) -> None:
        """News of what both sessions may have asked for: who did can be told from its name."""
        name = event.peer if isinstance(event, e.PeerConnected | e.PeerUnreachable) else event.key
        name = name.work if isinstance(name, e.SlotKey) else name
        if isinstance(name, e.PeerKey | e.ReadKey):
            self._feed_target(event)
        else:
            self._obey(self._source.handle(event, time.monotonic()))

    def _feed_target(self, event: _TargetEvent | _CommonEvent | e.AnswerArrived | e.PeerGone) -> None:
        self._obey(self._target.handle(event, time.monotonic()))

    def _obey(self, commands: Sequence[e.Command]) -> None:
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: e.Command) -> None:
        match command:
            case e.Send(peer, message):
                self._sent(self._control.send(peer, encode(message)), message)
            case e.Reply(name, message):
                self._sent(self._control.reply(name, encode(message)), message)
            case e.Connect(peer, offer):
                self._carrier.connect(peer, offer)
            case e.Disconnect(peer):
                self._carrier.disconnect(peer)
                if isinstance(peer, e.PeerKey):
                    self._control.forget(peer)
            case e.Count(what, reason):
                self.counts[what, reason] += 1
            case e.Fetched() | e.Failed() | e.TargetFree() | e.SourceFree():
                self._notify(command)
            case _:
                self._work(command)

    def _work(self, command: _Work) -> None:
        """What takes several turns, and how it is ended early."""
        match command:
            case e.Post():
                self._carrier.post(command)
            case e.Cancel(key):
                self._carrier.cancel(key)
            case e.Digest(digest_key, extracts):
                self._digester.start(digest_key, extracts)
            case e.DropDigest(digest_key):
                self._digester.drop(digest_key)
            case e.Knock(peer):
                self._knocks.start(peer)
            case _:
                self._slot(command)

    def _slot(self, command: e.Acquire | e.Release | e.Stage) -> None:
        match command:
            case e.Acquire():
                self._stager.acquire(command)
            case e.Release(key):
                self._stager.release(key)
            case e.Stage():
                self._stager.stage(command)

    def _sent(self, queued: bool, message: Message) -> None:
        """A full queue drops the message: the session repeats what is not answered."""
        if not queued:
            self.counts["messages_dropped", type(message).__name__] += 1


def _carrier(config: AgentConfig, transports: Sequence[Transport], unavailable: Mapping[str, str]) -> Carrier:
    tests_s = TESTS_SHARE * config.timing.handshake_s
    surroundings = surroundings_here(config.transport, config.may_turn)
    return Carrier(config.transport, transports, unavailable, tests_s, surroundings)


def _check_id(request_id: str) -> None:
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise RequestError("a request id cannot travel", found=str(error), expected="text") from error
    if not 0 < len(request_id) <= MAX_ID_LENGTH:
        what = "a request id cannot travel"
        raise RequestError(what, found=f"{len(request_id)} characters", expected=f"1 to {MAX_ID_LENGTH}")
