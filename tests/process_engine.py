"""An engine without a model in a process of its own: a pool of blocks and an agent, for tests that kill and restart.

It starts in a fraction of a second. `python process_engine.py ENGINE_ID TRANSPORT LEASE_S MEMORY_FD` serves until its
standard input ends; `ProcessEngine` starts it and speaks with it, one JSON object per line in either direction.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import threading
import time
from collections import deque
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from kvferry import AgentConfig, Cache, Notice, new_lease_id, open_agent
from kvferry.errors import TransportError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.testing.child_process import ChildProcess
from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.messages import Reference

ANSWER_S = 60.0
BLOCK_TOKENS = 16
NUM_BLOCKS = 64
NEW_MEMORY = -1
MODEL = attention(num_layers=4, num_heads=2, head_dim=32, dtype="float32", item_bytes=4)
BLOCK_BYTES = BLOCK_TOKENS * MODEL.bytes_per_token
SHAPE = EngineShape(1, 1, block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS, format="block-major")

Facts = dict[str, Any]


class ProcessEngine(ChildProcess):
    """The other process, as its parent sees it."""

    def __init__(self, engine_id: str, transport: str, lease_s: float = 30.0, memory_fd: int = NEW_MEMORY) -> None:
        """Start it; returns at once, the first question waits. Its pool lies in memory of its own, or in that of a file
        that is open here."""
        command = [sys.executable, __file__, engine_id, transport, str(lease_s), str(memory_fd)]
        shared = () if memory_fd == NEW_MEMORY else (memory_fd,)
        super().__init__(command, shared)
        self._notices: list[Facts] = []
        self._rest = b""

    def lease(self, request_id: str, num_blocks: int, seed: int) -> Facts:
        """Compute (from a seed) and lease so many blocks; the answer is what `fetch` of another one needs."""
        return self._ask(do="lease", request=request_id, num_blocks=num_blocks, seed=seed)

    def lease_filled(self, request: LeaseRequest) -> Facts:
        """Lease blocks that are filled already."""
        return self._ask(do="lease_filled", request=request.request_id, lease=msgspec.to_builtins(request))

    def fetch(self, request_id: str, offer: Facts) -> None:
        """Begin to fetch what another one has leased; `notice` tells how it ended."""
        self._ask(do="fetch", request=request_id, offer=offer)

    def address(self) -> str:
        """Where its agent listens."""
        return str(self._ask(do="address")["address"])

    def usage(self) -> Facts:
        """What the process uses now: `fds`, `threads`, `memory_bytes` (its own), `free_blocks`."""
        return self._ask(do="usage")

    def notice(self, request_id: str, *kinds: str) -> Facts:
        """The next notice of one of these kinds about a request: `fetched`, `failed` or `free`.

        Raises TransportError when it does not come.
        """
        while True:
            for notice in self._notices:
                if notice["request"] == request_id and notice["notice"] in kinds:
                    self._notices.remove(notice)
                    return notice
            self._take(self._line())

    def _ask(self, **command: Any) -> Facts:
        self.write_line(json.dumps(command).encode())
        while "answer" not in (said := self._line()):
            self._take(said)
        answer: Facts = said["answer"]
        return answer

    def _take(self, said: Facts) -> None:
        if said["notice"] == "stopped":
            raise TransportError("the agent of the process engine has stopped", hint="its traceback is on stderr")
        self._notices.append(said)

    def _line(self) -> Facts:
        deadline, pipe = time.monotonic() + ANSWER_S, self._process.stdout
        while b"\n" not in self._rest:
            wait_s = max(0.0, deadline - time.monotonic())
            if pipe is None or not select.select([pipe], [], [], wait_s)[0] or not (more := pipe.read(1 << 16)):
                raise TransportError("the process engine does not answer", expected=f"a line within {ANSWER_S:g} s")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        said: Facts = json.loads(line)
        return said


class Served:
    """The process itself: its blocks, its agent, and one method per command."""

    def __init__(self, engine_id: str, transport: str, lease_s: float, memory_fd: int) -> None:
        buffer, memory = pool(memory_fd)
        self._blocks = np.frombuffer(buffer, np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
        cache = Cache(describe(MODEL, SHAPE, memory.address), (memory,))
        # Always read: what a busy machine makes of a self-test must not decide what is tested.
        config = AgentConfig(engine_id, transport=transport, timing=Timing(lease_s=lease_s), may_switch_direction=False)
        self._agent = open_agent(config, cache, self._on_notice)
        self._lock = threading.Lock()
        self._free = deque(range(NUM_BLOCKS))
        self._tables: dict[str, tuple[int, ...]] = {}
        self._agent.start()

    def lease(self, command: Facts) -> Facts:
        table = self._take(command["request"], command["num_blocks"])
        dice = np.random.default_rng(command["seed"])
        for block in table:
            self._blocks[block] = dice.integers(0, 256, BLOCK_BYTES, np.uint8)
        digest = self._digest(table)
        request = LeaseRequest(command["request"], new_lease_id(), (table,), len(table) * BLOCK_TOKENS)
        return {**self._lease(request), "num_blocks": len(table), "digest": digest}

    def lease_filled(self, command: Facts) -> Facts:
        request = msgspec.convert(command["lease"], LeaseRequest)
        (table,) = request.block_tables
        with self._lock:
            self._free = deque(block for block in self._free if block not in table)
            self._tables[request.request_id] = table
        return self._lease(request)

    def fetch(self, command: Facts) -> Facts:
        offer = command["offer"]
        table = self._take(command["request"], offer["num_blocks"])
        self._blocks[list(table)] = 0
        reference, tokens = msgspec.convert(offer["reference"], Reference), TokenRange(0, len(table) * BLOCK_TOKENS)
        self._agent.fetch(FetchRequest(command["request"], reference, (offer["address"],), (table,), (tokens,)))
        return {}

    def address(self, command: Facts) -> Facts:
        return {"address": self._agent.address}

    def usage(self, command: Facts) -> Facts:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[1:3])
        with self._lock:
            free_blocks = len(self._free)
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "memory_bytes": resident - shared,
            "free_blocks": free_blocks,
        }

    def close(self) -> None:
        self._agent.close()

    def _lease(self, request: LeaseRequest) -> Facts:
        reference = self._agent.lease(request)
        return {"reference": msgspec.to_builtins(reference), "address": self._agent.address}

    def _take(self, request_id: str, num_blocks: int) -> tuple[int, ...]:
        with self._lock:
            table = self._tables[request_id] = tuple(self._free.popleft() for _ in range(num_blocks))
        return table

    def _on_notice(self, notice: Notice) -> None:
        """On the agent's thread. A cache that was fetched is looked at once and given back."""
        match notice:
            case Fetched(request_id, report):
                digest = self._digest(self._tables[request_id])
                self._give_back(request_id)
                say({"notice": "fetched", "request": request_id, "digest": digest, "transport": report.transport})
            case FetchFailed(request_id, error):
                say({"notice": "failed", "request": request_id, "reason": error.reason, "error": str(error)})
            case BlocksReleased(request_id) | LeaseEnded(request_id):
                self._give_back(request_id)
                how = notice.reason if isinstance(notice, LeaseEnded) else ""
                say({"notice": "free", "request": request_id, "how": how})
            case AgentStopped():
                say({"notice": "stopped", "request": ""})

    def _give_back(self, request_id: str) -> None:
        with self._lock:
            self._free.extend(self._tables.pop(request_id))

    def _digest(self, table: tuple[int, ...]) -> str:
        return blake2b(self._blocks[list(table)].tobytes(), digest_size=16).hexdigest()


def pool(memory_fd: int) -> tuple[memoryview, Memory]:
    """New memory, or that of a file that the parent has opened."""
    if memory_fd == NEW_MEMORY:
        shared = allocate_shared(NUM_BLOCKS * BLOCK_BYTES, "kvferry-process-engine")
        return shared.buffer, shared.memory
    buffer = memoryview(mmap.mmap(memory_fd, NUM_BLOCKS * BLOCK_BYTES))
    return buffer, Memory(int(np.frombuffer(buffer, np.uint8).ctypes.data), len(buffer), memory_fd)


def say(facts: Facts) -> None:
    """One line on standard output, in one piece: two threads speak."""
    os.write(sys.stdout.fileno(), json.dumps(facts).encode() + b"\n")


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    engine_id, transport, lease_s, memory_fd = arguments
    served = Served(engine_id, transport, float(lease_s), int(memory_fd))
    answers = (served.lease, served.lease_filled, served.fetch, served.address, served.usage)
    commands = {answer.__name__: answer for answer in answers}
    for line in sys.stdin:
        command = json.loads(line)
        say({"answer": commands[command["do"]](command)})
    served.close()


if __name__ == "__main__":
    main(sys.argv[1:])
