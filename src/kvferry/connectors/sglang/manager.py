"""The manager of a scheduler process: opens the rank's agent, and answers what SGLang asks of any backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, BaseKVManager
from sglang.srt.runtime_context import get_parallel

from kvferry.connectors.sglang.construction import queue_being_made
from kvferry.connectors.sglang.description.describe import RankFacts, describe
from kvferry.connectors.sglang.description.tables import Tables
from kvferry.connectors.sglang.features import (
    forward_stream_of,
    idleness_of,
    on_all_ranks,
    ranks_to_agree,
    writing_stream_of,
)
from kvferry.connectors.sglang.rank import Rank, Ranks, check_room
from kvferry.connectors.sglang.settings import settings_from
from kvferry.devices import cache_device
from kvferry.errors import ConfigurationError, RequestError
from kvferry.options import staging_memory_named

# While nothing is computed SGLang asks without a pause, and takes from the agent's thread the core and the interpreter
# that it needs to get done. Short enough that a new request does not notice.
IDLE_WAIT_S = 0.001
BY_ROOM = "follow_bootstrap_room"
OTHER_BACKEND = "use SGLang's own backend: --disaggregation-transfer-backend nixl"


class Writing(Protocol):
    """A request of a decode engine; `is_over` once no ticket can write to its pages any more."""

    @property
    def is_over(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What SGLang asks of a prefill engine before it begins a request. Whether there is one, a receiver finds out."""

    dp_size: int = 1
    follow_bootstrap_room: bool = True


class AnyPrefill:
    """SGLang's table of prefill engines: whatever a request names is taken for one."""

    def get(self, place: str, default: object = None) -> PrefillInfo:
        return PrefillInfo()


class FerryManager(BaseKVManager):
    """One per scheduler process: the rank's agent, and the buffers in which SGLang expects first tokens."""

    # Where one rank fails, SGLang holds the pages of the request on every rank until each rank's own fetch is over.
    enable_deferred_decode_kv_release = True
    # The ranks that free those pages together, where SGLang leaves that to us.
    _ranks_to_agree: Any = None

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Raises FerryError for a configuration that cannot be served, or an agent that cannot be set up."""
        is_prefill = disaggregation_mode.value == "prefill"
        queue = queue_being_made()
        _check(queue, is_prefill)
        _check_memory(server_args)
        self.kv_args = args
        self.metadata = queue.metadata_buffers
        settings, parallel = settings_from(os.environ), get_parallel()
        pool = queue.token_to_kv_pool
        described = describe(pool, _facts(queue.scheduler))
        described.check_complete(args)
        _check_radix_cache(server_args, any(component.window_tokens for component in described.components))
        self.tables = Tables(described, tuple(str(kind.value) for kind in args.state_types), queue.scheduler)
        layout, memories = described.layout, described.memories
        # SGLang calls the device of any rank `cuda`.
        kind, number = torch.device(pool.device).type, layout.regions[0].device
        device = cache_device(torch.device(kind, number), kind, staging_memory_named(settings.staging_memory))
        self.milestone = device.milestone
        self.ranks = _ranks(parallel)
        port = server_args.disaggregation_bootstrap_port if is_prefill else 0
        self.rank = Rank(settings, layout, lambda layouts: device.cache(layouts, memories), self.ranks, port)
        self.cache = self.rank.cache_name
        # Requests that wait for nothing but a transfer, in their order. SGLang may drop one without a word.
        self._waiting = WeakKeyDictionary[object, None]()
        self._scheduler, self._is_idle = queue.scheduler, idleness_of(queue.scheduler)
        # The receivers of each room on this rank, for SGLang to ask after those that have failed.
        self._receivers: dict[int, list[Writing]] = {}
        if not is_prefill:
            _hold_failed_pages(queue.transfer_queue)
            self._ranks_to_agree = ranks_to_agree(queue.transfer_queue)
        # What SGLang reads of any manager.
        self.prefill_info_table = AnyPrefill()
        self.transfer_infos: dict[int, object] = {}
        self.request_status: dict[int, int] = {}
        self.enable_all_cp_ranks_for_transfer = self.is_dummy_cp_rank = False

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Every prefill engine is known to SGLang."""
        return True

    def register_to_bootstrap(self) -> None:
        """Nothing registers: rank 0 of a prefill engine answers for it."""

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Digests are compared before a fetch is over, whatever the layouts."""
        return False

    @property
    def is_agreed(self) -> bool:
        """Whether ranks agree here on when the pages of a failed request are free: then each of them has to hold it."""
        return self._ranks_to_agree is not None

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no ticket can write to the pages of a failed request on this rank any more; on any rank, where SGLang
        asks nobody but this one."""
        is_safe = all(receiver.is_over for receiver in self._receivers.get(bootstrap_room, ()))
        return on_all_ranks(is_safe, self._ranks_to_agree) if self.is_agreed else is_safe

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang has freed the pages of a failed request, and ends its receiver next, which is forgotten then. Another
        one may be in its room by now, and may not have begun."""

    def register(self, room: int, receiver: Writing) -> None:
        """A request that fetches. Raises RequestError for a room that cannot be, and while an earlier request of it may
        still be written to."""
        check_room(room)
        if not all(earlier.is_over for earlier in self._receivers.get(room, ())):
            raise RequestError("another request of this decode engine has the same bootstrap_room", found=str(room))
        self._receivers.setdefault(room, []).append(receiver)

    def forget(self, room: int, receiver: Writing) -> None:
        """SGLang asks after this request no more."""
        if kept := [other for other in self._receivers.pop(room, ()) if other is not receiver]:
            self._receivers[room] = kept

    def steps_so_far(self) -> Callable[[], bool]:
        """Mark the steps that SGLang has begun; what comes back says whether the device is done with them. Raises
        ConfigurationError for an SGLang that does not say where it computes.

        SGLang gives away pages of a request that has ended while a step that it had begun before still computes, and
        writes, one token more of that request. Its scheduler's own stream may bring pages back to where they were.
        """
        return self._marked(forward_stream_of(self._scheduler))

    def pages_so_far(self) -> Callable[[], bool]:
        """Mark the steps that write the pages which SGLang hands over now; what comes back says whether the device is
        done with them. A pipeline hands over pages of a step that it has only begun, on a stream of its own."""
        return self._marked(writing_stream_of(self._scheduler))

    def _marked(self, stream: Any) -> Callable[[], bool]:
        """Whether the device is done with what it was given by now, on the current stream and on that one."""
        ends = [self.milestone(each) for each in dict.fromkeys((None, stream))]
        return lambda: all(is_done() for is_done in ends)

    def wait_while_idle(self, request: object) -> bool:
        """Wait a moment for news, in place of being asked again and again: whether there is some. The first request
        that waits does so for all, and only while SGLang computes nothing."""
        self._waiting.setdefault(request, None)
        if next(iter(self._waiting)) is not request or not self._is_idle():
            return False
        return self.rank.wait_for_news(IDLE_WAIT_S)

    def end_wait(self, request: object) -> None:
        """A request waits no more."""
        self._waiting.pop(request, None)

    def submit_prefill_recompute(self, kv_receiver: Any, payload: object) -> None:
        """A request that SGLang has taken back cannot be computed anew by its prefill engine: it fails."""
        kv_receiver.abort()


class FerryBootstrapServer(BaseKVBootstrapServer):
    """Opens nothing: rank 0 of a prefill engine answers at the bootstrap port, and only to agents."""

    def __init__(self, host: str, port: int) -> None:
        pass


def _ranks(parallel: Any) -> Ranks:
    """Where this process is. With `attn_dp_size` the ranks of all engines are one group, in each stage those of one
    engine after those of another, and `dp_size` may say the same once more. With `dp_size` alone each has its own."""
    stages, in_stage, engines = parallel.pp_size, parallel.tp_size, parallel.attn_dp_size or 1
    width, number = in_stage // engines, parallel.attn_dp_rank if engines > 1 else 0
    members = tuple(stage * in_stage + number * width + rank for stage in range(stages) for rank in range(width))
    rank = parallel.pp_rank * width + parallel.attn_tp_rank
    group = parallel.world_group.cpu_group
    if engines == 1 and (parallel.dp_size or 1) > 1:
        number, engines = parallel.dp_rank or 0, parallel.dp_size
    return Ranks(members, rank, stages * in_stage, group, number, engines)


def _facts(scheduler: Any) -> RankFacts:
    model, parallel = scheduler.model_config, get_parallel()
    groups = (getattr(model.hf_text_config, name, None) for name in ("mamba_n_groups", "n_groups"))
    return RankFacts(
        parallel.attn_tp_rank,
        parallel.attn_tp_size,
        int(model.get_total_num_kv_heads()),
        int(model.get_swa_num_kv_heads(1)),
        next((int(number) for number in groups if number), 0),
        # SGLang counts the tokens before the one that sees them.
        (scheduler.sliding_window_size or 0) + 1,
    )


def _hold_failed_pages(transfer_queue: Any) -> None:
    """Pages of a failed request stay for as long as something may write to them on any rank. Raises ConfigurationError
    where SGLang is told to free them at once."""
    if not transfer_queue.enable_deferred_kv_release:
        raise ConfigurationError(
            "pages of a failed request must stay until nothing writes to them any more",
            found="SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0",
            hint="leave it out",
        )
    # SGLang would free them after 30 seconds in any case. A source that was stopped may go on writing after that.
    transfer_queue.deferred_kv_release_timeout = inf


def _check_memory(server_args: Any) -> None:
    """Raises ConfigurationError where SGLang may take the memory of the caches away, and map other memory there."""
    if getattr(server_args, "enable_memory_saver", False):
        raise ConfigurationError(
            "kvferry does not follow caches whose memory is released and comes back yet",
            found="--enable-memory-saver",
            hint=f"leave it out, or {OTHER_BACKEND}",
        )


def _check_radix_cache(server_args: Any, has_windows: bool) -> None:
    """Raises ConfigurationError where later prompts would find what was never written: of a window only what the next
    token sees is fetched, and SGLang keeps the whole page in which that begins."""
    if has_windows and getattr(server_args, "disaggregation_decode_enable_radix_cache", False):
        raise ConfigurationError(
            "a decode server does not keep fetched caches of layers with windows for other prompts",
            found="--disaggregation-decode-enable-radix-cache, and layers with windows",
            hint=f"leave it out, or {OTHER_BACKEND}",
        )


def _check(queue: Any, is_prefill: bool) -> None:
    """Raises ConfigurationError for ways to run SGLang that are not supported yet."""
    parallel = get_parallel()
    refused = ("attn_cp_size", "dcp_size")
    for name in refused if is_prefill else ("pp_size", *refused):
        if (getattr(parallel, name, 1) or 1) > 1:
            raise ConfigurationError(
                "kvferry does not serve this way to divide an SGLang engine yet",
                found=f"{name} {getattr(parallel, name)}",
                expected="tensor and data parallelism, and pipeline parallelism of a prefill engine",
                hint=OTHER_BACKEND,
            )
    is_divided = (parallel.dp_size or 1) * (parallel.attn_dp_size or 1) > 1
    if is_prefill and is_divided and parallel.load_balance_method != BY_ROOM:
        raise ConfigurationError(
            "nobody could tell which engine of this server has computed a prompt",
            found=f"--load-balance-method {parallel.load_balance_method}",
            expected=BY_ROOM,
            hint="leave it out",
        )
    if not queue.scheduler.spec_algorithm.is_none():
        what = "kvferry does not carry what speculative decoding needs of a prefill yet"
        raise ConfigurationError(what, found=str(queue.scheduler.spec_algorithm), hint=OTHER_BACKEND)
