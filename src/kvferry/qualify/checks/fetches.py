"""Fetches between engines with unequal tensor parallelism: every strategy that the device allows, byte for byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvferry import Agent, AgentConfig, Fetched, FetchReport, FetchRequest, Notice, TokenRange, new_epoch, new_lease_id
from kvferry.errors import FerryError, TransportError
from kvferry.layout import attention
from kvferry.options import StagingMemory
from kvferry.qualify.checks.ucx_settings import reaches_device
from kvferry.qualify.fetching.engine_rank import POISON, EngineRank, Geometry, Way, layouts_of, next_notice
from kvferry.qualify.fetching.fetch_source import FetchSource, Setup
from kvferry.qualify.outcome import Figure, Outcome, failed, passed
from kvferry.qualify.torch_device import TorchDevice, number_of
from kvferry.transport.memory_kind import HOST
from kvferry.transport.ucx.environment import system_facts

NAME: Final = "fetches"
TENSOR_PARALLEL: Final = 2
"""Of the source; the target has one rank."""
LLAMA: Final = Geometry(attention(32, 8, 128, "bfloat16", 2), head_dim=128, block_tokens=16, num_tokens=1024)
"""Of Llama 3.1 8B."""
HOST_TOKENS: Final = 256
STRATEGIES: Final = ("auto", "direct", "scatter", "pack")
REPEATS: Final = 5
LEAST_SHARE: Final = 0.5
"""What `auto` takes is at least half as fast as the best."""


def ways(kind: str) -> tuple[Way, ...]:
    """Through memory of the device where that can be registered, and of the host."""
    if kind == HOST:
        return tuple(Way(HOST, StagingMemory.HOST, strategy) for strategy in STRATEGIES)
    is_reached = reaches_device(system_facts(kind, kind))
    on_device = [Way(kind, StagingMemory.DEVICE, strategy) for strategy in STRATEGIES if is_reached]
    return (*on_device, Way(HOST, StagingMemory.HOST, "auto"))


def run(kind: str) -> Outcome:
    """With the geometry of a model that many people serve."""
    return check(TorchDevice(kind), LLAMA if kind != HOST else replace(LLAMA, num_tokens=HOST_TOKENS))


def check(device: TorchDevice, geometry: Geometry) -> Outcome:
    """Two source ranks, on the next devices where there are some, to one that is on this device."""
    rates: dict[Way, float] = {}
    facts: list[tuple[str, str]] = []
    with ExitStack() as stack:
        try:
            target = stack.enter_context(_Target(device, geometry))
            for way in ways(device.kind):
                seconds, report = target.measured(way)
                rates[way] = report.num_bytes / seconds / 1e9
                facts.append((way.name, f"{report.strategy} over {report.transport}; {report.choice}"))
        except FerryError as error:
            return failed(NAME, str(error))
    best = max(rates.values())
    # The first has all memory to choose from.
    figures = tuple(_figure(way, rates[way], best, is_left_to_choose=not at) for at, way in enumerate(rates))
    words = f"{geometry.num_tokens:,} tokens, 2 ranks to 1: every byte arrives by {len(rates)} ways"
    return passed(NAME, words, figures, tuple(facts))


def _figure(way: Way, rate: float, best: float, *, is_left_to_choose: bool) -> Figure:
    least = LEAST_SHARE if is_left_to_choose else 0.0
    return Figure(way.name, rate, rate / best, "the fastest way", 1.0 if least else 0.0, least)


class _Target:
    """The target's rank, with the source's processes. Use as a context manager."""

    def __init__(self, device: TorchDevice, geometry: Geometry) -> None:
        self._device, self._geometry = device, geometry
        self._stack, self._numbers = ExitStack(), count()
        self._memories = tuple(dict.fromkeys((way.buffer_device, way.staging.value) for way in ways(device.kind)))
        expected = [
            geometry.logical(geometry.contents(TENSOR_PARALLEL, rank), geometry.table("source"))
            for rank in range(TENSOR_PARALLEL)
        ]
        self._expected = np.concatenate(expected, axis=3)

    def __enter__(self) -> _Target:
        with ExitStack() as stack:
            epoch = new_epoch()
            self._sources = [stack.enter_context(FetchSource(setup)) for setup in self._setups(epoch)]
            at = layouts_of(self._geometry, 1, 0, self._device.kind)
            num_bytes = 2 * self._expected.nbytes
            self._rank = stack.enter_context(closing(EngineRank(self._device, at, num_bytes)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _setups(self, epoch: str) -> Iterator[Setup]:
        kind, num_devices = self._device.kind, number_of(self._device.kind)
        for rank in range(TENSOR_PARALLEL):
            yield Setup(kind, (rank + 1) % num_devices, epoch, rank, TENSOR_PARALLEL, self._geometry, self._memories)

    def measured(self, way: Way) -> tuple[float, FetchReport]:
        """The median time from `Agent.fetch` to `Fetched`, and the report of the last one. Raises TransportError when
        bytes are wrong, or none come."""
        notices: SimpleQueue[Notice] = SimpleQueue()
        with self._rank.open(AgentConfig(f"target-{next(self._numbers)}"), way, notices) as agent:
            self._rank.fill(POISON)
            self._fetched(agent, way, notices)
            self._check(way)
            found = [self._fetched(agent, way, notices) for _ in range(REPEATS)]
        return statistics.median(seconds for seconds, _ in found), found[-1][1]

    def _fetched(self, agent: Agent, way: Way, notices: SimpleQueue[Notice]) -> tuple[float, FetchReport]:
        number = self._memories.index((way.buffer_device, way.staging.value))
        request_id, lease_id = f"r{next(self._numbers)}", new_lease_id()
        references = [source.lease(number, request_id, lease_id) for source in self._sources]
        addresses = tuple(source.addresses[number] for source in self._sources)
        tokens = TokenRange(0, self._geometry.num_tokens)
        wanted = FetchRequest(request_id, references[0], addresses, (self._geometry.table("target"),), (tokens,))
        began = time.perf_counter()
        agent.fetch(wanted)
        notice = next_notice(notices)
        taken = time.perf_counter() - began
        if not isinstance(notice, Fetched):
            raise TransportError(f"{way.name}: the cache did not arrive", found=str(notice))
        for source in self._sources:
            source.withdraw(number, request_id)
        return taken, notice.report

    def _check(self, way: Way) -> None:
        """Every wanted element is right, and nothing else has been touched."""
        memory, table = self._rank.memory.cpu().numpy().copy(), self._geometry.table("target")
        there = self._geometry.logical(memory, table)
        if not np.array_equal(there, self._expected):
            raise TransportError(f"{way.name}: {int((there != self._expected).sum()):,} elements are wrong")
        others = tuple(set(range(self._geometry.num_blocks)) - set(table))
        if (self._geometry.logical(memory, others) != POISON * 257).any():
            raise TransportError(f"{way.name}: blocks of others were touched")
