"""One thread per rank that owns the sockets, the transports and both sessions; what it does is in `turns`.

It does not depend on the engine's step, so heartbeats go on through a long one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Self, TypeVar

from kvferry import __version__
from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice, slot_bytes_in
from kvferry.agent.control.liveness import Knocks
from kvferry.agent.control.sockets import ControlChannel
from kvferry.agent.loop.turns import Turns, Wish
from kvferry.agent.loop.wakeup import Wake
from kvferry.agent.memory.digests import Digester, HostBytes
from kvferry.agent.memory.peer_slots import FarSlots
from kvferry.agent.memory.probe import allocate_probe, describe_probe
from kvferry.agent.memory.shared_regions import Arena
from kvferry.agent.memory.stager import Stager
from kvferry.agent.requests.checks import check_fetch, check_growth, check_hold, check_lease
from kvferry.agent.requests.identity import ourselves_of
from kvferry.agent.requests.names import RequestNames
from kvferry.agent.transports.carrier import Carrier
from kvferry.agent.transports.negotiation import PeerReport
from kvferry.plan.programs.copies import Direction
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from kvferry.transport.base import Transport
from kvferry.transport.memory_kind import HOST
from kvferry.transport.selection.local_context import local_context
from kvferry.wire.messages import Party, Reference

# Of a handshake, for finding a transport: those that hang one after the other still leave room for the rest.
TESTS_SHARE = 0.9

logger = logging.getLogger(__name__)

_Lent = TypeVar("_Lent", bound=Arena)


class Agent:
    """Moves caches for one rank. Its methods may be called from any thread and never wait for the network."""

    def __init__(
        self,
        config: AgentConfig,
        cache: Cache,
        notify: Callable[[Notice], None],
        transports: Sequence[Transport],
        unavailable: Mapping[str, str],
    ) -> None:
        """Take over the transports and listen; nothing moves before `start`. `notify` is called on the agent's thread
        and must return at once.

        Raises ConfigurationError when the port or the wanted transport cannot be had, TransportError when shared
        memory cannot.
        """
        self.party = Party(config.engine_id, config.epoch, config.rank)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-agent", daemon=True)
        self._still_written: tuple[Arena, ...] = ()
        self._names = RequestNames(notify)
        with ExitStack() as undo:
            for transport in transports:
                # The carrier closes them at its turn; this is for when there is none yet.
                undo.callback(transport.close)
            # Closed last: whoever finds nobody at the address knows that nothing of ours moves any more.
            control = undo.enter_context(closing(ControlChannel(config.host, config.port, config.token)))
            # Closed after everything that copies.
            self._arena = self._lent(cache.arena(config.staging_bytes), undo)
            self._probe = self._lent(allocate_probe(), undo)
            wake = undo.enter_context(closing(Wake()))
            control.watch(wake.fileno())
            # The stager closes it before what it copies to is given up.
            mover = undo.enter_context(closing(cache.mover([*cache.memories, self._arena.memory], wake.ring)))
            far = undo.enter_context(closing(FarSlots(self._arena.memory)))
            reached = far if mover.reaches_far else None
            carrier = undo.enter_context(closing(_carrier(config, transports, unavailable, reached)))
            carrier.register([*cache.memories, self._probe.memory, self._arena.memory])
            carrier.check_requested()
            knocks = undo.enter_context(closing(Knocks()))
            identity = self._identity(config, cache, carrier)
            readable = [memory for memory in cache.memories if memory.device == HOST]
            self._turns = Turns(
                source=SourceSession(identity, config.timing),
                target=TargetSession(ourselves_of(identity, config, far.descriptor), config.timing),
                control=control,
                carrier=carrier,
                stager=undo.enter_context(closing(Stager(self._arena.memory, mover, far))),
                digester=Digester(HostBytes(readable, identity.layout.regions)),
                knocks=knocks,
                wake=wake,
                notify=self._names.notify,
            )
            self.address = control.address
            self._resources = undo.pop_all()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lent(self, memory: _Lent, undo: ExitStack) -> _Lent:
        """Have memory closed by what is known then of those that may still write to it."""
        undo.callback(lambda: memory.close(may_be_written=memory in self._still_written))
        return memory

    def _identity(self, config: AgentConfig, cache: Cache, carrier: Carrier) -> SourceIdentity:
        """What peers are told; the probe is filled for them."""
        offers, probe = carrier.offers(), describe_probe(self._probe)
        is_staged, slot_bytes = cache.is_staged(self.party.rank), slot_bytes_in(config.staging_bytes)
        return SourceIdentity(self.party, __version__, cache.layouts, offers, probe, is_staged, slot_bytes)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it ends only by `close` or by a defect, which is logged."""
        return self._thread.is_alive()

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """How often what happened, and why. May be asked from any thread."""
        return self._turns.counts

    @property
    def num_open_reads(self) -> int:
        """Reads and writes of ours that are under way."""
        return self._turns.carrier.num_open

    @property
    def moved_bytes(self) -> Mapping[Direction, int]:
        """Bytes that we have read from peers and written to them since the start. May be asked from any thread."""
        moved, gathered = self._turns.carrier.moved_bytes, self._turns.stager.gathered_bytes
        return {Direction.READ: moved[Direction.READ], Direction.WRITE: moved[Direction.WRITE] + gathered}

    @property
    def num_slots(self) -> int:
        """Slots of staging memory that are held or waited for."""
        return self._turns.stager.num_slots

    @property
    def written_ids(self) -> frozenset[str]:
        """Requests to whose blocks a source may be writing, also after our end. For whoever has heard
        `AgentStopped`."""
        return self._turns.target.written_ids()

    @property
    def peers(self) -> tuple[PeerReport, ...]:
        """How each peer is reached that is connected now. May be asked from any thread."""
        return tuple(self._turns.carrier.met.copy().values())

    # --- what engines call ---

    def start(self) -> None:
        """Begin to answer and to move."""
        self._thread.start()

    def lease(self, wanted: e.LeaseRequest) -> Reference:
        """Let a target read a finished request's cache. The blocks stay the lease's until `LeaseEnded`.

        Raises RequestError for what cannot travel, and for a request whose lease has not ended.
        """
        check_lease(wanted)
        self._names.lease(wanted.request_id)
        self._submit(wanted)
        return Reference(self.party.engine_id, self.party.epoch, wanted.request_id, wanted.lease_id)

    def grow(self, event: e.LeaseProgress) -> None:
        """More tokens of a growing lease are computed: what has been claimed of them can be sent.

        Raises RequestError for what cannot travel.
        """
        check_growth(event)
        self._submit(event)

    def withdraw(self, request_id: str) -> None:
        """End a request's lease early; `LeaseEnded` follows."""
        self._submit(e.LeaseWithdrawn(request_id))

    def hold(self, wanted: e.HoldRequest) -> None:
        """Keep a remote lease alive until its request's turn comes, and meet its source meanwhile.

        Raises RequestError for what cannot travel.
        """
        check_hold(wanted)
        self._submit(wanted)

    def fetch(self, wanted: e.FetchRequest) -> None:
        """Bring a remote cache into own blocks; `Fetched`, or `FetchFailed` and later `BlocksReleased`, follow.

        Raises RequestError for what cannot travel, for ranges that run backwards, and for a request that is being
        fetched.
        """
        check_fetch(wanted)
        self._submit(replace(wanted, attempt=self._names.fetch(wanted.request_id)))

    def abort(self, request_id: str) -> None:
        """End a fetch early; `FetchFailed` and `BlocksReleased` follow unless it is over already."""
        self._submit(e.AbortRequest(request_id))

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and release everything. Raises TimeoutError when the thread does not stop in time."""
        self._stopping.set()
        if self._thread.ident is None:
            self._resources.close()
            return
        self._turns.wake.ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the agent's thread has not stopped within {timeout_s:g} s")

    def _submit(self, event: Wish) -> None:
        self._turns.inbox.put(event)
        self._turns.wake.ring()

    # --- the thread ---

    def _run(self) -> None:
        try:
            wait_s = 0.0
            while not self._stopping.is_set():
                wait_s = self._turns.take(wait_s)
        except Exception:
            # The top of the thread. Without it nothing moves: `alive` turns false and health checks see it.
            logger.exception("the transfer agent of %s has stopped", self.party.engine_id)
        finally:
            try:
                self._still_written = tuple(self._written_by_peers())
                self._resources.close()
            finally:
                self._turns.notify(c.AgentStopped())

    def _written_by_peers(self) -> Iterator[Arena]:
        """Memory of ours into which bytes may still come when nothing of ours runs any more."""
        if self._turns.stager.num_slots:
            yield self._arena
        # Testing is nowhere said to have ended; who may reach us at all may still do it.
        if self._turns.is_reached(time.monotonic()):
            yield self._probe


def _carrier(
    config: AgentConfig, transports: Sequence[Transport], unavailable: Mapping[str, str], far: FarSlots | None
) -> Carrier:
    tests_s = TESTS_SHARE * config.timing.handshake_s
    context = local_context(config.transport, config.may_turn)
    return Carrier(config.transport, transports, unavailable, tests_s, context, far)
