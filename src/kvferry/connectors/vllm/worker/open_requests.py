"""The requests that vLLM still has to be told of, and what the agent has said of them.

vLLM is told of every request exactly once: an id that it does not expect ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from kvferry import BlocksReleased, Fetched, FetchFailed, FetchReport, LeaseEnded, Notice, Reason
from kvferry.connectors.vllm.features import FAILS_BY_BLOCKS, TransferResults
from kvferry.connectors.vllm.metadata import EndOrder, FetchOrder, LeaseOrder, PromiseOrder, agent_name
from kvferry.connectors.vllm.stats import FerryStats
from kvferry.connectors.vllm_middleware.worker_reports import CHILD, FetchOutcome, names_of
from kvferry.errors import RequestError, TransferError

logger = logging.getLogger(__name__)


class OpenRequests:
    """Orders go in, the agent's notices go in, vLLM's results come out. Requests go by the agent's name for them.

    `is_loss_fatal` is vLLM's policy: a request whose cache did not arrive ends with an error.
    """

    def __init__(self, is_loss_fatal: bool = False) -> None:
        self._is_loss_fatal = is_loss_fatal
        self.has_stopped = False
        self._results = TransferResults()
        self._stats = FerryStats()
        self._leased: dict[str, LeaseOrder] = {}
        # The leases of requests that vLLM still computes.
        self._promised: dict[str, str] = {}
        self._fetching: dict[str, FetchOrder] = {}
        # Those of them that the agent has been asked for.
        self._begun: set[str] = set()
        self._failed: set[str] = set()
        self._lost: list[FetchOrder] = []
        self._met: set[tuple[str, str]] = set()

    def lease(self, order: LeaseOrder) -> str:
        """Expect the end of a lease. Return the agent's name for the request."""
        name = agent_name(order.request_id)
        self._leased[name] = order
        return name

    def promise(self, order: PromiseOrder) -> None:
        """Note a lease of which vLLM hears nothing before its request has ended."""
        self._promised[order.name] = order.lease_id

    def begun(self, names: Sequence[str]) -> None:
        """Note that what was promised to these callers is being computed."""
        self._stats.begun(names)

    def end(self, order: EndOrder) -> bool:
        """Expect from now on the end of an ended request's lease. Return whether that end is still to come."""
        if order.name in self._promised:
            lease_id = self._promised.pop(order.name)
            self._leased[order.name] = LeaseOrder(order.request_id, lease_id, order.block_tables, order.num_tokens)
            return True
        self._results.finished_sending.add(order.request_id)
        return False

    def forget(self, name: str) -> bool:
        """Drop a promise that vLLM has taken back, and wants to hear nothing of. Return whether there was a lease."""
        return bool(self._promised.pop(name, ""))

    def fetch(self, order: FetchOrder) -> str:
        """Expect the end of a fetch. Return the agent's name for the request."""
        name = agent_name(order.request_id)
        self._fetching[name] = order
        return name

    def refuse(self, order: FetchOrder, reason: str, why: str) -> None:
        """Note that a fetch that could not even be begun has failed."""
        self._fetching.pop(agent_name(order.request_id), None)
        if order.is_waited_for:
            self._warn(order, reason, why)
            self._results.finished_recving.add(order.request_id)
            self._lose(order)

    @property
    def num_open(self) -> int:
        """Leases and fetches that are expected to end."""
        return len(self._leased) + len(self._fetching)

    def is_leased(self, name: str, lease_id: str) -> bool:
        """Whether the end of this lease is expected. Only who was given the reference knows its id."""
        promised = self._promised.get(name)
        return promised == lease_id or (name in self._leased and self._leased[name].lease_id == lease_id)

    @property
    def leases(self) -> list[tuple[str, str]]:
        """All leases that are expected to end: the agent's names for their requests, and their ids."""
        return [*self.ended_leases, *self._promised.items()]

    @property
    def ended_leases(self) -> list[tuple[str, str]]:
        """Those of requests that vLLM computes no more."""
        return [(name, order.lease_id) for name, order in self._leased.items()]

    def leases_of(self, names: Collection[str]) -> list[tuple[str, str]]:
        """The leases of requests that callers gave these names: the agent's names for these, and the leases' ids."""
        return [
            (known, order.lease_id)
            for known, order in self._leased.items()
            if any(name in names for name in names_of(CHILD.sub("", order.request_id)))
        ]

    def is_fetching(self, request_id: str) -> bool:
        """Whether a fetch of this request is expected to end."""
        return agent_name(request_id) in self._fetching

    @property
    def begun_fetches(self) -> list[str]:
        """The fetches that the agent has been asked for and that vLLM waits for, by the agent's names."""
        return [name for name, order in self._fetching.items() if name in self._begun and order.is_waited_for]

    def lose_fetched(self) -> None:
        """What has been fetched is not there any more, and vLLM hears of it as of what has not come."""
        self._results.failed_recving.update(self._results.finished_recving)

    def take_results(self) -> TransferResults:
        """Every request that has ended since the last call, exactly once."""
        results, self._results = self._results, TransferResults()
        return results

    def take_lost(self) -> list[FetchOrder]:
        """The fetches that have failed since the last call, for a vLLM that is told of their blocks."""
        lost, self._lost = self._lost, []
        return lost

    def take_stats(self) -> FerryStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, FerryStats()
        return stats

    def begin(self, name: str, fetch: Callable[[], None]) -> None:
        """Ask the agent for a fetch. What it cannot be asked for, whatever a peer has said, ends a request and not the
        engine."""
        self._begun.add(name)
        try:
            fetch()
        except RequestError as error:
            what = "this cache cannot be asked for"
            self.give_up(name, TransferError(Reason.MALFORMED, what, found=str(error)))

    def give_up(self, name: str, error: TransferError) -> None:
        """The agent has not heard of this fetch: nothing can land in its blocks."""
        self.note(FetchFailed(name, error))
        self.note(BlocksReleased(name))

    def note(self, notice: Notice) -> None:
        """Take down what the agent says. That it has stopped is told to `stopped`."""
        match notice:
            case Fetched(name, report):
                self._fetched(name, report)
                self._end_fetch(name)
            case FetchFailed(name, error):
                self._note_failure(name, error)
            case BlocksReleased(name):
                self._end_fetch(name)
            case LeaseEnded(name, reason):
                self._stats.freed(reason)
                self._end_lease(name)

    def _end_lease(self, name: str) -> None:
        if name in self._leased:
            self._results.finished_sending.add(self._leased.pop(name).request_id)
        self._promised.pop(name, None)

    def _fetched(self, name: str, report: FetchReport) -> None:
        order = self._fetching.get(name)
        if order is not None and order.is_waited_for and report.num_bytes:
            self._stats.fetched(order.request_id, report, order.reference.engine_id)
            self._introduce(order, report)

    def _introduce(self, order: FetchOrder, report: FetchReport) -> None:
        """Say once per peer which transport was chosen, and why."""
        engine = (order.reference.engine_id, order.reference.epoch)
        if engine not in self._met:
            self._met.add(engine)
            met_s = report.phases_s.get("handshake", 0.0)
            logger.info(
                "kvferry fetches from %s over %s (handshake %.1f s): %s",
                engine[0],
                report.transport,
                met_s,
                report.choice,
            )

    def _note_failure(self, name: str, error: TransferError) -> None:
        """Note a failed fetch. A source that cannot be told of a request's end is no news: its lease runs out."""
        self._failed.add(name)
        order = self._fetching.get(name)
        if order is not None and order.is_waited_for:
            self._warn(order, error.reason, str(error))

    def _warn(self, order: FetchOrder, reason: str, why: str) -> None:
        reference = order.reference
        logger.warning("request %s from %s#%s: %s", order.request_id, reference.engine_id, reference.epoch, why)
        self._stats.failed(order.request_id, FetchOutcome(str(reason), why, self._is_loss_fatal))

    def _end_fetch(self, name: str) -> None:
        order = self._fetching.pop(name, None)
        self._begun.discard(name)
        failed = name in self._failed
        self._failed.discard(name)
        if order is not None and order.is_waited_for:
            self._results.finished_recving.add(order.request_id)
            if failed:
                self._lose(order)

    def _lose(self, order: FetchOrder) -> None:
        self._results.failed_recving.add(order.request_id)
        if FAILS_BY_BLOCKS:
            self._lost.append(order)

    def stopped(self, written: Collection[str]) -> None:
        """Note that the agent has stopped. Everything that is open ends here, except what is `written` (the agent's
        names): a source may go on writing to its blocks. vLLM hears nothing of it, and gives those blocks to nobody."""
        self.has_stopped = True
        for name in [name for name in self._fetching if name in written]:
            order = self._fetching.pop(name)
            logger.error(
                "request %s: its blocks are kept, since %s may still be writing to them and the transfer agent has "
                "stopped; restart this engine",
                order.request_id,
                order.reference.engine_id,
            )
        self._begun.clear()
        for name in list(self._fetching):
            self._failed.add(name)
            self._end_fetch(name)
        for name in [*self._leased, *self._promised]:
            self._end_lease(name)
