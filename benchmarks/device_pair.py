"""Fetching a cache from one GPU's memory into another's (or its own), beside how vLLM and SGLang would, and the limits.

    python benchmarks/device_pair.py > benchmarks/results/device_pair_NAME.json

Prints JSON. Needs CUDA or ROCm, Triton and NIXL. Each rank is a process of its own with a real agent; source rank *n*
computes on device *n*, and the target on the next, as far as there are devices: with one, all share it, and the wire is
a copy within its memory. A *way* is a transport, the memory that it registers (the device's own, or staging memory in
the host), where staging memory lies, and a strategy. Peers: one NIXL descriptor per block (as vLLM reads), and one per
token (as SGLang writes). Limits: as many bytes as one NIXL descriptor per source rank, and as one copy of torch's.
Everything takes turns; before that, what each way moves is compared, byte for byte, with plain indexing in the host.

`python benchmarks/device_pair.py --device cpu --repeats 1 --tokens 256` runs it without a device, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from measuring import machine, say
from mixed_tp_cases import FORMATS, NUM_HEADS, TOKENS, Request, Rig, logical, pattern, write
from mixed_tp_nixl import PlainNixl, Prepared

from kvferry import (
    Agent,
    AgentConfig,
    Fetched,
    FetchReport,
    FetchRequest,
    LeaseRequest,
    Memory,
    Timing,
    new_lease_id,
    open_agent,
)
from kvferry.devices import cache_device
from kvferry.options import staging_named
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.staging.device.table import StagingMemory

PAIRS = ((1, 1), (2, 1), (1, 2))
TIMING = Timing(lease_s=120.0)
ANSWER_S = 120.0
POISON = 0xA5
SLOW_S = 1.0
"""What takes longer is repeated twice only."""
MAX_TOKEN_DESCRIPTORS = 300_000
"""Of lists that are longer, a device takes minutes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both agents of a fetch are set to. `registers` is `device`, or `cpu` for staging memory in the host only."""

    transport: str
    registers: str
    staging: StagingMemory

    @property
    def name(self) -> str:
        memory = "device memory" if self.registers == "device" else "host memory only"
        where = ", staging on the device" if self.staging is StagingMemory.DEVICE else ""
        return f"{self.transport}, {memory}{where}"


ON_DEVICE = Setting("nixl", "device", StagingMemory.DEVICE)
IN_HOST = Setting("nixl", "device", StagingMemory.HOST)
HOST_ONLY = tuple(Setting(name, "cpu", StagingMemory.HOST) for name in ("nixl", "cma", "shm", "tcp"))
WAYS = {
    ON_DEVICE: ("auto", "direct", "scatter", "pack"),
    IN_HOST: ("auto", "pack"),
    **dict.fromkeys(HOST_ONLY, ("pack",)),
}


def settings_on(device: str) -> tuple[Setting, ...]:
    """Those that a device allows: the host's own memory is registered as it is, and nobody attaches torch's."""
    if device != "cpu":
        return tuple(WAYS)
    return tuple(each for each in HOST_ONLY if each.transport != "shm")


def device_of(kind: str, number: int) -> torch.device:
    return (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, number % torch.get_device_module(kind).device_count())
    )


class Rank:
    """One rank's cache on its device, with an agent per setting and strategy and a plain NIXL agent."""

    def __init__(self, device: torch.device, contents: np.ndarray) -> None:
        self.device = device
        self.cache = torch.from_numpy(contents).to(device)
        self._wait()
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.agents: dict[tuple[Setting, str], Agent] = {}

    @cached_property
    def nixl(self) -> PlainNixl:
        """After our own agents, which choose UCX's settings."""
        return PlainNixl([(self.cache.data_ptr(), self.cache.numel())], self.device.type, self.device.index or 0)

    def open(self, setting: Setting, strategy: str, layouts: tuple[Any, ...], config: AgentConfig) -> Agent:
        """An agent with these settings. Raises what `open_agent` does."""
        kind = self.device.type
        on = cache_device(self.device, kind if setting.registers == "device" else "cpu", setting.staging)
        regions = [replace(each, kind="dram" if kind == "cpu" else "vram") for each in layouts[config.rank].regions]
        mine = replace(layouts[config.rank], regions=tuple(regions))
        all_layouts = (*layouts[: config.rank], mine, *layouts[config.rank + 1 :])
        memory = Memory(self.cache.data_ptr(), self.cache.numel(), -1)
        config = replace(config, transport=setting.transport, timing=TIMING, staging=staging_named(strategy))
        agent = open_agent(config, on.cache(all_layouts, (memory,)), self.notices.put)
        agent.start()
        self.agents[setting, strategy] = agent
        return agent

    def notice(self, kind: type) -> Any:
        found = self.notices.get(timeout=ANSWER_S)
        if not isinstance(found, kind):
            raise RuntimeError(str(found))
        return found

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def fill(self, value: int) -> None:
        self.cache.fill_(value)
        self._wait()

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


# --- one source rank, in a process of its own ---


def serve(pipe: Connection, rig: Rig, rank: int, epoch: str, kind: str) -> None:
    """Answer questions of the target until it hangs up."""
    size_bytes = sum(region.size_bytes for region in rig.source_layouts(rank, 0)[rank].regions)
    contents = np.empty(size_bytes, np.uint8)
    pattern(rank, contents)
    source = Rank(device_of(kind, rank), contents)
    layouts = rig.source_layouts(rank, source.cache.data_ptr())
    for setting in settings_on(kind):
        source.open(setting, "auto", layouts, AgentConfig(f"source-{setting.name.replace(' ', '-')}", epoch, rank))
    answers = Answers(rig, rank, source)
    with ExitStack() as undo:
        undo.callback(source.close)
        while True:
            while not pipe.poll(answers.patience_s):
                source.nixl.progress()
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(answers, name)(*arguments))


class Answers:
    """One method per question."""

    def __init__(self, rig: Rig, rank: int, source: Rank) -> None:
        self._rig, self._rank, self._source = rig, rank, source
        self._write: list[Prepared] = []
        self.patience_s = 1.0

    def facts(self) -> dict[str, Any]:
        addresses = {setting: agent.address for (setting, _), agent in self._source.agents.items()}
        memory, metadata = self._source.cache.data_ptr(), self._source.nixl.metadata()
        return {"addresses": addresses, "memory": memory, "metadata": metadata}

    def meet(self, metadata: bytes) -> None:
        self._peer = self._source.nixl.meet(metadata)

    def lease(self, setting: Setting, request: str, lease_id: str, asked: Request) -> Any:
        wanted = LeaseRequest(request, lease_id, (asked.table("source"),), asked.num_tokens)
        return self._source.agents[setting, "auto"].lease(wanted)

    def end(self, setting: Setting, request: str) -> None:
        """Other ranks of the target are not there, and will never say that they are done."""
        self._source.agents[setting, "auto"].withdraw(request)
        self._source.notices.get(timeout=ANSWER_S)

    def prepare_write(self, asked: Request, target: int, device_id: int) -> int:
        """One descriptor per token, as SGLang's source would write them; 0 where those are too many."""
        by_token = self._rig.source_parallel != self._rig.target_parallel
        addresses = self._source.cache.data_ptr(), target
        copies = self._rig.rows(self._rank, addresses, asked, by_token=by_token)
        for write_ in self._write:
            write_.release()
        self._write = []
        if len(copies) > MAX_TOKEN_DESCRIPTORS:
            return 0
        self._write.append(self._source.nixl.prepare(self._peer, copies, Direction.WRITE, device_id))
        return len(copies)

    def write(self) -> float:
        return self._source.nixl.run(self._write)

    def help(self, is_wanted: bool) -> None:
        """Make progress for a peer that reads, or not."""
        self.patience_s = 0.0005 if is_wanted else 1.0


class Source:
    """The process as the target sees it."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, arguments))
        if not self.pipe.poll(ANSWER_S):
            raise RuntimeError("a source process does not answer")
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(ANSWER_S)


# --- the target ---


class Target:
    """Target rank 0 of a rig, with the processes of all source ranks."""

    def __init__(self, rig: Rig, kind: str) -> None:
        self.rig = rig
        epoch = f"{time.time_ns():x}"
        self.sources = [Source(rig, rank, epoch, kind) for rank in range(rig.source_parallel)]
        size_bytes = sum(region.size_bytes for region in rig.target_layouts(0)[0].regions)
        self.rank = Rank(device_of(kind, rig.source_parallel), np.full(size_bytes, POISON, np.uint8))
        layouts = rig.target_layouts(self.rank.cache.data_ptr())
        self.ways: list[tuple[Setting, str]] = []
        for setting in settings_on(kind):
            for strategy in WAYS[setting]:
                name = f"target-{setting.name}-{strategy}".replace(" ", "-")
                self.rank.open(setting, strategy, layouts, AgentConfig(name))
                self.ways.append((setting, strategy))
        self._facts = [source.ask("facts") for source in self.sources]
        self._peers = [self.rank.nixl.meet(facts["metadata"]) for facts in self._facts]
        for source in self.sources:
            source.ask("meet", self.rank.nixl.metadata())
        self._numbers = count()
        self._reads: list[Prepared] = []
        self._one: list[Prepared] = []

    def choose(self, request: Request) -> dict[str, int]:
        """What is moved from now on. Returns how many descriptors the peers' ways have."""
        self._request = request
        for prepared in (*self._reads, *self._one):
            prepared.release()
        here, rows, memories = self.rank.cache.data_ptr(), {}, []
        for rank in self.rig.readable:
            rows[rank] = self.rig.rows(rank, (self._facts[rank]["memory"], here), request, by_token=False)
            size_bytes = sum(region.size_bytes for region in self.rig.source_layouts(rank, 0)[rank].regions)
            memories.append(np.empty(size_bytes, np.uint8))
            pattern(rank, memories[-1])
        parts = [logical(memory, self.rig.format, request.table("source")) for memory in memories]
        self._expected = np.concatenate(parts, axis=3)[:, :, :, : NUM_HEADS // self.rig.target_parallel]
        self._reads = [self._prepared(rank, each) for rank, each in rows.items()]
        self._one, at = [], here
        for rank, each in rows.items():
            columns = [np.array([value], np.uint64) for value in (self._facts[rank]["memory"], at, each.num_bytes)]
            self._one.append(self._prepared(rank, Copies(*columns, 1)))
            at += each.num_bytes
        readable = [self.sources[rank] for rank in self.rig.readable]
        device_id = self.rank.device.index or 0
        written = [source.ask("prepare_write", request, here, device_id) for source in readable]
        return {
            "bytes": sum(each.num_bytes for each in rows.values()),
            "block_descriptors": sum(map(len, rows.values())),
            "token_descriptors": sum(written) if all(written) else 0,
        }

    def _prepared(self, rank: int, copies: Copies) -> Prepared:
        return self.rank.nixl.prepare(self._peers[rank], copies, Direction.READ, self.sources_device(rank))

    def carriers(self) -> dict[str, list[str]]:
        """What carries the bytes of each way, by the transport's own names."""
        return {
            f"{setting.name}, {strategy}": sorted(
                {carrier for peer in agent.peers for each in peer.measurements for carrier in each.carriers}
            )
            for (setting, strategy), agent in self.rank.agents.items()
        }

    def sources_device(self, rank: int) -> int:
        return device_of(self.rank.device.type, rank).index or 0

    def fetch(self, setting: Setting, strategy: str) -> tuple[float, Any]:
        """From `Agent.fetch` to `Fetched`, as an engine sees it, and the report."""
        number, lease_id = next(self._numbers), new_lease_id()
        asked = (setting, f"r{number}", lease_id, self._request)
        references = [source.ask("lease", *asked) for source in self.sources]
        addresses = tuple(facts["addresses"][setting] for facts in self._facts)
        tables = (self._request.table("target"),)
        wanted = FetchRequest(f"q{number}", references[0], addresses, tables, self._request.ranges)
        began = time.perf_counter()
        self.rank.agents[setting, strategy].fetch(wanted)
        report = self.rank.notice(Fetched).report
        elapsed = time.perf_counter() - began
        for source in self.sources:
            source.ask("end", setting, f"r{number}")
        return elapsed, report

    def read_by_block(self) -> float:
        return self._helped(self._reads)

    def read_one(self) -> float:
        return self._helped(self._one)

    def _helped(self, work: Sequence[Prepared]) -> float:
        for rank in self.rig.readable:
            self.sources[rank].ask("help", True)
        elapsed = self.rank.nixl.run(work)
        for rank in self.rig.readable:
            self.sources[rank].ask("help", False)
        return elapsed

    def write_by_token(self) -> float:
        """The slowest source: they begin within a moment."""
        readable = [self.sources[rank] for rank in self.rig.readable]
        for source in readable:
            source.pipe.send(("write", ()))
        times = []
        for source in readable:
            while not source.pipe.poll(0.0005):
                self.rank.nixl.progress()
            times.append(source.pipe.recv())
        return max(times)

    def copy_one(self) -> float:
        """As many bytes from one half of the cache into the other."""
        num_bytes = min(self._expected.nbytes, self.rank.cache.numel() // 2)
        began = time.perf_counter()
        self.rank.cache[-num_bytes:].copy_(self.rank.cache[:num_bytes])
        self.rank._wait()
        return (time.perf_counter() - began) * self._expected.nbytes / num_bytes

    def check(self, what: str) -> None:
        """Every wanted element is right, and nothing else has been touched."""
        memory, table = self.rank.cache.cpu().numpy(), self._request.table("target")
        if not np.array_equal(logical(memory, self.rig.format, table), self._expected):
            raise RuntimeError(f"{what}: wrong bytes arrived")
        write(memory, self.rig.format, table, np.full(1, POISON * 257, np.uint16))
        if (memory.view(np.uint64) != np.uint64(int.from_bytes(bytes([POISON] * 8)))).any():
            raise RuntimeError(f"{what}: other bytes were touched")

    def close(self) -> None:
        self.rank.close()
        for source in self.sources:
            source.close()


def measure(target: Target, request: Request, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds; every repeat runs everything once, in an order of its own."""
    descriptors = target.choose(request)
    reports: dict[str, Any] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, Callable[[], float]] = {
        f"{setting.name}, {strategy}": _fetching(target, setting, strategy, reports)
        for setting, strategy in target.ways
    }
    steps["peer: a descriptor per block, read"] = target.read_by_block
    if descriptors["token_descriptors"]:
        steps["peer: a descriptor per token, written"] = target.write_by_token
    checked = list(steps)
    steps["limit: one descriptor per source"] = target.read_one
    steps["limit: one copy"] = target.copy_one
    for name in checked:
        target.rank.fill(POISON)
        steps[name]()
        target.check(name)
    for number in range(repeats):
        names = list(steps)
        random.Random(number).shuffle(names)
        for name in names:
            if number < 2 or statistics.median(seconds[name]) < SLOW_S:
                seconds[name].append(steps[name]())
    ms = {name: round(statistics.median(seconds[name]) * 1000, 3) for name in steps}
    rig, last = target.rig, {name: told(report) for name, report in reports.items()}
    head = {"pair": f"{rig.source_parallel} to {rig.target_parallel}", "format": rig.format}
    row = {**head, "tokens": request.num_tokens, **descriptors, "ms": ms, "last": last, "carriers": target.carriers()}
    # All of it: a lent device may be taken away before the end.
    say(json.dumps(row))
    return row


def told(report: FetchReport) -> dict[str, Any]:
    """How the last fetch of a way went."""
    phases = {name: round(seconds * 1000, 3) for name, seconds in report.phases_s.items()}
    return {"strategy": str(report.strategy), "phases_ms": phases}


def _fetching(target: Target, setting: Setting, strategy: str, reports: dict[str, Any]) -> Callable[[], float]:
    def fetch() -> float:
        elapsed, reports[f"{setting.name}, {strategy}"] = target.fetch(setting, strategy)
        return elapsed

    return fetch


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for pair in arguments.pairs:
        for memory_format in arguments.formats:
            source_parallel, target_parallel = map(int, pair.split("-"))
            with ExitStack() as undo:
                target = Target(Rig(source_parallel, target_parallel, memory_format), arguments.device)
                undo.callback(target.close)
                for num_tokens in arguments.tokens:
                    yield measure(target, Request(num_tokens, "random"), arguments.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too); cpu to see that it works")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pairs", nargs="+", default=[f"{source}-{target}" for source, target in PAIRS])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    arguments = parser.parse_args()
    module: Any = torch.get_device_module(arguments.device)
    is_here = arguments.device != "cpu"
    if is_here and not module.is_available():
        parser.error(f"no {arguments.device} device here; see --help for a run without one")
    devices = [module.get_device_name(number) for number in range(module.device_count())] if is_here else ["cpu"]
    head = {"devices": devices, "machine": machine(), "torch": torch.__version__, "repeats": arguments.repeats}
    print(json.dumps({**head, "rows": list(rows(arguments))}, indent=1))


if __name__ == "__main__":
    main()
