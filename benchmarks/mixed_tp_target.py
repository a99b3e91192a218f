"""The measured rank: agents of every strategy over one cache, with what peers and limits need beside them."""

from __future__ import annotations

import base64
import queue
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
from mixed_tp_alone import Alone
from mixed_tp_cases import NUM_HEADS, Request, Rig, logical, pattern, write
from mixed_tp_nixl import PlainNixl, Prepared
from mixed_tp_source import SourceProcess, ours
from mixed_tp_stages import Chain, TargetStages, run_chains
from plain_sockets import PlainSockets
from two_hosts import FAR, FAR_HOST, NEAR

from kvferry import Agent, Cache, new_epoch, new_lease_id
from kvferry.agent.config import staging_named
from kvferry.agent.memory.arena import host_arena
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.session.commands import Fetched
from kvferry.session.events import FetchRequest
from kvferry.transport.registry import open_transports
from kvferry.transport.rowcopy.copier import current, wait_until_compiled
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.messages import Reference

__all__ = ["Target"]


@dataclass(frozen=True, slots=True)
class Ours:
    """An agent: its strategy and digest, whether sources may write a share of what is read, and whether they may gather
    straight into its slots, as they do on one host only."""

    strategy: str
    digest: DigestPolicy = DigestPolicy.SAMPLED
    may_share: bool = True
    is_near: bool = True


AGENTS = {
    "auto": Ours("auto"),
    "auto, no digest": Ours("auto", digest=DigestPolicy.OFF),
    "direct": Ours("direct"),
    "direct, not shared": Ours("direct", may_share=False),
    "scatter": Ours("scatter"),
    "pack": Ours("pack"),
    "pack, as between hosts": Ours("pack", is_near=False),
}
POISON = 0xA5
FETCH_S = 60.0
LEAD_S = 0.02
"""All processes have heard by then when to begin."""


class Unattached:
    """Staging memory of which nobody is told how to attach it: what is gathered goes over the wire."""

    def __init__(self, num_bytes: int) -> None:
        self._arena = host_arena(num_bytes)
        self.memory = replace(self._arena.memory, shared_fd=-1)

    def close(self, may_be_written: bool) -> None:
        self._arena.close(may_be_written)


def agents_of(rig: Rig) -> list[str]:
    """The agents that there can be: over shared memory nobody writes to what nobody attaches, and between hosts nothing
    is attached or shared."""
    if rig.are_apart:
        return ["auto", "direct", "scatter", "pack"]
    return [name for name, ours in AGENTS.items() if ours.is_near or rig.transport != "shm"]


class Target:
    """Target rank 0 of a rig, with the processes of all source ranks; with all agents that there can be, or some."""

    def __init__(self, rig: Rig, names: Sequence[str] = ()) -> None:
        self.rig = rig
        epoch = new_epoch()
        self.sources = [SourceProcess(rig, rank, epoch) for rank in range(rig.source_parallel)]
        size_bytes = sum(region.size_bytes for region in rig.target_layouts(0)[0].regions)
        self._shared = allocate_shared(size_bytes, "benchmark-target")
        self._memory = np.frombuffer(self._shared.buffer, np.uint8)
        self._numbers = count()
        self._notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._agents = {name: self._agent(name) for name in names or agents_of(rig)}
        self._stages = TargetStages(rig, self._shared.memory)
        extents = [(each.address, each.size_bytes) for each in (self._shared.memory, self._stages.arena.memory)]
        self._nixl = PlainNixl(extents)
        self._facts = [source.ask("facts") for source in self.sources]
        self._peers = [self._nixl.meet(base64.b64decode(facts["metadata"])) for facts in self._facts]
        metadata = base64.b64encode(self._nixl.metadata()).decode()
        for source in self.sources:
            source.ask("meet", metadata=metadata)
        self._sockets = PlainSockets(FAR, FAR_HOST) if rig.are_apart else None
        self._alone = Alone(rig.transport, self._shared.memory) if rig.copies_alone else None
        if self._alone:
            for rank, facts in enumerate(self._facts):
                self._alone.meet(str(rank), facts["alone"])
        wait_until_compiled(60.0)
        self.copier = current().name
        self._reads: list[Prepared] = []
        self._one: list[Prepared] = []
        self._one_copies: dict[str, Copies] = {}
        self._expected = np.empty(0, np.uint16)
        self._request = Request(0, "")

    def _agent(self, name: str) -> Agent:
        wanted = AGENTS[name]
        layouts = self.rig.target_layouts(self._shared.memory.address)
        config = ours(
            self.rig,
            f"target-{name.replace(' ', '-')}",
            NEAR,
            digest=wanted.digest,
            may_switch_direction=wanted.may_share,
            staging=staging_named(wanted.strategy),
        )
        opened = open_transports(self.rig.transport, config.host)
        arena = host_arena if wanted.is_near else Unattached
        cache = Cache(layouts, (self._shared.memory,), arena=arena)
        agent = Agent(config, cache, self._notices.put, opened.transports, opened.unavailable)
        agent.start()
        return agent

    @property
    def agents(self) -> tuple[str, ...]:
        """What ours are called."""
        return tuple(self._agents)

    @property
    def _readable(self) -> list[SourceProcess]:
        return [self.sources[rank] for rank in self.rig.readable]

    def choose(self, request: Request, sources: list[np.ndarray]) -> dict[str, int]:
        """What is moved from now on. Returns how many descriptors the peers' ways have."""
        self._request = request
        self._expected = np.concatenate(
            [logical(memory, self.rig.format, request.table("source")) for memory in sources], axis=3
        )[:, :, :, : NUM_HEADS // self.rig.target_parallel]
        for read in (*self._reads, *self._one):
            read.release()
        here, what = self._shared.memory.address, asdict(request)
        rows = {
            rank: self.rig.rows(rank, (self._facts[rank]["memory"], here), request, by_token=False)
            for rank in self.rig.readable
        }
        self._reads = [self._nixl.prepare(self._peers[rank], each, Direction.READ) for rank, each in rows.items()]
        self._one = []
        for rank, each in rows.items():
            far, length = self._facts[rank]["memory"], each.num_bytes
            columns = [np.array([value], np.uint64) for value in (far, here, length)]
            self._one_copies[str(rank)] = Copies(*columns, 1)
            self._one.append(self._nixl.prepare(self._peers[rank], self._one_copies[str(rank)], Direction.READ))
            here += length
        num_written = sum(
            source.ask("prepare_write", what=what, target=self._shared.memory.address) for source in self._readable
        )
        self._stages.prepare(request)
        num_slots = 0
        for rank in self.rig.readable:
            num_slots += self.sources[rank].ask("prepare_stages", what=what, ring=self._stages.ring(rank))
        return {
            "bytes": sum(each.num_bytes for each in rows.values()),
            "token_descriptors": num_written,
            "block_descriptors": sum(map(len, rows.values())),
            "slots": num_slots,
        }

    # --- one measurement each, in seconds ---

    def fetch(self, name: str) -> tuple[float, Any]:
        """From `Agent.fetch` to `Fetched`, as an engine sees it, and the report."""
        elapsed, report, _ = self.timed_fetch(name)
        return elapsed, report

    def timed_fetch(self, name: str) -> tuple[float, Any, float]:
        """Like `fetch`, and when it began by the monotonic clock."""
        number, lease_id, what = next(self._numbers), new_lease_id(), asdict(self._request)
        offers = [source.ask("lease", request=f"r{number}", lease_id=lease_id, what=what) for source in self.sources]
        wanted = FetchRequest(
            f"q{number}",
            msgspec.convert(offers[0], Reference),
            tuple(facts["address"] for facts in self._facts),
            (self._request.table("target"),),
            self._request.ranges,
        )
        began = time.monotonic()
        self._agents[name].fetch(wanted)
        notice = self._notices.get(timeout=FETCH_S)
        elapsed = time.monotonic() - began
        if not isinstance(notice, Fetched):
            raise RuntimeError(str(notice))
        for source in self.sources:
            source.ask("end", request=f"r{number}")
        return elapsed, notice.report, began

    def read_by_block(self) -> float:
        return self._helped(self._reads)

    def read_one(self) -> float:
        return self._helped(self._one)

    def copy_one(self) -> float:
        """Like `read_one`, over our own transport."""
        return self._alone.read(self._one_copies)

    def over_sockets(self) -> float:
        """As many bytes over one plain connection."""
        return self._sockets.run("read", self._memory.data[: self._expected.nbytes])

    def _helped(self, work: list[Prepared]) -> float:
        for source in self._readable:
            source.ask("help", on=True)
        elapsed = self._nixl.run(work)
        for source in self._readable:
            source.ask("help", on=False)
        return elapsed

    def write_by_token(self) -> float:
        for source in self._readable:
            source.tell("write")
        times = [source.answer(self._nixl.progress) for source in self._readable]
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def stages(self, *names: str) -> dict[str, float]:
        """The longest time of each stage, and of everything together."""
        near = {"scatter": self._stages.scatter} if "scatter" in names else {}
        spans = self._run([name for name in names if name != "scatter"], near)
        longest = {name: max(end - begin for of, begin, end in spans if of == name) for name in names}
        return {**longest, "all": max(end for *_, end in spans) - min(begin for _, begin, _ in spans)}

    def pipeline(self) -> float:
        """The same work, with what each slot has to wait for and nothing else."""
        signals = {rank: self.sources[rank].signals for rank in self.rig.readable}
        spans = self._run(["pipeline"], {"pipeline": lambda: self._stages.pipeline(signals, self._nixl.progress)})
        return max(end for *_, end in spans) - min(begin for _, begin, _ in spans)

    def _run(self, far: list[str], near: dict[str, Chain]) -> list[tuple[str, float, float]]:
        """Chains of the sources, and chains here, all at once; when each began and ended."""
        begin_at = time.monotonic() + LEAD_S
        for source in self._readable if far else ():
            source.tell("stages", which=far, begin_at=begin_at)
        found = [run_chains(near, begin_at)]
        found += [source.answer(self._nixl.progress) for source in self._readable] if far else []
        return [(name, *span) for each in found for name, span in each.items()]

    # --- whether it is right ---

    def poison(self) -> None:
        self._memory[:] = POISON

    def check(self, what: str) -> None:
        """Every wanted element is right, and nothing else has been touched."""
        table = self._request.table("target")
        found = logical(self._memory, self.rig.format, table)
        if not np.array_equal(found, self._expected):
            raise RuntimeError(f"{what}: wrong bytes arrived")
        write(self._memory, self.rig.format, table, np.full(1, POISON * 257, np.uint16))
        if (self._memory.view(np.uint64) != np.uint64(int.from_bytes(bytes([POISON] * 8)))).any():
            raise RuntimeError(f"{what}: other bytes were touched")

    def source_memories(self) -> list[np.ndarray]:
        """What the sources that matter hold, made again here."""
        found = []
        for rank in self.rig.readable:
            size_bytes = sum(region.size_bytes for region in self.rig.source_layouts(rank, 0)[rank].regions)
            found.append(np.empty(size_bytes, np.uint8))
            pattern(rank, found[-1])
        return found

    def close(self) -> None:
        for agent in self._agents.values():
            agent.close()
        for source in self.sources:
            source.close()
        for each in (self._alone, self._sockets):
            if each:
                each.close()
        self._stages.close()
