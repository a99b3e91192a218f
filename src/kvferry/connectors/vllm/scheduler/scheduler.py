"""The half in vLLM's scheduler: decides what is fetched and what is kept, and writes it down for the workers.

It only sees requests and block ids. Nothing here waits, and nothing here may raise while a request is served: an
exception in a scheduler hook ends the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request, RequestStatus

from kvferry import HoldRequest, Reason, Reference, TokenRange, new_lease_id
from kvferry.connectors.vllm.description.groups import forgets, may_grow
from kvferry.connectors.vllm.metadata import FetchOrder, LeaseOrder, Orders, RankAddress, Tables, agent_name
from kvferry.connectors.vllm.scheduler.early_leases import Promised
from kvferry.connectors.vllm.scheduler.expected_prompts import Expected
from kvferry.connectors.vllm.scheduler.first_token import first_token_of
from kvferry.connectors.vllm.scheduler.prompts import Prompts
from kvferry.connectors.vllm.scheduler.readers import Readers, Turn
from kvferry.connectors.vllm.scheduler.skipped_transfers import (
    ALREADY_READ,
    NOT_A_CONSUMER,
    PAST_PROMPT,
    STEP_UNDER_WAY,
    Declined,
)
from kvferry.connectors.vllm.scheduler.unfilled_blocks import UnfilledBlocks
from kvferry.connectors.vllm.stats import FerryStats
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import Reach, from_params, to_params

logger = logging.getLogger(__name__)

FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
NOBODY = Reference("", "", "", "")
NULL_BLOCK = 0
"""vLLM's block that stands for none, in tables whose window has moved on."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a server is set to do.

    The decode side computes the last `num_recomputed` tokens of a prompt itself: the last one in any case.
    `context_parallel` ranks share the tokens of a block table. vLLM waits for the steps under way before it hands out
    their blocks only where it `may_fetch`.
    """

    reach: Reach = Reach.THIS_HOST
    num_recomputed: int = 1
    context_parallel: int = 1
    may_fetch: bool = True


class Scheduler:
    """Stages orders; `take_orders` hands them over at each step."""

    def __init__(
        self, engine_id: str, kv_cache_config: KVCacheConfig, prompts: Prompts, terms: Terms = Terms()
    ) -> None:
        self._engine_id = engine_id
        self._prompts = prompts
        self._terms = terms
        self._config = kv_cache_config
        self._orders = Orders()
        self._ranks: tuple[RankAddress, ...] = ()
        # Of requests that have not ended, by id and never in their parameters, which a client has written: vLLM calls
        # some hooks twice, and again after a preemption.
        self._fetched: set[str] = set()
        self._truncated: set[str] = set()
        self._computed: dict[str, int] = {}
        self._declined = Declined()
        self._expected = Expected(prompts, self._declined)
        self._readers = Readers()
        self._releases = itertools.count()
        specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
        self._block_tokens = max((spec.block_size for spec in specs), default=1)
        self._fixed = tuple(isinstance(spec, MambaSpec) for spec in specs)
        self._scratch = tuple(spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0 for spec in specs)
        self._forgets = forgets(kv_cache_config)
        self.unfilled = UnfilledBlocks(kv_cache_config, terms.context_parallel)
        may_tell = may_grow(kv_cache_config)
        self._promised = Promised(self._tables, prompts, self._declined, may_tell, any(self._fixed))

    def set_ranks(self, ranks: tuple[RankAddress, ...]) -> None:
        """Where the agents of all ranks listen, in the order of the ranks."""
        self._ranks = ranks

    # --- requests come and go ---

    def on_new_request(self, request: Request) -> None:
        """A request has arrived, and may wait long for its turn."""
        self._prompts.begin(request)
        params: object = request.kv_transfer_params or {}
        if not isinstance(params, dict):
            # Older vLLM lets anything pass that a client has put there as `vllm_xargs`.
            request.kv_transfer_params = None
            self._declined.fetch(request.request_id, Reason.MALFORMED, f"{params!r:.100} are no parameters")
            return
        if params.get("do_remote_prefill") and not self._terms.may_fetch:
            params["do_remote_prefill"] = False
            words = "the kv_role of this server is kv_producer, and not kv_consumer or kv_both"
            self._declined.fetch(request.request_id, NOT_A_CONSUMER, words)
            self._release(request.request_id, params)
        if params.get("do_remote_prefill"):
            self._hold(request.request_id, params)
        if params.get("do_remote_decode"):
            self._shorten(request)
            self._promised.begin(request, self._ranks[0].key if self._ranks else "", self._orders)

    def _hold(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Whatever becomes of the request, a fetch follows, if only one of nothing that releases the source."""
        try:
            remote = from_params(params, self._terms.reach)
        except TransferError:
            return  # It is said when its turn comes.
        self._readers.arrive(request_id, remote.reference)
        if not remote.is_located:
            return  # A room's engine is asked for when there are blocks.
        self._orders.holds.append(HoldRequest(remote.reference, remote.addresses))

    def _shorten(self, request: Request) -> None:
        """Let a prefill stop before the tokens that the decode side computes itself, where it could not do that from
        behind them: from a recurrent state after them, or with a window that has moved past what they see.
        """
        # To a request that is continued later, what comes then is added behind what there is now.
        if not self._forgets or request.resumable or request.request_id in self._truncated:
            return
        num_left, is_read = self._terms.num_recomputed, not request.get_skip_reading_prefix_cache()
        if request.num_prompt_tokens > num_left and request.prompt_token_ids and is_read:
            # Several answers to a prompt share this list where vLLM's engine runs in the process that asks it.
            request.prompt_token_ids = request.prompt_token_ids[:-num_left]
            del request._all_token_ids[-num_left:]
            request.num_prompt_tokens -= num_left
            request.max_tokens = 1
            self._truncated.add(request.request_id)

    def num_new_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens behind the computed ones can be fetched: all but those that are computed here. None while
        that is not known, and others get on."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0
        if not self._prompts.is_ready(request):
            return None
        for prompt in self._expected.prompt(request):
            turn = self._readers.turn(request.request_id, prompt)
            if turn is Turn.WAIT:
                return None
            self._computed[request.request_id] = num_computed_tokens
            num_missing = max(0, self._num_wanted(request, params) - num_computed_tokens)
            if turn is Turn.FETCH:
                return num_missing
            self._readers.found(request.request_id, num_missing)
        return 0

    def _num_wanted(self, request: Request, params: Mapping[str, Any]) -> int:
        """The client's word about how many there are is only good for asking for fewer."""
        wanted, offered = request.num_prompt_tokens - self._terms.num_recomputed, params.get("remote_num_tokens")
        if isinstance(offered, int) and not isinstance(offered, bool) and offered >= 0 and not any(self._fixed):
            return min(wanted, offered)
        return wanted

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """The request has blocks. vLLM says so again when they are filled: only the first time counts."""
        params = request.kv_transfer_params
        if request.request_id in self._fetched:
            self._readers.fetched(request.request_id)
            self.unfilled.end(request.request_id)
            return
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        if num_external_tokens <= 0:
            # Of a block that is not full nothing is cached.
            if self._readers.num_missing(request.request_id) >= self._block_tokens:
                self._declined.fetch(request.request_id, ALREADY_READ, "another request here has fetched its cache")
            self._release_if_nobodys(request.request_id, params)
            return
        self._fetched.add(request.request_id)
        (prompt,) = self._expected.prompt(request)
        self._readers.fetch(request.request_id, prompt)
        self._expected.forget(request.request_id)
        # vLLM may load fewer than it was offered, and then leaves out the last ones.
        first = self._computed.get(request.request_id, 0)
        wanted = TokenRange(first, first + num_external_tokens)
        self.unfilled.fetch(request.request_id, self._config.select_transfer_block_ids(block_ids), wanted)
        tables = self._tables(block_ids)
        ranges = (wanted,) * len(tables)
        order = _fetch(request.request_id, params, tables, ranges, self._terms.reach)
        self._orders.fetches.append(replace(order, prompt=prompt.name(order.reference.lease_id, wanted.last)))

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and the parameters for the decode side."""
        answer = self._finished(request, block_ids)
        self._prompts.end(request)
        return answer

    def _finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        was_fetched = request.request_id in self._fetched
        self._forget(request.request_id)
        params = request.kv_transfer_params
        if not params:
            self._readers.end(request.request_id)
            return False, None
        if was_fetched and request.status not in FINISHED_WELL:
            self._orders.aborted.append(request.request_id)
        if params.get("do_remote_prefill"):
            # It was never scheduled: the source must not wait for it.
            params["do_remote_prefill"] = False
            self._release_if_nobodys(request.request_id, params)
        self._readers.end(request.request_id)
        is_well = request.status in FINISHED_WELL
        for is_kept in self._promised.end(request, block_ids, is_well, self._orders):
            # Who was promised it has the reference.
            return is_kept, None
        if not params.get("do_remote_decode") or not is_well:
            return False, None
        return self._offer(request, self._tables(block_ids))

    def sent(self, request_ids: Iterable[str]) -> None:
        """The leases of these requests are over on every rank."""
        self._promised.sent(request_ids)

    def _forget(self, request_id: str) -> None:
        self._fetched.discard(request_id)
        self.unfilled.end(request_id)
        self._truncated.discard(request_id)
        self._computed.pop(request_id, None)
        self._expected.forget(request_id)

    def _offer(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        if not self._ranks or not any(tables):
            return False, None
        num_tokens = _num_settled(request)
        if self._forgets and num_tokens < request.num_computed_tokens:
            words = "a step that was begun before its answer ended goes on from what its layers keep"
            self._declined.offer(request.request_id, STEP_UNDER_WAY, words)
            return False, None
        if any(self._scratch) and num_tokens > request.num_prompt_tokens:
            words = "how many of a speculator's tokens were right decides which block has the state after its answer"
            self._declined.offer(request.request_id, PAST_PROMPT, words)
            return False, None
        try:
            prompt = self._prompts.of(request, num_tokens)
        except RequestError as error:
            self._declined.offer(request.request_id, Reason.UNNAMED_PROMPT, str(error))
            return False, None
        first = first_token_of(request, num_tokens)
        lease = LeaseOrder(request.request_id, new_lease_id(), tables, num_tokens, prompt, first)
        self._orders.leases.append(lease)
        reference = Reference(self._engine_id, self._ranks[0].epoch, agent_name(lease.request_id), lease.lease_id)
        return True, to_params(reference, [rank.address for rank in self._ranks], tables, lease.num_tokens)

    def _release_if_nobodys(self, request_id: str, params: Mapping[str, Any]) -> None:
        if self._readers.is_nobodys(request_id):
            self._release(request_id, params)

    def _release(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Tell the source that nobody will read; parameters that cannot be read name no source.

        vLLM's front end sends a request that it has refused or that has failed once more, only to end it: the source
        may be told twice, under two names.
        """
        name, nothing = f"{request_id}:release-{next(self._releases)}", TokenRange(0, 0)
        num_groups = len(self._fixed)
        order = _fetch(name, params, ((),) * num_groups, (nothing,) * num_groups, self._terms.reach)
        if order.error:
            logger.debug("request %s: %s", request_id, order.error)
        else:
            self._orders.fetches.append(order)

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step has been planned; it has not been carried out."""
        self.unfilled.scheduled()
        self._promised.step(output, self._orders)

    def reset(self) -> None:
        """Nobody is to read any more what was computed before, such as with other weights."""
        self._orders.is_reset = True

    def take_stats(self) -> FerryStats:
        """What has been declined since the last call."""
        return self._declined.take_stats()

    def close(self) -> None:
        """Nothing is asked any more."""
        self._prompts.close()

    def take_orders(self, is_idle: bool) -> Orders:
        """What has been staged since the last step. With `is_idle` the step computes nothing."""
        orders, self._orders = self._orders, Orders()
        orders.is_idle = is_idle
        return orders

    def _tables(self, block_ids: tuple[list[int], ...]) -> Tables:
        """Block tables of the groups that move. A recurrent state has one block: the running one."""
        chosen = self._config.select_transfer_block_ids(block_ids)
        return tuple(
            _running(blocks, scratch) if fixed else tuple(_named(block, self._config.num_blocks) for block in blocks)
            for blocks, fixed, scratch in zip(chosen, self._fixed, self._scratch, strict=True)
        )


def _num_settled(request: Request) -> int:
    """How many tokens of a request that has ended are computed, and are what the answer says.

    With asynchronous scheduling the next step has begun before the token is known that ends the answer, and vLLM counts
    what that step would compute. A speculator may have been right beyond the end.
    """
    return min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)


def _named(block: int, num_blocks: int) -> int:
    """A block that is none gets an id that no block has, so that reading it is refused."""
    return num_blocks if block == NULL_BLOCK else block


def _running(blocks: list[int], num_scratch: int) -> tuple[int, ...]:
    """The last block, behind which speculative decoding may keep some of its own."""
    kept = len(blocks) - min(num_scratch, max(0, len(blocks) - 1))
    return tuple(blocks[kept - 1 : kept])


def _fetch(
    request_id: str, params: Mapping[str, Any], tables: Tables, ranges: tuple[TokenRange, ...], reach: Reach
) -> FetchOrder:
    is_waited_for = any(len(tokens) for tokens in ranges)
    try:
        remote = from_params({**params, "do_remote_prefill": True}, reach)
    except TransferError as error:
        return FetchOrder(request_id, NOBODY, (), tables, ranges, is_waited_for, str(error))
    return FetchOrder(request_id, remote.reference, remote.addresses, tables, ranges, is_waited_for, "")
