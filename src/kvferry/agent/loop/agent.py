"""The agent of a rank: a thread that owns the sockets, the transports and both sessions, and the calls of its engine.

The thread does not depend on the engine's step, so heartbeats continue during a long one. `event_loop` has what it
does.
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

from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice, slot_bytes_in
from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.control.liveness_probes import LivenessProbes
from kvferry.agent.identity import allocate_probe, describe_probe, target_identity
from kvferry.agent.loop.event_loop import EngineRequest, EventLoop
from kvferry.agent.loop.wakeup import Wakeup
from kvferry.agent.memory.arena import Arena
from kvferry.agent.memory.digests import Digester, HostBytes
from kvferry.agent.memory.peer_slots import PeerSlots
from kvferry.agent.memory.staging_slots import StagingSlots
from kvferry.agent.requests import OpenRequests, check_address, check_fetch, check_growth, check_hold, check_lease
from kvferry.agent.transports.manager import TransportManager
from kvferry.agent.transports.negotiation import PeerReport
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from kvferry.staging.device.table import BUILT_IN, check_pair, load_devices
from kvferry.transport.base import Transport
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registry import Opened, open_transports
from kvferry.transport.selection.diagnosis import local_context
from kvferry.version import __version__
from kvferry.wire.messages import Party, Reference

# The part of a handshake's time that self-tests of transports may take; the rest is for messages.
TESTS_SHARE = 0.9

logger = logging.getLogger(__name__)

_Arena = TypeVar("_Arena", bound=Arena)


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
        self._written_arenas: tuple[Arena, ...] = ()
        self._names = OpenRequests(notify)
        self._token = config.token
        with ExitStack() as undo:
            for transport in transports:
                # The transport manager closes them; this is for errors before there is one.
                undo.callback(transport.close)
            self._event_loop = self._open(config, cache, Opened(tuple(transports), dict(unavailable)), undo)
            self._resources = undo.pop_all()
        self.address = self._event_loop.control.address

    def _open(self, config: AgentConfig, cache: Cache, opened: Opened, undo: ExitStack) -> EventLoop:
        """Everything that the thread uses; `undo` closes it in the opposite order."""
        # Closed last: a peer that is refused a connection may conclude that this agent moves no bytes any more.
        control = undo.enter_context(closing(ControlChannel(config.host, config.port, config.token)))
        # Closed after everything that copies.
        self._arena = self._owned(cache.arena(config.staging_bytes), undo)
        self._probe = self._owned(allocate_probe(), undo)
        wakeup = undo.enter_context(closing(Wakeup()))
        control.watch(wakeup.fileno())
        # Closed before the memory that it copies to.
        mover = undo.enter_context(closing(cache.mover([*cache.memories, self._arena.memory], wakeup.notify)))
        peer_slots = undo.enter_context(closing(PeerSlots(self._arena.memory)))
        manager = undo.enter_context(
            closing(_manager(config, opened, cache.buffer_device, peer_slots if mover.reaches_peer_memory else None))
        )
        manager.notify_with(wakeup.notify)
        manager.register([*cache.memories, self._probe.memory, self._arena.memory])
        manager.check_requested()
        identity = self._identity(config, cache, manager)
        readable = [memory for memory in cache.memories if memory.device == HOST]
        return EventLoop(
            source=SourceSession(identity, config.timing),
            target=TargetSession(
                target_identity(identity, config, peer_slots.descriptor, manager.revocable), config.timing
            ),
            control=control,
            transports=manager,
            liveness=undo.enter_context(closing(LivenessProbes())),
            staging=undo.enter_context(closing(StagingSlots(self._arena.memory, mover, peer_slots))),
            digester=Digester(HostBytes(readable, identity.layout.regions)),
            wakeup=wakeup,
            notify=self._names.notify,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owned(self, arena: _Arena, undo: ExitStack) -> _Arena:
        """Have the arena closed at the end, or kept where a peer may still write to it then."""
        undo.callback(lambda: arena.close(may_be_written=arena in self._written_arenas))
        return arena

    def _identity(self, config: AgentConfig, cache: Cache, manager: TransportManager) -> SourceIdentity:
        """What peers are told; the probe is filled for them."""
        offers, probe = manager.offers(), describe_probe(self._probe)
        is_staged, slot_bytes = cache.is_staged(self.party.rank), slot_bytes_in(config.staging_bytes)
        return SourceIdentity(self.party, __version__, cache.layouts, offers, probe, is_staged, slot_bytes)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it ends only by `close`, or by a defect, which is logged."""
        return self._thread.is_alive()

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """The number of events by kind and reason. May be read from any thread."""
        return self._event_loop.counts

    @property
    def num_open_reads(self) -> int:
        """Tickets of this agent that are in progress."""
        return self._event_loop.transports.num_open

    @property
    def moved_bytes(self) -> Mapping[Direction, int]:
        """Bytes read from peers and written to them since the start. May be read from any thread."""
        moved, gathered = self._event_loop.transports.moved_bytes, self._event_loop.staging.gathered_bytes
        return {Direction.READ: moved[Direction.READ], Direction.WRITE: moved[Direction.WRITE] + gathered}

    @property
    def num_slots(self) -> int:
        """Slots of staging memory that are held or waited for."""
        return self._event_loop.staging.num_slots

    @property
    def written_ids(self) -> frozenset[str]:
        """Requests to whose blocks a source may be writing, also after our end. For whoever has heard
        `AgentStopped`."""
        return self._event_loop.target.written_ids()

    @property
    def peers(self) -> tuple[PeerReport, ...]:
        """How each peer is reached that is connected now. May be read from any thread."""
        return tuple(self._event_loop.transports.met.copy().values())

    # --- what engines call ---

    def start(self, addresses: Sequence[str] = (), data_parallel_size: int = 1) -> None:
        """Begin to answer and to move. `addresses` are those of the agents of all ranks of this engine, in their order:
        who asks one of them who it is (`locate`) hears of all.

        A server with data parallelism is `data_parallel_size` engines with names of their own. Rank 0 of number d
        listens d ports above rank 0 of number 0, which is asked for all of them.
        """
        self._event_loop.inbox.put(e.RanksKnown(tuple(addresses), data_parallel_size))
        self._thread.start()

    def lease(self, wanted: e.LeaseRequest) -> Reference:
        """Let a target read a finished request's cache. The blocks stay the lease's until `LeaseEnded`.

        Raises RequestError for what cannot travel, and for a request whose lease has not ended, ConfigurationError
        before `start`.
        """
        self._check_started()
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

    def locate(self, address: str, number: int = 0) -> None:
        """Ask whose address it is; `Located` or `LocateFailed` follows. Of a server with data parallelism, which engine
        is meant: that whose number is `number` modulo how many there are.

        Raises RequestError for what cannot be an address, and without a token for one of another host,
        ConfigurationError before `start`.
        """
        self._check_started()
        check_address(address, self._token)
        self._submit(e.LocateRequest(address, number))

    def hold(self, wanted: e.HoldRequest) -> None:
        """Keep a remote lease alive until its request's turn comes, and connect to its source meanwhile.

        Raises RequestError for what cannot travel, and without a token for addresses of other hosts,
        ConfigurationError before `start`.
        """
        self._check_started()
        check_hold(wanted, self._token)
        self._submit(wanted)

    def fetch(self, wanted: e.FetchRequest) -> None:
        """Bring a remote cache into own blocks; `Fetched`, or `FetchFailed` and later `BlocksReleased`, follow.

        Raises RequestError for what cannot travel, for ranges that run backwards, for a request that is being fetched,
        and without a token for addresses of other hosts, ConfigurationError before `start`.
        """
        self._check_started()
        check_fetch(wanted, self._token)
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
        self._event_loop.wakeup.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the agent's thread has not stopped within {timeout_s:g} s")

    def _check_started(self) -> None:
        """Raises ConfigurationError before `start`: nobody would ever answer."""
        if self._thread.ident is None:
            raise ConfigurationError("the transfer agent has not been started", hint="call `start`, or use `with`")

    def _submit(self, event: EngineRequest) -> None:
        self._event_loop.inbox.put(event)
        self._event_loop.wakeup.notify()

    # --- the thread ---

    def _run(self) -> None:
        try:
            wait_s = 0.0
            while not self._stopping.is_set():
                wait_s = self._event_loop.run_once(wait_s)
        except Exception:
            # The top of the thread. Without it nothing moves: `alive` becomes false, which health checks see.
            logger.exception("the transfer agent of %s has stopped", self.party.engine_id)
        finally:
            try:
                self._written_arenas = tuple(self._written_by_peers())
                self._resources.close()
            finally:
                self._event_loop.notify(c.AgentStopped())

    def _written_by_peers(self) -> Iterator[Arena]:
        """Arenas that peers may still write to when the agent has ended."""
        if self._event_loop.staging.num_slots:
            yield self._arena
        # No message says that a self-test has ended, so any peer that can reach this process may still write.
        if self._event_loop.is_reached(time.monotonic()):
            yield self._probe


def _manager(config: AgentConfig, opened: Opened, buffer_device: str, peer_slots: PeerSlots | None) -> TransportManager:
    tests_s = TESTS_SHARE * config.timing.handshake_s
    context = local_context(config.transport, config.may_switch_direction, buffer_device)
    return TransportManager(config.transport, opened.transports, opened.unavailable, tests_s, context, peer_slots)


def open_agent(config: AgentConfig, cache: Cache, notify: Callable[[Notice], None]) -> Agent:
    """The agent of one rank. It listens at `address`; nothing moves before `start`, and `with` does that and `close`.

    `notify` is called on the agent's thread and must return at once. Raises ConfigurationError when the port or the
    wanted transport cannot be had, and for a device that nobody has made known or that does not go with its buffer
    device, TransportError when there is not enough memory.
    """
    if cache.device not in BUILT_IN:
        # Entry points of packages that bring devices.
        load_devices()
    check_pair(cache.device, cache.buffer_device)
    opened = open_transports(config.transport, config.host, cache.device, cache.buffer_device)
    # The agent takes them over, and closes them whatever happens: between the two nothing may fail.
    return Agent(config, cache, notify, opened.transports, opened.unavailable)
