"""One rank: the real sessions of both sides, and the one place where their commands are carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from kvferry.errors import WireError, WireVersionError
from kvferry.plan.programs.copies import Direction
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session import keys as k
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceEvent
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetEvent
from kvferry.wire.codec import decode
from kvferry.wire.messages import (
    Claim,
    Grant,
    Message,
    Packed,
    Party,
    Probe,
    Queued,
    Reason,
    Refusal,
    TargetOffer,
    TransportOffer,
)
from simulator.checks import slots as slot_checks
from simulator.context import RunContext
from simulator.engines.digests import Digester
from simulator.engines.shared_programs import share_programs
from simulator.engines.staging import Stager, StagerCallbacks
from simulator.network.frames import ControlNetwork
from simulator.network.tickets import TransferNetwork
from simulator.state.inbox import Inbox
from simulator.state.memory import BlockPool, RankMemory
from simulator.state.rank import Copy, LeasedBlocks, Rank
from simulator.state.shapes import Side
from simulator.violation import Violation

PRODUCT_VERSION = "simulated"
PROBE = Probe(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Networks:
    """What connects nodes."""

    context: RunContext
    frames: ControlNetwork
    tickets: TransferNetwork


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Who moves the bytes that an engine fetches, how they are staged, and how much staging memory there is."""

    direction: Direction
    staging: StagingPolicy
    half_bytes: int


class Node:
    """The sessions of a rank, and what they need to go on."""

    def __init__(
        self, networks: Networks, engine_name: str, party: Party, side: Side, options: TransferOptions
    ) -> None:
        self.context, self._frames, self._tickets = networks.context, networks.frames, networks.tickets
        layout = side.layouts[party.rank]
        memory = RankMemory(side.maps[party.rank], 2 * options.half_bytes)
        self.rank = Rank(engine_name, party, memory, BlockPool(layout, side.shared_pool), Inbox(self.context.scheduler))
        self.num_states = len(layout.states)
        self.prefix_cache = self.context.defect.prefix_cache()
        ends = StagerCallbacks(self._later, self._slot_changed, self._copy_moves, self._reach)
        self._stager = Stager(self.context, self.rank, ends)
        self.staged_at = 0.0
        self._digester = Digester(self.context, memory, self._digested)
        self._counts: Counter[tuple[str, str]] = Counter()
        offers = (TransportOffer("simulated", self.rank.descriptor, ""),)
        identity = SourceIdentity(party, PRODUCT_VERSION, side.layouts, offers, PROBE)
        timing, defect = self.context.timing, self.context.defect
        self.source = defect.source(identity, timing)
        moving = options.direction, offers, PROBE, b"", options.staging
        ours = TargetIdentity(
            party,
            PRODUCT_VERSION,
            side.layouts,
            self.context.digest,
            *moving,
            may_switch_direction=True,
            revocable=frozenset({"simulated"} if self.context.is_revocable else ()),
        )
        self.target = defect.target(ours, timing)
        share_programs(self.source, self.target, side.layouts, party.rank)
        self.source._writes.stretch_bytes = self.context.scheduler.rng.choice(
            [1, self.context.staging.largest_slot_bytes]
        )
        self._wakes_at, self._last_call_at = float("inf"), 0.0
        self._frames.listen(self)
        self._tickets.register(self)

    # --- what comes in ---

    def frame_arrived(self, name: str, frame: bytes) -> None:
        """From a target, which is answered by name."""
        message = self._decoded(frame)
        if isinstance(message, Refusal):
            self._obey([c.Reply(name, message)])
            return
        if isinstance(message, Claim):
            self._note_claim(message)
        self.handle_source(e.FrameArrived(name, message))

    def answer_arrived(self, peer: k.PeerKey, frame: bytes) -> None:
        """From a source that we address."""
        self.handle_target(e.AnswerArrived(peer, self._decoded(frame)))

    def wanted(self, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """What the engine wants: handled in order, after a moment."""
        scheduler = self.context.scheduler
        self._last_call_at = max(self._last_call_at, scheduler.now + delay_s + scheduler.between(0.0, 0.01))
        scheduler.at(self._last_call_at, lambda: self.rank.inbox.put(1, action))

    def network_event(self, event: e.PeerConnected | e.PeerUnreachable | e.PeerGone | e.TicketEnded) -> None:
        """News from the transport: handled in a later turn, never in the middle of this one."""
        name = event.key if isinstance(event, e.TicketEnded) else event.peer
        self._later(partial(self._handle, name, event))

    def _later(self, action: Callable[[], None]) -> None:
        self.context.scheduler.after(0.0, lambda: self.rank.inbox.put(2, action))

    def _slot_changed(self, event: e.Acquired | e.Staged) -> None:
        self._handle(event.key, event)

    def _copy_moves(self, copy: Copy, is_last: bool) -> None:
        slot_checks.copy_moves(self.rank, copy)
        if is_last:
            self.context.checks.copied(self.rank, copy)

    def _reach(self, peer: k.Remote) -> Rank | None:
        return self._tickets.near(self.rank, peer)

    def _digested(self, event: e.Digested) -> None:
        if isinstance(event.key, k.SlotKey):
            raise Violation(f"{self.rank.name}: a digest of {event.key}, which is no part of a request")
        self.context.checks.digested(self.rank, event.key)
        self.rank.inbox.put(2, partial(self._handle, event.key, event))

    def _handle(self, name: k.WorkKey | k.Remote, event: Any) -> None:
        """For the session that has asked for something under this name."""
        name = name.work if isinstance(name, k.SlotKey) else name
        is_ours = isinstance(name, k.ReadKey | k.PeerKey)
        (self.handle_target if is_ours else self.handle_source)(event)

    def handle_source(self, event: SourceEvent) -> None:
        """One event for the source session."""
        self.context.log.note(self.rank.name, "source <-", event)
        self._obey(self.source.handle(event, self.context.scheduler.now))
        self._arm()

    def handle_target(self, event: TargetEvent) -> None:
        """One event for the target session."""
        self.context.log.note(self.rank.name, "target <-", event)
        if _gets_on(event):
            self.staged_at = self.context.scheduler.now
        self._obey(self.target.handle(event, self.context.scheduler.now))
        self._arm()

    def die(self, outlived: bool) -> None:
        """The process is gone; with `outlived`, its memory can still be read."""
        self.rank.alive, self.rank.outlived = False, outlived
        self.rank.inbox.close()
        self._stager.close()
        self._tickets.rank_died(self.rank)

    def left(self) -> dict[str, int]:
        """What there is of everything that must be gone when nothing happens any more."""
        source, target = self.source, self.target
        return {
            "blocks": self.rank.pool.num_used,
            "leases": source.num_live(),
            "tombstones": len(list(source._leases)),
            "early messages": len(source._early._waiting),
            "aborted claims": len(source._aborted),
            "targets": len(source._targets),
            "fetches": target.num_open(),
            "pending aborts": len(target._aborts),
            "queued leases": len(target._liveness.queued),
            "peers": len(list(target._peers)),
            "bindings": len(target._reads.bindings._known),
            "slots": self._stager.num_open,
            "copies": len(self.rank.copies),
        }

    # --- blocks ---

    def lease_blocks(self, leased: LeasedBlocks, salt: int) -> None:
        """Blocks that a prefill has filled."""
        self.rank.leased[leased.wanted.request_id] = leased
        if not leased.wanted.is_growing:
            self.rank.memory.write(salt, leased.tables, leased.wanted.num_tokens)

    def grow(self, leased: LeasedBlocks, salt: int, num_ready: int) -> None:
        """More tokens of a prefill are computed, unless the lease has ended: then their blocks are not its own."""
        wanted = leased.wanted
        if self.rank.alive and self.rank.leased.get(wanted.request_id) is leased:
            is_last = num_ready == wanted.num_tokens
            self.rank.memory.write(salt, leased.tables, num_ready, is_last)
            tables = leased.tables if is_last else self.rank.pool.cut(leased.tables, num_ready)
            self.wanted(partial(self._grown, leased, e.LeaseProgress(wanted.request_id, tables, num_ready)))

    def get_ahead(self, leased: LeasedBlocks, salt: int, num_ready: int, ahead: e.Ahead) -> None:
        """Some states of the tokens behind the first `num_ready` are computed, unless the lease has ended."""
        wanted = leased.wanted
        if self.rank.alive and self.rank.leased.get(wanted.request_id) is leased:
            is_last = ahead.num_tokens == wanted.num_tokens
            self.rank.memory.write_states(salt, leased.tables, ahead, is_last)
            tables = leased.tables if is_last else self.rank.pool.cut(leased.tables, ahead.num_tokens)
            self.wanted(partial(self._grown, leased, e.LeaseProgress(wanted.request_id, tables, num_ready, ahead)))

    def _grown(self, leased: LeasedBlocks, event: e.LeaseProgress) -> None:
        if self.rank.leased.get(event.request_id) is leased:
            self.handle_source(event)

    def _note_claim(self, claim: Claim) -> None:
        leased = self.rank.leased.get(claim.reference.request_id)
        if leased is not None and leased.wanted.lease_id == claim.reference.lease_id:
            leased.readers.update(claim.readers)
            leased.claims.add((claim.party, claim.claim_id))

    # --- what goes out ---

    def _obey(self, commands: list[c.Command]) -> None:
        self.context.checks.counted(self.rank, commands)
        for command in commands:
            self.context.log.note(self.rank.name, "  ->", command)
            self._carry_out(command)

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Send():
                self._frames.send(self, command.peer, self._with_access(command))
            case c.Reply(name, message):
                self._frames.reply(self, name, message)
            case c.Connect(peer, offer):
                self._tickets.connect(self.rank, peer, offer)
            case c.Disconnect() | c.Revoke():
                self._part(command)
            case c.CheckLiveness(peer):
                self._frames.probe(self, peer)
            case c.Post():
                self._tickets.post(self.rank, command)
            case c.Cancel(key):
                self._tickets.cancel(self.rank, key)
            case _:
                self._note(command)

    def _part(self, command: c.Disconnect | c.Revoke) -> None:
        if isinstance(command, c.Revoke):
            self._tickets.revoke(self.rank, command.source)
        else:
            self._tickets.disconnect(self.rank, command.peer)

    def _with_access(self, command: c.Send) -> Message:
        """As agents do: a source that is to write gets access of its own."""
        message = command.message
        if not isinstance(message, TargetOffer) or command.access is None or not self.context.is_revocable:
            return message
        offer = TransportOffer("simulated", self._tickets.access_for(self.rank, command.access), "")
        return structs.replace(message, transports=(offer,))

    def _note(self, command: c.Command) -> None:
        """What goes to the engine, and counters."""
        match command:
            case c.Digest():
                self._digester.start(self.rank.name, command)
            case c.DropDigest(key):
                self._digester.drop(key)
            case c.Acquire() | c.Release() | c.Stage():
                self._slot(command)
            case c.Count(what, reason):
                self._counts[what, reason] += 1
            case c.LeaseEnded(request_id, reason):
                self._source_freed(request_id, reason)
            case c.Fetched() | c.FetchFailed() | c.BlocksReleased():
                self._fetch_moved_on(command)

    def _slot(self, command: c.Acquire | c.Release | c.Stage) -> None:
        match command:
            case c.Acquire():
                self._stager.acquire(command)
            case c.Release(key):
                arriving = [ticket for ticket in self.context.open_tickets if not ticket.is_revoked]
                slot_checks.slot_is_released(self.rank, key, arriving, self._tickets.gathers_into(self.rank))
                self._stager.release(key)
            case c.Stage():
                self._stager.stage(command)

    def _source_freed(self, request_id: str, reason: str) -> None:
        self.context.checks.source_freed(self.rank, request_id, reason)
        leased = self.rank.leased.pop(request_id)
        self.rank.freed_at[leased.wanted.lease_id] = self.context.scheduler.now
        self.rank.free(leased.tables)

    def _fetch_moved_on(self, command: c.Fetched | c.FetchFailed | c.BlocksReleased) -> None:
        if isinstance(command, c.BlocksReleased):
            self.context.checks.target_freed(self.rank, command.request_id)
        fetching = self.rank.fetching.get(command.request_id)
        if fetching is None:
            raise Violation(f"{self.rank.name}: {type(command).__name__} of {command.request_id}, which is over")
        fetching.notify(command)

    # --- time ---

    def _arm(self) -> None:
        now = self.context.scheduler.now
        due = max(now, min(self.source.next_deadline(), self.target.next_deadline(now)))
        if due < self._wakes_at:
            self._wakes_at = due
            self.context.scheduler.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._wakes_at:
            self._wakes_at = float("inf")
            self.rank.inbox.put(3, self._tick)

    def _tick(self) -> None:
        self._obey(self.source.handle(e.Tick(), self.context.scheduler.now))
        self._obey(self.target.handle(e.Tick(), self.context.scheduler.now))
        self._arm()

    def _decoded(self, frame: bytes) -> Message:
        try:
            return decode(frame)
        except WireError as error:
            reason = Reason.WIRE_VERSION if isinstance(error, WireVersionError) else Reason.MALFORMED
            self._counts["frames_refused", reason] += 1
            return Refusal(reason, error.what, error.found, error.expected, "")


def _gets_on(event: TargetEvent) -> bool:
    """Whether a read through staging memory has got on, or has been told to be patient: its deadline begins anew."""
    if isinstance(event, e.AnswerArrived):
        is_patience = isinstance(event.message, Grant) and event.message.num_missing_tokens > 0
        return is_patience or isinstance(event.message, Packed | Queued)
    return isinstance(event, e.Acquired | e.Staged) or (
        isinstance(event, e.TicketEnded) and isinstance(event.key, k.SlotKey)
    )
