"""The early prefills of a worker's half: leases on prefills that vLLM still computes, and how far those are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvferry import Agent, Ahead, LeaseProgress, LeaseRequest
from kvferry.connectors.vllm.description.rank_description import Described
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, PromiseOrder
from kvferry.connectors.vllm.worker.deferred_commands import DeferredCommands, Milestone, at_once
from kvferry.connectors.vllm.worker.layer_progress import LayerProgress
from kvferry.connectors.vllm.worker.open_requests import OpenRequests
from kvferry.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The rank's agent, the description of its caches, and how to know what its device has done."""

    agent: Agent
    described: Described
    milestone: Milestone = at_once


class EarlyPrefills:
    """The early prefills by the agents' name of a request. What vLLM is told of each is in `open_requests`.
    `layer_ends` are those of `Described` where layers are told of one by one.

    What a step computes is told when the next one begins, and not before the device has done it: only then has
    everything been written that belongs to the step, a speculator's layers too. Single states may be told of in the
    middle of the step.
    """

    def __init__(
        self, source: Source, open_requests: OpenRequests, layer_ends: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._agent = source.agent
        self._described = source.described
        self._open = open_requests
        self._layers = LayerProgress(layer_ends)
        self._reports = DeferredCommands(source.milestone)
        # How many tokens of each promised prefill the steps before this one have computed.
        self._num_before: dict[str, int] = {}
        self._computing: Sequence[LeaseProgress] = ()

    def promise(self, order: PromiseOrder) -> None:
        """Lease blocks that are not known yet."""
        described = self._described
        names, num_counted = (order.name, order.lease_id), described.num_counted(order.num_tokens)
        wanted = LeaseRequest(*names, described.nowhere, num_counted, True, order.prompt, order.is_unnamed)
        self._open.promise(order)
        try:
            self._agent.lease(wanted)
        except RequestError as error:
            # For the agent, the lease before this one in the same room is not over.
            logger.warning("%s: its cache is not offered: %s", order.name, error)
            self._open.forget(order.name)
            return
        self._num_before[order.name] = 0

    def step(self, growths: Sequence[GrowthOrder]) -> None:
        """Begin a step. All that the steps before it compute has been begun. Where groups count tokens differently,
        nothing is told before the end: the count of one group would be taken for that of another."""
        self._layers.begin()
        if self._computing:
            self._reports.give(partial(self._report, self._computing))
        for grown in self._computing:
            if grown.request_id in self._num_before:
                self._num_before[grown.request_id] = grown.num_ready
        described = self._described
        if not described.counts_alike:
            growths = ()
        self._computing = [self._grown(order, described.num_complete(order.num_tokens)) for order in growths]
        self.look()

    def layer_ended(self, layer: str) -> None:
        """Note, in the middle of a step, that a layer has ended: its states are written when the device gets there."""
        if (num_states := self._layers.ended(layer)) and self._computing:
            ahead = [self._ahead(grown, num_states) for grown in self._computing]
            self._reports.give(partial(self._report, ahead))

    def look(self) -> None:
        """Tell the agent what the device has done by now."""
        self._reports.look()

    def withdraw(self, names: Sequence[str]) -> None:
        """Withdraw leases whose blocks are going to be given to others. The agent hears of it before whoever reads them
        can say that it has read them after this."""
        for name in names:
            self._num_before.pop(name, None)
            if self._open.forget(name):
                self._agent.withdraw(name)

    def end(self, order: EndOrder) -> None:
        """vLLM has ended the request, and waits for its lease to end."""
        if not self._open.end(order):
            self._num_before.pop(order.name, None)
        elif order.is_kept:
            grown = self._grown(order, self._described.num_counted(order.num_tokens))
            grown = replace(grown, first_token=order.first_token)
            self._reports.give(partial(self._report_end, grown))
        else:
            del self._num_before[order.name]
            self._agent.withdraw(order.name)

    def _report(self, growths: Sequence[LeaseProgress]) -> None:
        for grown in growths:
            if grown.request_id in self._num_before:
                self._agent.grow(grown)

    def _report_end(self, grown: LeaseProgress) -> None:
        self._report((grown,))
        self._num_before.pop(grown.request_id, None)

    def _ahead(self, grown: LeaseProgress, num_states: int) -> LeaseProgress:
        num_before = self._num_before.get(grown.request_id, 0)
        return replace(grown, num_ready=num_before, ahead=Ahead(grown.num_ready, num_states))

    def _grown(self, order: GrowthOrder | EndOrder, num_ready: int) -> LeaseProgress:
        return LeaseProgress(order.name, self._described.tables(order.block_tables), num_ready)
