"""The prefill side of a request: a lease that grows while its prompt is computed.

`poll` never raises, and answers at once unless SGLang has nothing to compute. SGLang frees the pages when it says
Success or Failed, or when it has said Failed on another rank: `failure_exception` is called before that, and takes the
lease back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from kvferry import Reason
from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang import handoff
from kvferry.connectors.sglang.construction import error_of, request_being_made
from kvferry.connectors.sglang.manager import FerryManager
from kvferry.connectors.sglang.prompt import prompt_of
from kvferry.connectors.sglang.rank import Leased, Ranks, check_room
from kvferry.errors import FerryError, RequestError, TransferError


@dataclass(frozen=True, slots=True)
class _Sent:
    """The first `num_tokens` tokens may be read from `tables` once `is_computed`, when the device has written them."""

    is_computed: Callable[[], bool]
    tables: BlockTables
    num_tokens: int


class FerrySender(BaseKVSender):
    """One request of a prefill engine, on one rank."""

    # SGLang sets an event here where a cached prefix may still be being written by an earlier step.
    _early_send_wait_event: Any = None

    def __init__(
        self,
        mgr: FerryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        *,
        dest_tp_ranks: object = None,
        pp_rank: object = None,
    ) -> None:
        """Promise the prompt's cache. Some versions of SGLang name ranks, which kvferry's agents find by themselves."""
        self.kv_mgr = mgr
        self.conclude_state: int | None = None
        self._room = bootstrap_room
        self._lease = Leased()
        self._pages: list[int] = []
        self._num_tokens = self._num_sent = self._num_logprobs = 0
        self._sent: deque[_Sent] = deque()
        # Known once SGLang has begun with the request.
        self._row: int | None = None
        self._error: FerryError | None = None
        try:
            check_room(bootstrap_room)
            if not req_has_disagg_prefill_dp_rank:
                _check_number(mgr.ranks, bootstrap_room)
            # The request has us: neither would be gone, nor our turn to wait be over, before Python looks for cycles.
            request = request_being_made()
            prompt, self._num_logprobs = prompt_of(request), handoff.num_logprobs_wanted(request, mgr.metadata)
            self._num_tokens = prompt.num_tokens
            self._lease = mgr.rank.promise(bootstrap_room, prompt)
        except Exception as error:  # noqa: BLE001 - one that leaves a constructor ends SGLang's scheduler
            self._error = error_of(error)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Note in which row of SGLang's buffers the first token will be."""
        self._row = aux_index or 0

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Note that more tokens lie in these pages, once the device is done with what it was given."""
        event, self._early_send_wait_event = self._early_send_wait_event, None
        self._pages += [int(page) for page in kv_indices]
        self._num_sent += num_kv_tokens or 0
        is_computed = event.query if event is not None else self.kv_mgr.pages_so_far()
        self._sent.append(_Sent(is_computed, *self._readable(state_indices)))
        self._tell()

    def _readable(self, state_indices: list[Any] | None) -> tuple[BlockTables, int]:
        """The block tables of what has been sent, and how many tokens of it may be read once they are computed."""
        tables = self.kv_mgr.tables
        if self._num_sent == self._num_tokens:
            return tables.of_prompt(self._num_tokens, self._pages, state_indices), self._num_tokens
        # Where nothing may be read before the last token, this is a sign of life.
        return (tables.of(self._pages, None), self._num_sent) if tables.may_grow else (tables.nowhere, 0)

    def poll(self) -> int:
        """How far the request is. Before `init`, SGLang ends when it hears anything but that it may begin or that the
        request has failed."""
        self._tell()
        is_sent = self._num_sent == self._num_tokens
        if self._ended() is None and is_sent and not self._sent:
            self.kv_mgr.wait_while_idle(self)
        self.conclude_state = self._ended()
        if self.conclude_state is not None:
            self.kv_mgr.end_wait(self)
            return self.conclude_state
        return KVPoll.Transferring if is_sent else KVPoll.WaitingForInput

    def _ended(self) -> int | None:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._error is not None or self._lease.ended not in ("", "done"):
            return KVPoll.Failed
        return KVPoll.Success if self._lease.ended and self._row is not None else None

    def poll_pp_consensus(self) -> int:
        """Return what `poll` returns. The first stage of a pipeline asks this for all, before a prompt is computed.
        Where another stage alone has failed by then, SGLang hears of that when the prompt is computed."""
        return self.poll()

    def failure_exception(self) -> None:
        """Raises why the request has failed. SGLang asks no more how far it is: as the first that waits it would keep
        all others from waiting."""
        self.kv_mgr.end_wait(self)
        self._withdraw()
        if self._error is not None:
            raise self._error
        is_ours = self._lease.ended not in ("", "done")
        reason, found = (self._lease.ended, "") if is_ours else (Reason.ABORTED, "another rank has failed")
        raise TransferError(reason, f"the cache of room {self._room} was not read: {reason}", found=found)

    def abort(self) -> None:
        """Withdraw the lease because the client has gone. A pipeline has dropped the request by now, and its stages end
        where they begin to compute it: the next thing that SGLang hears is that it has failed."""
        self._withdraw()
        self._error = self._error or TransferError(Reason.ABORTED, "the request was aborted")

    def clear(self) -> None:
        """Withdraw the lease, if it has not ended, because SGLang forgets the request."""
        self.kv_mgr.end_wait(self)
        self._withdraw()

    def get_transfer_metric(self) -> KVTransferMetric:
        """Return empty metrics, since a source does not see how long its readers take."""
        return KVTransferMetric()

    def _withdraw(self) -> None:
        if self._error is None and not self._lease.ended:
            self.kv_mgr.rank.withdraw(self._room)

    def _tell(self) -> None:
        """Tell the agent what is computed by now. What cannot be told ends the request."""
        if self._error is not None or self._lease.ended:
            return
        try:
            self._tell_computed()
        except (FerryError, ValueError) as error:
            self._withdraw()
            self._error = TransferError(Reason.MALFORMED, "the first token cannot be sent", found=str(error))

    def _tell_computed(self) -> None:
        while self._sent and self._sent[0].is_computed():
            sent, first = self._sent.popleft(), None
            if sent.num_tokens == self._num_tokens:
                first = handoff.read(self.kv_mgr.metadata, self._row or 0, self._num_logprobs)
            self.kv_mgr.rank.grow(self._room, sent.tables, sent.num_tokens, first)


def _check_number(ranks: Ranks, room: int) -> None:
    """Raises RequestError where a decode engine would look for a prompt at another engine of this server."""
    if room % ranks.data_parallel_size == ranks.number:
        return
    raise RequestError(
        "the room of this request leads to another engine of this server",
        found=f"engine {ranks.number} of {ranks.data_parallel_size}, bootstrap_room {room}",
        expected=f"engine {room % ranks.data_parallel_size}",
        hint="name the engine to both sides in disagg_prefill_dp_rank, or leave the choice to the room",
    )
