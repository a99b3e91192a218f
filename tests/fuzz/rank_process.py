"""A source rank for a storm to beat on: an agent over a cache that the oracle has filled, in a process of its own.

Standard input has one word per line, and one JSON object answers each: `lease` offers the cache once more, `state`
tells how the agent is. The address and the references go to whoever started this, and to nobody else.
"""

import json
import queue
import sys

import numpy as np
from engines import oracle

from kvferry import Agent, AgentConfig, Cache, new_lease_id, read_token
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import LeaseRequest
from kvferry.transport.registry import open_transports
from kvferry.transport.shm.shared_memory import allocate_shared

MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
SOURCE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TARGET = EngineShape(1, 1, block_tokens=6, num_blocks=9, format="block-head-major")
SOURCE_TABLES, TARGET_TABLES = ((3, 4, 5, 1, 12),), ((7, 2, 0),)
NUM_TOKENS = 18
TRANSPORT = "tcp"


class Rank:
    """An agent, its memory and its notices; `close` it."""

    def __init__(self, engine_id: str, shape: EngineShape, token_file: str) -> None:
        size_bytes = sum(region.size_bytes for region in describe(MODEL, shape, 0)[0].regions)
        self._shared = allocate_shared(size_bytes, engine_id)
        (layout,) = describe(MODEL, shape, self._shared.memory.address)
        contents = np.frombuffer(self._shared.buffer, np.uint8)
        self.memory = oracle.Memory.poisoned_at(layout, contents, self._shared.memory.address)
        self.notices: queue.SimpleQueue = queue.SimpleQueue()
        opened = open_transports(TRANSPORT)
        config = AgentConfig(engine_id, transport=TRANSPORT, token=read_token(token_file))
        cache = Cache((layout,), (self._shared.memory,))
        self.agent = Agent(config, cache, self.notices.put, opened.transports, opened.unavailable)
        self.agent.start()

    def poison(self):
        for buffer in self.memory.buffers.values():
            buffer[:] = oracle.POISON

    def close(self):
        self.agent.close()
        self.memory = None
        self._shared.close()


def main(token_file: str) -> None:
    rank = Rank("p0", SOURCE, token_file)
    oracle.fill(rank.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS + 1))
    print(json.dumps({"address": rank.agent.address}), flush=True)
    for number, line in enumerate(sys.stdin):
        if line.strip() == "lease":
            wanted = LeaseRequest(f"r{number}", new_lease_id(), SOURCE_TABLES, NUM_TOKENS + 1)
            reference = rank.agent.lease(wanted)
            answer = {name: getattr(reference, name) for name in reference.__struct_fields__}
        else:
            counts = {f"{what} {reason}": number for (what, reason), number in list(rank.agent.counts.items())}
            answer = {"alive": rank.agent.alive, "counts": counts}
        print(json.dumps(answer), flush=True)
    rank.close()


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
