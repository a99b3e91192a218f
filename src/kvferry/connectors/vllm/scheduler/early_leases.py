"""The early prefills of the scheduler's half: prefills whose cache is promised before it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvferry import Reason
from kvferry.connectors.early_lease import Promise, unsealed
from kvferry.connectors.vllm.features import blocks_of
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, Orders, PromiseOrder, Tables
from kvferry.connectors.vllm.scheduler.first_token import first_token_of
from kvferry.connectors.vllm.scheduler.prompts import Prompts
from kvferry.connectors.vllm.scheduler.rooms import Rooms
from kvferry.connectors.vllm.scheduler.skipped_transfers import PAST_PROMPT, Declined
from kvferry.errors import RequestError
from kvferry.kv_transfer_params import room_names, room_of

Blocks = tuple[list[int], ...]

# Requests that vLLM makes of one come within moments of each other.
MAX_MADE = 1024


@dataclass(slots=True)
class _Prefill:
    """A promised prefill. `num_told` of the prompt's `num_tokens` tokens are computed by the steps that have been
    ordered, if it `has_begun`. At most `growing` of them may be told step by step. What is in its cache has a name if
    it `is_named`."""

    request: Request
    promise: Promise
    num_tokens: int
    growing: int
    is_named: bool
    num_told: int = 0
    has_begun: bool = False


class Promised:
    """The promised prefills by the id of the request. `tables` makes kvferry's tables of vLLM's blocks. With `may_grow`
    what is computed is told step by step, else all of it at the end. With `has_states` some layers keep nothing but a
    state after the last token."""

    def __init__(
        self,
        tables: Callable[[Blocks], Tables],
        prompts: Prompts,
        declined: Declined,
        may_grow: bool,
        has_states: bool = False,
    ) -> None:
        self._tables = tables
        self._prompts = prompts
        self._declined = declined
        self._may_grow = may_grow
        self._has_states = has_states
        self._prefills: dict[str, _Prefill] = {}
        # Requests that go on without the promise that was made for them.
        self._broken: set[str] = set()
        self._made: deque[Promise] = deque(maxlen=MAX_MADE)
        # Requests whose adapters are still being read: a claim waits longer for its lease than that takes.
        self._unread: dict[str, tuple[Request, Promise]] = {}
        self._rooms = Rooms()

    def begin(self, request: Request, key: str, orders: Orders) -> None:
        """Promise the cache of a request that has arrived, if our front end has said so, or if it is in a room."""
        params = request.kv_transfer_params or {}
        # A request that is continued later gets a prompt that is not known yet.
        if request.resumable or params.get("do_remote_prefill"):
            return
        promise = self._sealed(params, key) or self._in_room(request, params)
        if promise is not None:
            self._unread[request.request_id] = request, promise
            self._promise_read(orders)

    def _sealed(self, params: Mapping[str, Any], key: str) -> Promise | None:
        """The promise in a request's parameters. Of several requests made of one, only the first ever has it."""
        promise = unsealed(params, key)
        if promise is None or promise in self._made:
            return None
        self._made.append(promise)
        return promise

    def _in_room(self, request: Request, params: Mapping[str, Any]) -> Promise | None:
        """Return the promise for a room, or None. The decode engine knows its names without being told."""
        try:
            room = room_of(params)
        except RequestError as error:
            self._declined.offer(request.request_id, Reason.MALFORMED, str(error))
            return None
        if room is None:
            return None
        promise = Promise(*room_names(room))
        if self._rooms.enter(request.request_id, promise.name):
            return promise
        self._declined.offer(request.request_id, Reason.ALREADY_CLAIMED, "another request is in its room")
        return None

    def _promise_read(self, orders: Orders) -> None:
        """Make the promises whose adapters have been read. The scheduler does not wait for the files of others."""
        for request, promise in list(self._unread.values()):
            if self._prompts.is_ready(request):
                self._promise(request, promise, orders)

    def _promise(self, request: Request, promise: Promise, orders: Orders) -> None:
        """Order a promise, even for a prompt that has no name: the caller has, or gets, the reference, and has to be
        told why it is no good."""
        del self._unread[request.request_id]
        num_tokens = request.num_prompt_tokens
        order = PromiseOrder(promise.name, promise.lease_id, num_tokens)
        try:
            order = replace(order, prompt=self._prompts.of(request, num_tokens))
        except RequestError as error:
            order = replace(order, is_unnamed=True)
            self._declined.offer(request.request_id, Reason.UNNAMED_PROMPT, str(error))
        # In a room, the last token is told together with the one that follows.
        growing = num_tokens - (request.request_id in self._rooms)
        self._prefills[request.request_id] = _Prefill(request, promise, num_tokens, growing, not order.is_unnamed)
        orders.promises.append(order)

    def step(self, output: SchedulerOutput, orders: Orders) -> None:
        """Order what a step takes back, and what it computes."""
        self._promise_read(orders)
        for request_id in output.preempted_req_ids or ():
            self._break(request_id, orders)
        for request_id in self._renamed():
            self._declined.offer(
                request_id, Reason.UNNAMED_PROMPT, "its adapter has been replaced while it is computed"
            )
            self._break(request_id, orders)
        if not self._prefills:
            return
        for request_id, first in _firsts(output):
            prefill = self._prefills.get(request_id)
            if prefill is not None and not prefill.has_begun:
                prefill.has_begun = True
                orders.begun.append(prefill.promise.name)
            if prefill is not None and self._may_grow:
                self._grow(request_id, prefill, first + output.num_scheduled_tokens[request_id], output, orders)

    def _renamed(self) -> list[str]:
        """The requests whose adapter has been replaced since their cache was promised."""
        return [request_id for request_id, prefill in self._prefills.items() if not self._is_as_promised(prefill)]

    def _is_as_promised(self, prefill: _Prefill) -> bool:
        return not prefill.is_named or self._prompts.is_certain(prefill.request)

    def _grow(
        self, request_id: str, prefill: _Prefill, num_computed: int, output: SchedulerOutput, orders: Orders
    ) -> None:
        state, num_tokens = output.kv_connector_block_state, min(num_computed, prefill.growing)
        if state is None or num_tokens <= prefill.num_told:
            return
        blocks = blocks_of(state, request_id)
        if blocks is not None:
            prefill.num_told = num_tokens
            orders.growths.append(GrowthOrder(prefill.promise.name, self._tables(blocks), num_tokens))

    def _break(self, request_id: str, orders: Orders) -> None:
        """Take a promise back: vLLM takes the blocks away and computes all again, or the adapter has been replaced."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            self._broken.add(request_id)
            orders.withdrawn.append(prefill.promise.name)

    def end(self, request: Request, blocks: Blocks, is_well: bool, orders: Orders) -> tuple[bool, ...]:
        """Whether the blocks of a promised request that has ended must stay. Empty for a request that was not promised.

        They stay for a moment even if the promise is taken back, since somebody may be reading them.
        """
        kept = self._end(request, blocks, is_well, orders)
        if kept == (False,):
            self._rooms.withdrawn(request.request_id)
        return kept

    def sent(self, request_ids: Iterable[str]) -> None:
        """Note that the leases of these requests are over."""
        self._rooms.left(request_ids)

    def _end(self, request: Request, blocks: Blocks, is_well: bool, orders: Orders) -> tuple[bool, ...]:
        request_id = request.request_id
        if request_id in self._unread and not is_well:
            del self._unread[request_id]
            return (False,)
        if request_id in self._unread:
            self._promise(*self._unread[request_id], orders)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None:
            was_promised = request_id in self._broken
            self._broken.discard(request_id)
            return (False,) if was_promised else ()
        tables, name = self._tables(blocks), prefill.promise.name
        if not any(tables):
            orders.withdrawn.append(name)
            return (False,)
        is_kept = is_well and request.num_computed_tokens >= prefill.num_tokens and self._is_as_promised(prefill)
        if is_kept and self._has_states and request.num_computed_tokens > prefill.num_tokens:
            is_kept = False
            self._declined.offer(request_id, PAST_PROMPT, "its layers' states have gone on with the answer")
        num_tokens, first = prefill.num_tokens, first_token_of(request, prefill.num_tokens)
        orders.ended.append(EndOrder(request_id, name, tables, num_tokens, is_kept, first))
        return (True,)


def _firsts(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield the scheduled requests, and how many tokens of each were there before, cached ones included."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
