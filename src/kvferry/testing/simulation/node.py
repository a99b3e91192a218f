"""One rank: the real sessions of both sides, and the one place where their commands are carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvferry.errors import WireError, WireVersionError
from kvferry.plan.programs.copies import Direction
from kvferry.session import events as e
from kvferry.session.source.introduction import Identity
from kvferry.session.source.session import SourceEvent
from kvferry.session.target.handshake import Ourselves
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetEvent
from kvferry.testing.simulation import staging_checks
from kvferry.testing.simulation.attempt import Fetching
from kvferry.testing.simulation.checks import Violation
from kvferry.testing.simulation.digests import Digester
from kvferry.testing.simulation.frames import FrameFabric
from kvferry.testing.simulation.inbox import Inbox
from kvferry.testing.simulation.memory import BlockPool, RankMemory, Tables
from kvferry.testing.simulation.programs import remember_programs
from kvferry.testing.simulation.shapes import Side
from kvferry.testing.simulation.site import Site
from kvferry.testing.simulation.staging import Copy, Stager, StagerEnds
from kvferry.testing.simulation.tickets import Ticket, TicketFabric
from kvferry.wire.codec import decode
from kvferry.wire.messages import Claim, Message, Party, Probe, Reason, Refusal, TransportOffer

PRODUCT_VERSION = "simulated"
PROBE = Probe(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Wiring:
    """What connects nodes."""

    site: Site
    frames: FrameFabric
    tickets: TicketFabric


@dataclass(frozen=True, slots=True)
class Habits:
    """Who moves the bytes that an engine fetches, how they are staged, and how much staging memory there is."""

    direction: Direction
    staging: StagingPolicy
    half_bytes: int


@dataclass(slots=True)
class Lent:
    """Blocks that the engine keeps until `LeaseEnded`; who has said that they read them."""

    wanted: e.LeaseRequest
    tables: Tables
    readers: set[int] = field(default_factory=set)
    claims: set[tuple[Party, str]] = field(default_factory=set)


class Node:
    """One rank of one incarnation of an engine. `engine_name` is the machine, `party.engine_id` who it says it is."""

    def __init__(self, wiring: Wiring, engine_name: str, party: Party, side: Side, habits: Habits) -> None:
        self.site, self._frames, self._tickets = wiring.site, wiring.frames, wiring.tickets
        self.engine_name, self.party, self.rank = engine_name, party, party.rank
        self.name, self.epoch = f"{engine_name}.{party.rank}", party.epoch
        self.address = f"sim://{engine_name}/{party.rank}"
        self.peer_key = e.PeerKey(self.address, party.engine_id, party.epoch)
        self.descriptor = f"{self.name}#{party.epoch}".encode()
        self.alive, self.outlived = True, False
        layout = side.layouts[party.rank]
        self.memory = RankMemory(side.maps[party.rank], 2 * habits.half_bytes)
        self.num_states = len(layout.states)
        self.pool = BlockPool(layout, side.shared_pool)
        self.prefix_cache = self.site.plant.prefix_cache()
        self.inbox = Inbox(self.site.world)
        self.stager = Stager(
            self.site, self.memory, StagerEnds(self._later, self._slot_changed, self._copy_moves, self._reach)
        )
        self.staged_at = 0.0
        self._digester = Digester(self.site, self.memory, self._digested)
        self.lent: dict[str, Lent] = {}
        self.fetching: dict[str, Fetching] = {}
        self.freed_at: dict[str, float] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        offers = (TransportOffer("simulated", self.descriptor, ""),)
        identity = Identity(party, PRODUCT_VERSION, side.layouts, offers, PROBE)
        timing, plant = self.site.timing, self.site.plant
        self.source = plant.source(identity, timing)
        moving = habits.direction, offers, PROBE, b"", habits.staging
        ours = Ourselves(party, PRODUCT_VERSION, side.layouts, self.site.digest, *moving, may_turn=True)
        self.target = plant.target(ours, timing)
        remember_programs(self.source, self.target, side.layouts, party.rank)
        self.source._carrying.stretch_bytes = self.site.world.dice.choice([1, self.site.staging.largest_slot_bytes])
        self._wakes_at, self._wished_at = float("inf"), 0.0
        self._frames.listen(self)
        self._tickets.register(self)

    # --- what comes in ---

    def frame_arrived(self, name: str, frame: bytes) -> None:
        """From a target, which is answered by name."""
        message = self._decoded(frame)
        if isinstance(message, Refusal):
            self._obey([e.Reply(name, message)])
            return
        if isinstance(message, Claim):
            self._note_claim(message)
        self.handle_source(e.FrameArrived(name, message))

    def answer_arrived(self, peer: e.PeerKey, frame: bytes) -> None:
        """From a source that we address."""
        self.handle_target(e.AnswerArrived(peer, self._decoded(frame)))

    def wish(self, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """What the engine wants: handled in order, after a moment."""
        world = self.site.world
        self._wished_at = max(self._wished_at, world.now + delay_s + world.between(0.0, 0.01))
        world.at(self._wished_at, lambda: self.inbox.put(1, action))

    def carried(self, event: e.PeerConnected | e.PeerUnreachable | e.PeerGone | e.TicketEnded) -> None:
        """News from the transport: handled in a later turn, never in the middle of this one."""
        name = event.key if isinstance(event, e.TicketEnded) else event.peer
        self._later(partial(self._handle, name, event))

    def _later(self, action: Callable[[], None]) -> None:
        self.site.world.after(0.0, lambda: self.inbox.put(2, action))

    def _slot_changed(self, event: e.Acquired | e.Staged) -> None:
        self._handle(event.key, event)

    def _copy_moves(self, copy: Copy, is_last: bool) -> None:
        staging_checks.copy_moves(self, copy)
        if is_last:
            self.site.checks.copied(self, copy)

    def _reach(self, peer: e.Remote) -> Node | None:
        return self._tickets.route(self, peer)

    def _digested(self, event: e.Digested) -> None:
        if isinstance(event.key, e.SlotKey):
            raise Violation(f"{self.name}: a digest of {event.key}, which is no part of a request")
        self.site.checks.digested(self, event.key)
        self.inbox.put(2, partial(self._handle, event.key, event))

    def _handle(self, name: e.WorkKey | e.Remote, event: Any) -> None:
        """For the session that has asked for something under this name."""
        name = name.work if isinstance(name, e.SlotKey) else name
        is_ours = isinstance(name, e.ReadKey | e.PeerKey)
        (self.handle_target if is_ours else self.handle_source)(event)

    def handle_source(self, event: SourceEvent) -> None:
        """One event for the source session."""
        self.site.story.say(self.name, "source <-", event)
        self._obey(self.source.handle(event, self.site.world.now))
        self._arm()

    def handle_target(self, event: TargetEvent) -> None:
        """One event for the target session."""
        self.site.story.say(self.name, "target <-", event)
        if staging_checks.gets_on(event):
            self.staged_at = self.site.world.now
        self._obey(self.target.handle(event, self.site.world.now))
        self._arm()

    def die(self, outlived: bool) -> None:
        """The process is gone; with `outlived`, its memory can still be read."""
        self.alive, self.outlived = False, outlived
        self.inbox.close()
        self.stager.close()
        self._tickets.node_died(self)

    def open_tickets(self, request_id: str) -> list[Ticket]:
        """What may still write to the blocks of a request."""
        return self._tickets.open_of(self, request_id)

    # --- blocks ---

    def lend(self, lent: Lent, salt: int) -> None:
        """Blocks that a prefill has filled."""
        self.lent[lent.wanted.request_id] = lent
        if not lent.wanted.is_growing:
            self.memory.write(salt, lent.tables, lent.wanted.num_tokens)

    def grow(self, lent: Lent, salt: int, num_ready: int) -> None:
        """More tokens of a prefill are computed, unless the lease has ended: then their blocks are not its own."""
        wanted = lent.wanted
        if self.alive and self.lent.get(wanted.request_id) is lent:
            is_last = num_ready == wanted.num_tokens
            self.memory.write(salt, lent.tables, num_ready, is_last)
            tables = lent.tables if is_last else self.pool.cut(lent.tables, num_ready)
            self.wish(partial(self._grown, lent, e.LeaseProgress(wanted.request_id, tables, num_ready)))

    def get_ahead(self, lent: Lent, salt: int, num_ready: int, ahead: e.Ahead) -> None:
        """Some states of the tokens behind the first `num_ready` are computed, unless the lease has ended."""
        wanted = lent.wanted
        if self.alive and self.lent.get(wanted.request_id) is lent:
            is_last = ahead.num_tokens == wanted.num_tokens
            self.memory.write_states(salt, lent.tables, ahead, is_last)
            tables = lent.tables if is_last else self.pool.cut(lent.tables, ahead.num_tokens)
            self.wish(partial(self._grown, lent, e.LeaseProgress(wanted.request_id, tables, num_ready, ahead)))

    def _grown(self, lent: Lent, event: e.LeaseProgress) -> None:
        if self.lent.get(event.request_id) is lent:
            self.handle_source(event)

    def free(self, tables: Tables) -> None:
        """Blocks come back, and somebody else has them at once."""
        if tables:
            self.memory.overwrite(tables)
            self.pool.give_back(tables)

    def _note_claim(self, claim: Claim) -> None:
        lent = self.lent.get(claim.reference.request_id)
        if lent is not None and lent.wanted.lease_id == claim.reference.lease_id:
            lent.readers.update(claim.readers)
            lent.claims.add((claim.party, claim.claim_id))

    # --- what goes out ---

    def _obey(self, commands: list[e.Command]) -> None:
        self.site.checks.counted(self, commands)
        for command in commands:
            self.site.story.say(self.name, "  ->", command)
            self._carry_out(command)

    def _carry_out(self, command: e.Command) -> None:
        match command:
            case e.Send(peer, message):
                self._frames.send(self, peer, message)
            case e.Reply(name, message):
                self._frames.reply(self, name, message)
            case e.Connect(peer, offer):
                self._tickets.connect(self, peer, offer)
            case e.Disconnect(peer):
                self._tickets.disconnect(self, peer)
            case e.Knock(peer):
                self._frames.knock(self, peer)
            case e.Post():
                self._tickets.post(self, command)
            case e.Cancel(key):
                self._tickets.cancel(self, key)
            case _:
                self._note(command)

    def _note(self, command: e.Command) -> None:
        """What goes to the engine, and counters."""
        match command:
            case e.Digest():
                self._digester.start(self.name, command)
            case e.DropDigest(key):
                self._digester.drop(key)
            case e.Acquire() | e.Release() | e.Stage():
                self._slot(command)
            case e.Count(what, reason):
                self.counts[what, reason] += 1
            case e.LeaseEnded(request_id, reason):
                self._source_freed(request_id, reason)
            case e.Fetched() | e.FetchFailed() | e.BlocksReleased():
                self._fetch_moved_on(command)

    def _slot(self, command: e.Acquire | e.Release | e.Stage) -> None:
        match command:
            case e.Acquire():
                self.stager.acquire(command)
            case e.Release(key):
                staging_checks.slot_is_released(self, key, self._tickets.open, self._tickets.gathers_into(self))
                self.stager.release(key)
            case e.Stage():
                self.stager.stage(command)

    def _source_freed(self, request_id: str, reason: str) -> None:
        self.site.checks.source_freed(self, request_id, reason, self._tickets.open)
        lent = self.lent.pop(request_id)
        self.freed_at[lent.wanted.lease_id] = self.site.world.now
        self.free(lent.tables)

    def _fetch_moved_on(self, command: e.Fetched | e.FetchFailed | e.BlocksReleased) -> None:
        if isinstance(command, e.BlocksReleased):
            self.site.checks.target_freed(self, command.request_id)
        fetching = self.fetching.get(command.request_id)
        if fetching is None:
            raise Violation(f"{self.name}: {type(command).__name__} of {command.request_id}, which is over")
        fetching.handle(self, command)

    # --- time ---

    def _arm(self) -> None:
        now = self.site.world.now
        due = max(now, min(self.source.next_deadline(), self.target.next_deadline(now)))
        if due < self._wakes_at:
            self._wakes_at = due
            self.site.world.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._wakes_at:
            self._wakes_at = float("inf")
            self.inbox.put(3, self._tick)

    def _tick(self) -> None:
        self._obey(self.source.handle(e.Tick(), self.site.world.now))
        self._obey(self.target.handle(e.Tick(), self.site.world.now))
        self._arm()

    def _decoded(self, frame: bytes) -> Message:
        try:
            return decode(frame)
        except WireError as error:
            reason = Reason.WIRE_VERSION if isinstance(error, WireVersionError) else Reason.MALFORMED
            self.counts["frames_refused", reason] += 1
            return Refusal(reason, error.what, error.found, error.expected, "")
