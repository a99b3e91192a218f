"""Fetches between engines with unequal tensor parallelism: every strategy that the device allows, byte for byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from kvferry import Agent, AgentConfig, Fetched, FetchReport, FetchRequest, Notice, TokenRange, new_epoch, new_lease_id
from kvferry.errors import FerryError, TransportError
from kvferry.layout import attention
from kvferry.options import StagingMemory
from kvferry.qualify.checks.ucx_settings import has_nixl, reaches_device
from kvferry.qualify.fetching.engine_rank import POISON, EngineRank, Geometry, MemoryPath, layouts_of, next_notice
from kvferry.qualify.fetching.fetch_source import FetchSource, Setup
from kvferry.qualify.outcome import Figure, Outcome, failed, passed
from kvferry.qualify.torch_device import TorchDevice, number_of
from kvferry.transport.memory_kind import HOST
from kvferry.transport.ucx.environment import system_facts

NAME: Final = "fetches"
MOST_RANKS: Final = 8
"""The most ranks of an engine: each has at least one of the model's heads."""
LLAMA: Final = Geometry(attention(32, 8, 128, "bfloat16", 2), head_dim=128, block_tokens=16, num_tokens=1024)
"""The geometry of Llama 3.1 8B."""
HOST_TOKENS: Final = 256
STRATEGIES: Final = ("auto", "direct", "scatter", "pack")
REPEATS: Final = 3
ON_DEVICE: Final = "fetches through memory of the device"
LEAST_SHARE: Final = 0.5
"""What `auto` takes is at least half as fast as the best."""


class Parallel(NamedTuple):
    """How many ranks each engine has."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


def paths(kind: str) -> tuple[MemoryPath, ...]:
    """The paths to check: through memory of the device where that can be registered, and through memory of the host."""
    if kind == HOST:
        return tuple(MemoryPath(HOST, StagingMemory.HOST, strategy) for strategy in STRATEGIES)
    is_reached = has_nixl() and reaches_device(system_facts(kind, kind))
    on_device = [MemoryPath(kind, StagingMemory.DEVICE, strategy) for strategy in STRATEGIES if is_reached]
    return (*on_device, MemoryPath(HOST, StagingMemory.HOST, "auto"))


def run(kind: str) -> Outcome:
    """Check fetches with the geometry of a model that many people serve."""
    return check(TorchDevice(kind), LLAMA if kind != HOST else replace(LLAMA, num_tokens=HOST_TOKENS))


def pairs_for(num_devices: int) -> tuple[Parallel, ...]:
    """The pairs to check: many ranks to one, on as many devices as there are, and one rank to the last of two."""
    num_ranks = next(power for power in (8, 4, 2) if power <= max(2, min(num_devices, MOST_RANKS)))
    return Parallel(num_ranks, 1), Parallel(1, 2)


def check(device: TorchDevice, geometry: Geometry) -> Outcome:
    """Check fetches from source ranks on the next devices, where there are some, to a rank that is on this device."""
    figures: list[Figure] = []
    facts: list[tuple[str, str]] = []
    pairs, ways = pairs_for(number_of(device.kind)), paths(device.kind)
    try:
        for parallel in pairs:
            with _Target(device, geometry, parallel) as target:
                found = {path: target.measured(path) for path in ways}
            figures += _figures(
                parallel, {path: report.num_bytes / seconds / 1e9 for path, (seconds, report) in found.items()}
            )
            for path, (_, report) in found.items():
                facts.append(
                    (f"{parallel}, {path.name}", f"{report.strategy} over {report.transport}; {report.choice}")
                )
    except FerryError as error:
        return failed(NAME, str(error))
    words = (
        f"{geometry.num_tokens:,} tokens, {' and '.join(map(str, pairs))}: every byte arrives by {len(figures)} ways"
    )
    if device.kind != HOST and all(path.buffer_device == HOST for path in ways):
        untried = f"{words}; not through memory of the device, which no NIXL and UCX here reach"
        return passed(NAME, untried, tuple(figures), tuple(facts), left_out=(ON_DEVICE,))
    return passed(NAME, words, tuple(figures), tuple(facts))


def _figures(parallel: Parallel, rates: Mapping[MemoryPath, float]) -> Iterator[Figure]:
    """Yield a figure for each path. The first one has all memory to choose from, and is to choose well: where there are
    others, as it is as fast as itself in any case."""
    if len(rates) == 1:
        yield from (Figure(f"{parallel}, {path.name}", rate) for path, rate in rates.items())
        return
    best = max(rates.values())
    for number, (path, rate) in enumerate(rates.items()):
        expected, least = (0.0, 0.0) if number else (1.0, LEAST_SHARE)
        yield Figure(f"{parallel}, {path.name}", rate, rate / best, "the fastest way", expected, least)


class _Target:
    """The target's last rank, with the source's processes. Use as a context manager."""

    def __init__(self, device: TorchDevice, geometry: Geometry, parallel: Parallel) -> None:
        self._device, self._geometry, self._parallel = device, geometry, parallel
        self._epoch = new_epoch()
        self._stack, self._numbers = ExitStack(), count()
        self._memories = tuple(dict.fromkeys((path.buffer_device, path.staging.value) for path in paths(device.kind)))
        parts = [
            geometry.logical(geometry.contents(parallel.source, rank), geometry.table("source"))
            for rank in range(parallel.source)
        ]
        self._expected = np.split(np.concatenate(parts, axis=3), parallel.target, axis=3)[-1]

    def __enter__(self) -> _Target:
        with ExitStack() as stack:
            self._sources = [stack.enter_context(FetchSource(setup)) for setup in self._setups(new_epoch())]
            at = layouts_of(self._geometry, self._parallel.target, self._parallel.target - 1, self._device.kind)
            num_bytes = 2 * self._expected.nbytes
            self._rank = stack.enter_context(closing(EngineRank(self._device, at, num_bytes)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _setups(self, epoch: str) -> Iterator[Setup]:
        kind, num_devices = self._device.kind, number_of(self._device.kind)
        for rank in range(self._parallel.source):
            number = (rank + 1) % num_devices
            yield Setup(kind, number, epoch, rank, self._parallel.source, self._geometry, self._memories)

    def measured(self, path: MemoryPath) -> tuple[float, FetchReport]:
        """The median time from `Agent.fetch` to `Fetched`, and the report of the last one. Raises TransportError when
        bytes are wrong, or none come."""
        notices: SimpleQueue[Notice] = SimpleQueue()
        config = AgentConfig(f"target-{next(self._numbers)}", self._epoch, self._parallel.target - 1)
        found = []
        with self._rank.open(config, path, notices) as agent:
            for _ in range(1 + REPEATS):
                self._rank.fill(POISON)
                found.append(self._fetched(agent, path, notices))
                self._check(path)
        # The first fetch includes meeting the peers.
        return statistics.median(seconds for seconds, _ in found[1:]), found[-1][1]

    def _fetched(self, agent: Agent, path: MemoryPath, notices: SimpleQueue[Notice]) -> tuple[float, FetchReport]:
        number = self._memories.index((path.buffer_device, path.staging.value))
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
            raise TransportError(f"{path.name}: the cache did not arrive", found=str(notice))
        for source in self._sources:
            source.withdraw(number, request_id)
        return taken, notice.report

    def _check(self, path: MemoryPath) -> None:
        """Check that every wanted element is right, and nothing else has been touched. Raises TransportError."""
        memory, table = self._rank.memory.cpu().numpy().copy(), self._geometry.table("target")
        there = self._geometry.logical(memory, table)
        if not np.array_equal(there, self._expected):
            raise TransportError(f"{path.name}: {int((there != self._expected).sum()):,} elements are wrong")
        others = tuple(set(range(self._geometry.num_blocks)) - set(table))
        if (self._geometry.logical(memory, others) != POISON * 257).any():
            raise TransportError(f"{path.name}: blocks of others were touched")
