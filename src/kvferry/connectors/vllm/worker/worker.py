"""The half in each of vLLM's workers: owns the rank's agent, carries orders to it and reports what has ended.

The agent has a thread of its own, so that bytes move and heartbeats go on whatever the engine does. vLLM is told of
every request exactly once: an id that it does not expect ends the engine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry import (
    Agent,
    AgentStopped,
    FetchRequest,
    LeaseEnded,
    LeaseRequest,
    Located,
    LocateFailed,
    Notice,
    Reason,
    Reference,
)
from kvferry.connectors.early_lease import new_key
from kvferry.connectors.timing import SWITCH_S
from kvferry.connectors.vllm.features import LOAD_BEFORE_STEPS, TransferResults, block_tokens, failed_blocks, neighbours
from kvferry.connectors.vllm.metadata import FetchOrder, LeaseOrder, Orders, PromiseOrder, RankAddress, agent_name
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.stats import FerryStats, Moved
from kvferry.connectors.vllm.worker.lookups import Lookups
from kvferry.connectors.vllm.worker.open_requests import OpenRequests
from kvferry.connectors.vllm.worker.rank_agent import RankAgent, RankAgents
from kvferry.connectors.vllm.worker.rank_cache import RankCache, of_tensors
from kvferry.connectors.vllm.worker.ranks import addresses
from kvferry.connectors.vllm_middleware.worker_reports import CHILD, names_of
from kvferry.connectors.vllm_middleware.workers import RELEASED
from kvferry.errors import ConfigurationError

logger = logging.getLogger(__name__)

# While nothing is computed vLLM asks step after step, without a pause, and takes from the agent's thread the core and
# the interpreter that it needs to get done. Short enough that a new request does not notice.
IDLE_WAIT_S = 0.003
MAX_EARLY_RELEASES = 1024


class Worker:
    """Made by vLLM in each worker process; its methods are called between the engine's steps."""

    def __init__(self, config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._settings = settings
        self._kv_cache_config = kv_cache_config
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._started: list[RankAgent] = []
        self._caches: Mapping[str, torch.Tensor] = {}
        self._key = new_key()
        self._open = OpenRequests(settings.is_loss_fatal)
        self._agents = RankAgents(config, settings, kv_cache_config, self._notices.put, self._open)
        # Beside others, what a step has computed may be computed again in the next.
        self._tells_early = LOAD_BEFORE_STEPS.issuperset(neighbours(config))
        self._is_idle = False
        self._moved = Moved()
        self._lookups = self._no_lookups()
        # A step may bring a lease after vLLM's client has brought its end. For a withdrawn name only the next step does
        # so: what a later one brings is of another request, whose caller has used the name again.
        self._released: deque[tuple[str, str]] = deque(maxlen=MAX_EARLY_RELEASES)
        self._withdrawn_names: deque[str] = deque(maxlen=MAX_EARLY_RELEASES)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe this rank's caches, meet the other ranks of the engine, and start the agent.

        Raises LayoutError for caches that cannot be described, ConfigurationError when the agent cannot be set up.
        """
        self._caches = kv_caches
        ours = of_tensors(self._config, self._settings, self._kv_cache_config, kv_caches)
        self.start(addresses(self.open(ours), len(ours.cache.layouts)))

    def open(self, ours: RankCache) -> str:
        """Open the agent of a rank, and say where it listens. Raises ConfigurationError when it cannot be set up."""
        opened = self._agents.open(ours)
        self._started.append(opened)
        return opened.agent.address

    def start(self, everyone: Sequence[str]) -> None:
        """Let the agent begin; `everyone` is where the agents of all ranks listen, in their order."""
        agent = self._ours().agent
        sys.setswitchinterval(SWITCH_S)
        agent.start(everyone)
        logger.info("kvferry rank %d of %d listens at %s", agent.party.rank, len(everyone), agent.address)

    def unregister(self) -> None:
        """Let go of the caches before vLLM gives their memory away. Safe to call twice.

        Every lease and every fetch ends here: peers that read are told, or find nobody, and none of them takes what it
        has read for valid. What was fetched is gone as well, if vLLM has not heard of it.
        """
        for started in self._started:
            self._end_fetches(started.agent)
            started.agent.close()
            if started.is_on_device:
                # Sources write there by NIXL alone. It has taken its registration back, and what vLLM wakes up with is
                # other memory: a late write goes nowhere. A process that may write to the host's memory keeps that.
                self._open.stopped(())
            self._take_notices()
            self._open.lose_fetched()
            self._moved.agent_ended(started.agent.moved_bytes)
        self._started = []

    def _end_fetches(self, agent: Agent) -> None:
        """End what is being fetched, and wait until no source writes to its blocks, as long as anything may be heard of
        that."""
        self._open.has_stopped = True
        for name in self._open.begun_fetches:
            agent.abort(name)
        timing = self._settings.agent.timing
        deadline = time.monotonic() + timing.silence_s + timing.fence_s
        while agent.alive and self._open.begun_fetches and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._note(self._notices.get(timeout=left_s))

    def restore(self) -> None:
        """The caches' memory is there again, and empty: meet the other ranks, which are asked as well, and begin anew
        in a new epoch. Safe to call twice."""
        if self._caches and not self._started:
            self._open.has_stopped = False
            self._lookups = self._no_lookups()
            self.register(self._caches)

    def _no_lookups(self) -> Lookups:
        return Lookups(self._open, lambda *asked: self._ours().agent.locate(*asked), self._fetch)

    def address(self) -> RankAddress:
        """Where this rank's agent listens. Raises ConfigurationError before `register`."""
        agent = self._ours().agent
        return RankAddress(agent.address, agent.party.epoch, self._key)

    def _ours(self) -> RankAgent:
        for started in self._started:
            return started
        if self._caches:
            raise ConfigurationError("this engine sleeps, and has no caches", hint="wake it up: POST /wake_up")
        raise ConfigurationError("vLLM has not registered its caches", hint="report this with vLLM's version")

    # --- orders ---

    def obey(self, orders: Orders) -> None:
        """Begin what the scheduler has decided. Called before the step's forward pass."""
        self._is_idle = orders.is_idle
        for ours in self._started:
            ours.deferred.look()
            self._obey_early(ours, orders)
        self._obey_leases(orders)
        for ours in self._started:
            for hold in orders.holds:
                ours.agent.hold(hold)
        for fetch in orders.fetches:
            self._fetch(fetch)
        for request_id in orders.aborted:
            if not self._lookups.abort(request_id) and self._open.is_fetching(request_id):
                ours = self._ours()
                ours.deferred.give(partial(ours.agent.abort, agent_name(request_id)))

    def _obey_leases(self, orders: Orders) -> None:
        for lease in orders.leases:
            self._lease(lease)
        self._withdrawn_names.clear()
        for leased in self._open.ended_leases if orders.is_reset else ():
            self._withdraw(leased)

    def layer_ended(self, layer: str) -> None:
        """Note, in the forward pass, that a layer has done all its work, or that the device has been told to do it."""
        for ours in self._started:
            ours.early_prefills.layer_ended(layer)

    def _lease(self, order: LeaseOrder) -> None:
        name = self._open.lease(order)
        if any(caller in self._withdrawn_names for caller in names_of(CHILD.sub("", order.request_id))):
            self._released.append((name, order.lease_id))
        if self._is_over():
            self._notices.put(LeaseEnded(name, "withdrawn"))
            return
        ours = self._ours()
        tables = ours.described.tables(order.block_tables)
        wanted = LeaseRequest(
            name, order.lease_id, tables, order.num_tokens, False, order.prompt, False, order.first_token
        )
        ours.deferred.give(partial(self._tell_lease, wanted))

    def _tell_lease(self, wanted: LeaseRequest) -> None:
        agent = self._ours().agent
        agent.lease(wanted)
        if (wanted.request_id, wanted.lease_id) in self._released:
            agent.withdraw(wanted.request_id)

    def _obey_early(self, ours: RankAgent, orders: Orders) -> None:
        for promise in orders.promises:
            self._promise(ours, promise)
        self._open.begun(orders.begun)
        ours.early_prefills.withdraw(orders.withdrawn)
        ours.early_prefills.step(orders.growths if self._tells_early else ())
        for end in orders.ended:
            ours.early_prefills.end(end)

    def _promise(self, ours: RankAgent, order: PromiseOrder) -> None:
        if self._is_over():
            return
        ours.early_prefills.promise(order)
        if (order.name, order.lease_id) in self._released:
            ours.agent.withdraw(order.name)

    def withdraw(self, names: Sequence[str]) -> None:
        """Take promises back, before anything is written to their blocks."""
        for ours in self._started:
            ours.early_prefills.withdraw(names)

    def _fetch(self, order: FetchOrder) -> None:
        if order.error or self._is_over():
            reason = Reason.MALFORMED if order.error else Reason.ABORTED
            self._open.refuse(order, reason, order.error or "the transfer agent has stopped")
            return
        name = self._open.fetch(order)
        if not order.is_located:
            self._lookups.ask(order)
            return
        ours = self._ours()
        tables, ranges = ours.described.tables(order.block_tables), ours.described.ranges(order.ranges)
        wanted = FetchRequest(name, order.reference, order.addresses, tables, ranges, prompt=order.prompt)
        ours.deferred.give(partial(self._open.begin, name, partial(ours.agent.fetch, wanted)))

    def _is_over(self) -> bool:
        # `AgentStopped` comes a moment before the agent has ended.
        return self._open.has_stopped or not self._ours().agent.alive

    # --- asked by vLLM's API server ---

    @property
    def facts(self) -> dict[str, str]:
        """Who this engine is, and what its own front end needs for early prefills."""
        ours = self._ours()
        party = ours.agent.party
        return {
            "version": vllm.__version__,
            "engine_id": party.engine_id,
            "epoch": party.epoch,
            "cache": ours.cache,
            "address": ours.agent.address,
            "early": "yes" if ours.may_grow else "",
            "key": self._key,
        }

    def release(self, reference: Reference) -> str:
        """End a lease that nobody will read. Return `released`, or the reason why there is none.

        vLLM hears of its end as of any other's: `LeaseEnded` follows.
        """
        agent = self._ours().agent
        if _without_replica(reference.engine_id) != _without_replica(agent.party.engine_id):
            return str(Reason.WRONG_ENGINE)
        if reference.engine_id != agent.party.engine_id:
            # All replicas of data parallelism are asked, and the first one answers for them.
            return str(Reason.UNKNOWN_LEASE)
        if reference.epoch != agent.party.epoch:
            return str(Reason.WRONG_EPOCH)
        lease = reference.request_id, reference.lease_id
        if not self._open.is_leased(*lease):
            self._released.append(lease)
            return str(Reason.UNKNOWN_LEASE)
        self._withdraw(lease)
        return RELEASED

    def withdraw_leases(self, names: Sequence[str]) -> bool:
        """End the leases of requests that callers gave these names and whose answers nobody has got: nobody can release
        them.

        Return whether there was one. A request may have ended after the last step: then the next one brings its lease.
        """
        self._withdrawn_names.extend(names)
        found = self._open.leases_of(frozenset(names))
        for lease in found:
            self._withdraw(lease)
        return bool(found)

    def withdraw_all(self) -> None:
        """End every lease: what was leased is not there any more."""
        for lease in self._open.leases:
            self._withdraw(lease)

    def _withdraw(self, lease: tuple[str, str]) -> None:
        """End a lease, by its request and its id, also if the agent has not heard of it yet."""
        self._released.append(lease)
        self._ours().agent.withdraw(lease[0])

    # --- what has ended ---

    def results(self) -> TransferResults:
        """Every request whose transfer has ended since the last call, exactly once.

        In a step that computes nothing a transfer that is under way has a moment to end.
        """
        if self._is_idle and self._open.num_open:
            with contextlib.suppress(queue.Empty):
                self._note(self._notices.get(timeout=IDLE_WAIT_S))
        self._take_notices()
        for ours in self._started:
            ours.early_prefills.look()
            ours.deferred.look()
        return self._open.take_results()

    def failed_blocks(self) -> set[int]:
        """The blocks of fetches that have failed, for a vLLM that is told of blocks: its caches are one group then."""
        lost = self._open.take_lost()
        size = block_tokens(self._config, self._kv_cache_config) if lost else 1
        return {block for order in lost for block in failed_blocks(order.block_tables, order.ranges[0].first, size)}

    def _take_notices(self) -> None:
        while not self._notices.empty():
            self._note(self._notices.get())

    def _note(self, notice: Notice) -> None:
        if isinstance(notice, AgentStopped):
            self._open.stopped(self._ours().agent.written_ids)
        elif isinstance(notice, Located | LocateFailed):
            self._lookups.note(notice)
        else:
            self._open.note(notice)

    def take_stats(self) -> FerryStats:
        """What happened since the last call."""
        stats = self._open.take_stats()
        for moved_bytes in [ours.agent.moved_bytes for ours in self._started] or [{}]:
            self._moved.tell(moved_bytes, stats)
        return stats

    def close(self) -> None:
        """Stop the agent. Safe to call twice."""
        for started in self._started:
            started.agent.close()
        self._started = []


def _without_replica(engine_id: str) -> str:
    """Return an engine's name without the number that vLLM adds for each replica of data parallelism."""
    return re.sub(r"_dp\d+$", "", engine_id)
