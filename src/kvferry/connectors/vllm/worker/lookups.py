"""Fetches from a room: only an address is known, until it is found out which engine listens there."""

from __future__ import annotations

from collections.abc import Callable

from kvferry import Located, LocateFailed, Reason
from kvferry.connectors.vllm.metadata import FetchOrder, agent_name
from kvferry.connectors.vllm.worker.open_requests import OpenRequests
from kvferry.errors import TransferError
from kvferry.kv_transfer_params import number_of


class Lookups:
    """`locate` asks the agent, which answers later; `fetch` begins what is located. Nothing is remembered: an engine
    that was started again is found."""

    def __init__(
        self, open_requests: OpenRequests, locate: Callable[[str, int], None], fetch: Callable[[FetchOrder], None]
    ) -> None:
        self._open = open_requests
        self._locate = locate
        self._fetch = fetch
        self._waiting: dict[tuple[str, int], list[FetchOrder]] = {}

    def ask(self, order: FetchOrder) -> None:
        """It waits for who listens at its address."""
        (address,) = order.addresses
        asked = address, number_of(order.reference)
        if asked not in self._waiting:
            self._locate(*asked)
        self._waiting.setdefault(asked, []).append(order)

    def note(self, notice: Located | LocateFailed) -> None:
        """It is known who listens there, or nobody has said so."""
        for order in self._waiting.pop((notice.address, notice.number), ()):
            if isinstance(notice, Located):
                self._fetch(order.at(notice.engine))
            else:
                self._give_up(order, notice.error)

    def abort(self, request_id: str) -> bool:
        """Nobody waits for this request any more; whether it was here."""
        for waiting in self._waiting.values():
            for order in waiting:
                if order.request_id == request_id:
                    waiting.remove(order)
                    self._give_up(order, TransferError(Reason.ABORTED, "the request was aborted"))
                    return True
        return False

    def _give_up(self, order: FetchOrder, error: TransferError) -> None:
        self._open.give_up(agent_name(order.request_id), error)
