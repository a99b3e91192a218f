"""What is left of a transfer when a prefill's last step ends: sent step by step, and layer by layer.

    python benchmarks/layer_wise.py > benchmarks/results/layer_wise.json

A step of a prefill is played: its layers take turns to be *computed* (slept through), 32 in all, for as long as the
row says. The measured time is from the end of the step to the moment at which the target has everything, verified: the
part of the handover that the decode side waits for. `step` writes all when the step has ended; `layers` writes bundles
of layers meanwhile; `layers, no cut-off` does so however little there is. Source and target are two agents of one
process, over shared memory. Prints JSON; medians of interleaved repeats, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from dataclasses import dataclass
from typing import Any

from measuring import machine, say

from kvferry import Agent, AgentConfig, Cache, Notice, new_lease_id
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import Ahead, FetchRequest, LeaseProgress, LeaseRequest
from kvferry.session.source import direct_write
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.transport.registry import open_transports
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared

NUM_LAYERS, BLOCK_TOKENS = 32, 16
MODEL = attention(NUM_LAYERS, 8, 128, "bfloat16", 2)
DEADLINE_S = 60.0
SIZES_MIB = (2, 4, 8, 16, 32, 64, 128)
WAYS = {"step": (False, direct_write.MIN_AHEAD), "layers": (True, direct_write.MIN_AHEAD)}
WAYS["layers, no cut-off"] = True, 1


@dataclass(slots=True)
class Rank:
    """An agent with a cache of its own."""

    agent: Agent
    shared: SharedMemory
    notices: queue.SimpleQueue[Notice]

    @classmethod
    def started(cls, name: str, direction: Direction, num_tokens: int) -> Rank:
        shape = EngineShape(1, 1, BLOCK_TOKENS, -(-num_tokens // BLOCK_TOKENS), "token-major")
        (sized,) = describe(MODEL, shape, first_address=1 << 20)
        shared = allocate_shared(sum(region.size_bytes for region in sized.regions), name)
        shared.buffer[::4096] = b"x" * len(range(0, len(shared.buffer), 4096))
        layouts: tuple[Layout, ...] = tuple(describe(MODEL, shape, first_address=shared.memory.address))
        notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        staging = StagingPolicy((Strategy.DIRECT,), 4 << 20)
        config = AgentConfig(name, transport="shm", direction=direction, may_switch_direction=False, staging=staging)
        opened = open_transports(config.transport, config.host)
        agent = Agent(config, Cache(layouts, (shared.memory,)), notices.put, opened.transports, opened.unavailable)
        agent.start()
        return cls(agent, shared, notices)

    def wait_for(self, kind: type) -> Any:
        while not isinstance(notice := self.notices.get(timeout=DEADLINE_S), kind):
            if isinstance(notice, FetchFailed):
                raise SystemExit(str(notice.error))
        return notice

    def close(self) -> None:
        self.agent.close()
        self.shared.close()


def transfer(source: Rank, target: Rank, num_tokens: int, step_s: float, is_layer_wise: bool) -> float:
    """Milliseconds from the end of the step to the verified end of the transfer."""
    table = tuple(range(-(-num_tokens // BLOCK_TOKENS)))
    request_id = new_lease_id()
    wanted = LeaseRequest(request_id, new_lease_id(), ((),), num_tokens, is_growing=True)
    reference = source.agent.lease(wanted)
    ranges = (TokenRange(0, num_tokens),)
    target.agent.fetch(FetchRequest(request_id, reference, (source.agent.address,), (table,), ranges))
    began = time.perf_counter()
    for layer in range(1, NUM_LAYERS + 1):
        time.sleep(max(0.0, began + layer * step_s / NUM_LAYERS - time.perf_counter()))
        if is_layer_wise and layer < NUM_LAYERS:
            source.agent.grow(LeaseProgress(request_id, (table,), 0, Ahead(num_tokens, 2 * layer)))
    ended = time.perf_counter()
    source.agent.grow(LeaseProgress(request_id, (table,), num_tokens))
    target.wait_for(Fetched)
    left_s = time.perf_counter() - ended
    source.wait_for(LeaseEnded)
    return left_s * 1000


def row(size_mib: int, step_ms: float, repeats: int) -> dict[str, Any]:
    num_tokens = (size_mib << 20) // MODEL.bytes_per_token
    source = Rank.started("p0", Direction.READ, num_tokens)
    target = Rank.started("d0", Direction.WRITE, num_tokens)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        for repeat in range(repeats + 1):
            for name, (is_layer_wise, min_ahead) in WAYS.items():
                direct_write.MIN_AHEAD = min_ahead
                took_ms = transfer(source, target, num_tokens, step_ms / 1000, is_layer_wise)
                if repeat:
                    times[name].append(took_ms)
    finally:
        target.close()
        source.close()
    return {"mib": size_mib, "step_ms": step_ms} | {
        name: round(statistics.median(values), 2) for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--step-ms", type=float, default=200.0, help="how long a step computes")
    arguments = parser.parse_args()
    rows = []
    for size_mib in SIZES_MIB:
        rows.append(row(size_mib, arguments.step_ms, arguments.repeats))
        say(json.dumps(rows[-1]))
    print(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
