"""The early legs of a worker's half: leases on prefills that vLLM still computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvferry import Agent, LeaseProgress, LeaseRequest
from kvferry.connectors.vllm.description.describe import Described
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, PromiseOrder
from kvferry.connectors.vllm.worker.layer_progress import LayerProgress
from kvferry.connectors.vllm.worker.open_requests import OpenRequests
from kvferry.connectors.vllm.worker.prefill_progress import Growing, Milestone, at_once


@dataclass(frozen=True, slots=True)
class Source:
    """The rank's agent, the description of its caches, and how to know what its device has done."""

    agent: Agent
    described: Described
    milestone: Milestone = at_once


class EarlyLegs:
    """What is told of each is in `open_requests`. A lease lives `lease_s` without a word. `layer_ends` are those of
    `Described` where layers are told of one by one."""

    def __init__(
        self,
        source: Source,
        open_requests: OpenRequests,
        lease_s: float,
        layer_ends: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._agent = source.agent
        self._described = source.described
        self._open = open_requests
        self._growing = Growing(source.agent.grow, source.milestone, lease_s)
        self._layers = LayerProgress(layer_ends)

    def promise(self, order: PromiseOrder) -> None:
        """Lease blocks that are not known yet."""
        described = self._described
        names, num_counted = (order.name, order.lease_id), described.num_counted(order.num_tokens)
        wanted = LeaseRequest(*names, described.nowhere, num_counted, True, order.prompt, order.is_unnamed)
        self._open.promise(order)
        self._agent.lease(wanted)
        self._growing.open(order.name)

    def step(self, growths: Sequence[GrowthOrder]) -> None:
        """A step begins. Where groups count differently nothing is told before the end: what is there of one would be
        taken for what is there of another."""
        self._layers.begin()
        described = self._described
        if not described.counts_alike:
            growths = ()
        self._growing.step([self._grown(order, described.num_complete(order.num_tokens)) for order in growths])

    def layer_ended(self, layer: str) -> None:
        """In the middle of a step: what a layer keeps of all its tokens has been written, as the device gets on."""
        if num_states := self._layers.ended(layer):
            self._growing.get_ahead(num_states)

    def look(self) -> None:
        """The device may have got on."""
        self._growing.look()

    def withdraw(self, names: Sequence[str]) -> None:
        """Their blocks are going to be others' now. The agent hears of it before whoever reads them can say that it
        has read them after this."""
        for name in names:
            self._growing.close(name)
            if self._open.forget(name):
                self._agent.withdraw(name)

    def end(self, order: EndOrder) -> None:
        """vLLM has ended the request, and waits for its lease to end."""
        if not self._open.end(order):
            self._growing.close(order.name)
        elif order.is_kept:
            self._growing.end(self._grown(order, self._described.num_counted(order.num_tokens)))
        else:
            self._growing.close(order.name)
            self._agent.withdraw(order.name)

    def _grown(self, order: GrowthOrder | EndOrder, num_ready: int) -> LeaseProgress:
        return LeaseProgress(order.name, self._described.tables(order.block_tables), num_ready)
