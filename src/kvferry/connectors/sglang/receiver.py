"""The decode side of a request: a fetch into the pages that SGLang has reserved for its prompt.

`poll` never raises, and answers at once unless SGLang has nothing to compute. It says Failed only when no ticket can
write to the pages any more, for then SGLang frees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll

from kvferry import Prompt, Reason, RemoteEngine, TokenRange
from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang import handoff
from kvferry.connectors.sglang.construction import error_of, request_being_made
from kvferry.connectors.sglang.manager import FerryManager
from kvferry.connectors.sglang.prefill_engines import Lookup
from kvferry.connectors.sglang.prompt import prompt_of
from kvferry.connectors.sglang.rank import Fetching
from kvferry.errors import FerryError, TransferError

# Another start of the engine listens where this decode has met an earlier one; or elsewhere, where its host's name
# leads to another address by now.
RESTARTED = (Reason.WRONG_ENGINE, Reason.WRONG_EPOCH, Reason.PEER_LOST, Reason.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where a prompt goes: its block tables from token 0 on, which tokens of it, and the row for the first token.

    Nothing may be written there before `is_free`: the device may still be writing for the request before.
    """

    tables: BlockTables
    tokens: TokenRange
    row: int
    is_free: Callable[[], bool]


class FerryReceiver(BaseKVReceiver):
    """One request of a decode engine, on one rank."""

    require_staging = False

    def __init__(self, mgr: FerryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_infos: list[object] = []
        self.conclude_state: int | None = None
        self.abort_notified = False
        self._place, self._room = bootstrap_addr, bootstrap_room or 0
        self._number = self._room
        self._lookup = Lookup()
        self._is_held = self._is_met_again = False
        self._destination: _Destination | None = None
        self._fetching: Fetching | None = None
        self._prompt = Prompt()
        self._error: FerryError | None = None
        self._num_logprobs = 0
        try:
            request = request_being_made()
            self._prompt, self._num_logprobs = prompt_of(request), handoff.num_logprobs_wanted(request, mgr.metadata)
            # Whoever sends a prompt to an engine that its room does not lead to says so to both sides.
            if request.disagg_prefill_dp_rank is not None:
                self._number = request.disagg_prefill_dp_rank
            mgr.register(self._room, self)
        except Exception as error:  # noqa: BLE001 - one that leaves a constructor ends SGLang's scheduler
            self._error = error_of(error)

    @property
    def is_over(self) -> bool:
        """Whether no ticket can write to the pages any more."""
        return self._fetching is None or self._fetching.is_over

    def init(self, prefill_dp_rank: int) -> None:
        """Find out who the prefill engine is, and have it keep the cache until there are pages."""
        engines = self.kv_mgr.rank.engines
        self._lookup = engines.find(self._place, self._number)
        # SGLang asks nobody how far it is while requests that it has taken back wait for pages.
        engines.tell(self._lookup, self._hold)

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: object,
    ) -> None:
        """Pages are reserved for what follows the first `decode_prefix_len` tokens, which are here already. The fetch
        begins when the device is done with what SGLang has begun before, as `poll` finds out."""
        first = decode_prefix_len or 0
        # Nothing is looked at where tokens are that do not move.
        pages = (-1,) * (first // self.kv_mgr.kv_args.page_size) + tuple(int(page) for page in kv_indices)
        tables = self.kv_mgr.tables.of(pages, state_indices)
        tokens = TokenRange(first, self._prompt.num_tokens)
        try:
            self._destination = _Destination(tables, tokens, aux_index or 0, self.kv_mgr.steps_so_far())
        except FerryError as error:
            self._error = self._error or error
        self._fetch()

    def poll(self) -> int:
        """How far the request is."""
        if self.conclude_state is None:
            self.conclude_state = self._advance()
        if self.conclude_state is None and self._fetching is not None and self.kv_mgr.wait_while_idle(self):
            self.conclude_state = self._advance()
        if self.conclude_state is not None:
            self.kv_mgr.end_wait(self)
            return self.conclude_state
        if self._destination is not None:
            return KVPoll.Transferring
        return KVPoll.Bootstrapping if self._lookup.engine is None else KVPoll.WaitingForInput

    def failure_exception(self) -> None:
        """Raises why the request has failed."""
        raise self._error or TransferError(Reason.ABORTED, "another rank has failed to fetch this prompt's cache")

    def abort(self) -> None:
        """The client has gone. SGLang may still hold a request whose cache has come, and asks how it has ended."""
        self._error = self._error or TransferError(Reason.ABORTED, "the request was aborted")
        if self.conclude_state == KVPoll.Success:
            self.conclude_state = KVPoll.Failed
        if self._fetching is not None and not self._fetching.is_over:
            self.kv_mgr.rank.abort(self._fetching)
        self._decline()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """A rank has failed: end our part, and have SGLang hold the pages until it is over; where all ranks have to
        hold them equally long, also when it is over already."""
        is_open = not self.is_over
        # What has not begun must not begin in pages that SGLang frees.
        if is_open or self._fetching is None:
            self.abort()
        self.abort_notified = is_open or self.kv_mgr.is_agreed
        # SGLang asks no more how far this request is: as the first that waits it would keep all others from waiting.
        self.kv_mgr.end_wait(self)

    def clear(self) -> None:
        """SGLang forgets the request."""
        self._error = self._error or TransferError(Reason.ABORTED, "SGLang has forgotten the request")
        self.kv_mgr.end_wait(self)
        self._decline()
        self.kv_mgr.forget(self._room, self)

    def _decline(self) -> None:
        """A lease that was kept alive for this request is not needed: its prefill engine need not keep the pages."""
        if self._is_held and self._fetching is None and self._lookup.engine is not None:
            self._is_held = False
            self.kv_mgr.rank.decline(self._room, self._lookup.engine)

    def _advance(self) -> int | None:
        """Do what can be done by now; how the request has ended, if it has."""
        self._error = self._error or self._lookup.error
        if self._error is None and self._fetching is None:
            self._fetch()
        fetching = self._fetching
        if self._error is None and fetching is not None and fetching.is_over:
            if fetching.report is not None:
                self._hand_over(fetching)
            elif not self._meet_again(fetching):
                self._error = fetching.error
        if self._error is not None:
            return KVPoll.Failed if self.is_over else None
        return KVPoll.Success if fetching is not None and fetching.report is not None else None

    def _fetch(self) -> None:
        """Begin, once it is known from whom and into what."""
        engine, rank = self._lookup.engine, self.kv_mgr.rank
        if engine is None or self._error is not None:
            return
        try:
            if self._destination is not None and self._destination.is_free():
                tables, tokens = self._destination.tables, self._destination.tokens
                self._fetching = rank.fetch(self._room, engine, tables, tokens, self._prompt)
        except FerryError as error:
            self._error = error

    def _hold(self, engine: RemoteEngine) -> None:
        """Until there are pages, the lease is kept alive. This may be the agent's thread: whoever ends the request says
        so first, and looks then whether it is held."""
        self._is_held = True
        if self._error is None and self._destination is None:
            try:
                self.kv_mgr.rank.hold(self._room, engine)
            except FerryError as error:
                self._error = error

    def _meet_again(self, fetching: Fetching) -> bool:
        """Whether it is worth a second try, with whoever is at that address now."""
        is_stale = isinstance(fetching.error, TransferError) and fetching.error.reason in RESTARTED
        if self._is_met_again or not is_stale:
            return False
        engines = self.kv_mgr.rank.engines
        if self._lookup.engine == engines.find(self._place, self._number).engine:
            engines.forget(self._place)
        self._lookup, self._fetching, self._is_met_again = engines.find(self._place, self._number), None, True
        return True

    def _hand_over(self, fetching: Fetching) -> None:
        """Fill SGLang's row with the first token."""
        first = fetching.report.first_token if fetching.report is not None else None
        if first is None or self._destination is None:
            what = "the prefill engine has not said which token follows the prompt"
            hint = "SGLang computes nothing of a prompt on its decode side: prefill with an engine that says it"
            self._error = TransferError(Reason.OUT_OF_RANGE, what, hint=hint)
            return
        if (found := handoff.num_logprobs_of(first)) < self._num_logprobs:
            what = "the prefill engine has said too few log-probabilities of the first token"
            expected = f"{self._num_logprobs}, its own and those of the likeliest tokens"
            hint = "ask it for as many logprobs, or leave them out: vLLM says none"
            self._error = TransferError(Reason.OUT_OF_RANGE, what, found=str(found), expected=expected, hint=hint)
            return
        try:
            handoff.write(self.kv_mgr.metadata, self._destination.row, first, self._room)
        except (RuntimeError, ValueError, OverflowError) as error:
            what = "the first token of the prefill engine does not fit into SGLang's buffers"
            self._error = TransferError(Reason.MALFORMED, what, found=str(error))
