"""One source rank in a process of its own: an agent, a plain NIXL agent beside it, and a mover.

`SourceProcess` starts it and speaks with it, one JSON object per line in either direction.
"""

from __future__ import annotations

import base64
import json
import queue
import select
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from fetch_marks import Echo, Mark, record
from mixed_tp_alone import Alone
from mixed_tp_cases import Request, Rig, pattern
from mixed_tp_nixl import PlainNixl, Prepared
from mixed_tp_stages import Chain, Signals, SourceStages
from two_hosts import FAR, FAR_HOST

from kvferry import Agent, AgentConfig, Cache, SharedToken
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import LeaseEnded
from kvferry.session.events import LeaseRequest
from kvferry.session.timing import Timing
from kvferry.transport.registry import open_transports
from kvferry.transport.rowcopy.copier import wait_until_compiled
from kvferry.transport.shm.shared_memory import allocate_shared

__all__ = ["SourceProcess", "ours"]

TOKEN = SharedToken(b"benchmark of two hosts in namespaces")
ANSWER_S = 120.0
END_S = 20.0

Facts = dict[str, Any]


def ours(rig: Rig, engine_id: str, host: str, **settings: Any) -> AgentConfig:
    """The settings of an agent that listens on this of the two hosts, or where there is one only, on that."""
    known = {"transport": rig.transport, "timing": Timing(lease_s=120.0), **settings}
    return AgentConfig(engine_id, host=host, token=TOKEN, **known) if rig.are_apart else AgentConfig(engine_id, **known)


class SourceProcess:
    """The process as the target sees it."""

    def __init__(self, rig: Rig, rank: int, epoch: str) -> None:
        """Start it; the first question waits."""
        self._nap_s = rig.nap_s
        self.signals, theirs = Signals.pair()
        start = {"rig": asdict(rig), "rank": rank, "epoch": epoch, "signals": asdict(theirs)}
        self._process = subprocess.Popen(
            [*(FAR_HOST if rig.are_apart else ()), sys.executable, __file__, json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(theirs.filled, theirs.emptied),
        )
        theirs.close()
        self._rest = b""

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer(lambda: None)

    def tell(self, do: str, **arguments: Any) -> None:
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, progress: Any) -> Any:
        """The answer to the oldest question; `progress` is called again and again meanwhile."""
        deadline, pipe = time.monotonic() + ANSWER_S, self._process.stdout
        while b"\n" not in self._rest:
            progress()
            if select.select([pipe], [], [], self._nap_s)[0]:
                more = pipe.read(1 << 16)
                if not more:
                    raise RuntimeError("a source process has ended")
                self._rest += more
            elif time.monotonic() > deadline:
                raise RuntimeError("a source process does not answer")
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Let it end, and see that it does."""
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self.signals.close()


class Served:
    """The process itself, with one method per question."""

    def __init__(self, rig: Rig, rank: int, epoch: str, signals: Signals) -> None:
        self._rig, self._rank, self._signals = rig, rank, signals
        size_bytes = sum(region.size_bytes for region in rig.source_layouts(rank, 0)[rank].regions)
        self._shared = allocate_shared(size_bytes, "benchmark-source")
        pattern(rank, np.frombuffer(self._shared.buffer, np.uint8))
        config = ours(rig, "source", FAR, epoch=epoch, rank=rank)
        opened = open_transports(rig.transport, config.host)
        self._notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        memory = self._shared.memory
        cache = Cache(rig.source_layouts(rank, memory.address), (memory,))
        self._agent = Agent(config, cache, self._notices.put, opened.transports, opened.unavailable)
        self._agent.start()
        self._stages = SourceStages(rig, rank, memory)
        arena = self._stages.arena.memory
        extents = [(each.address, each.size_bytes) for each in (memory, arena)]
        self._nixl = PlainNixl(extents)
        self._alone = Alone(rig.transport, memory) if rig.copies_alone else None
        self._is_helping = False
        self._writes: list[Prepared] = []
        wait_until_compiled(60.0)

    def facts(self) -> Facts:
        metadata = base64.b64encode(self._nixl.metadata()).decode()
        facts = {"address": self._agent.address, "memory": self._shared.memory.address, "metadata": metadata}
        return {**facts, "alone": self._alone.descriptor() if self._alone else ""}

    def record(self) -> None:
        """Note from now on what the agent's thread does."""
        self._marks = record()

    def echo(self) -> int:
        """Answer messages on this port of the host from now on."""
        return Echo().port

    def marks(self) -> list[Mark]:
        """What it has done since the last question."""
        found = list(self._marks)
        self._marks.clear()
        return found

    def meet(self, metadata: str) -> None:
        self._peer = self._nixl.meet(base64.b64decode(metadata))

    def lease(self, request: str, lease_id: str, what: Facts) -> Any:
        asked = Request(**what)
        wanted = LeaseRequest(request, lease_id, (asked.table("source"),), asked.num_tokens)
        return msgspec.to_builtins(self._agent.lease(wanted))

    def end(self, request: str) -> str:
        """Other ranks of the target, that are not there, will never say that they are done."""
        self._agent.withdraw(request)
        notice = self._notices.get(timeout=ANSWER_S)
        return notice.reason if isinstance(notice, LeaseEnded) else str(notice)

    def prepare_write(self, what: Facts, target: int) -> int:
        """One descriptor per token, as SGLang's source would write them. Returns how many."""
        for write in self._writes:
            write.release()
        by_token = self._rig.source_parallel != self._rig.target_parallel
        addresses = self._shared.memory.address, target
        copies = self._rig.rows(self._rank, addresses, Request(**what), by_token=by_token)
        self._writes = [self._nixl.prepare(self._peer, copies, Direction.WRITE)]
        return len(copies)

    def write(self) -> tuple[float, float]:
        """When it began and ended."""
        began = time.monotonic()
        self._nixl.run(self._writes)
        return began, time.monotonic()

    def help(self, on: bool) -> None:
        """Make progress for peers that read, or not."""
        self._is_helping = on

    def prepare_stages(self, what: Facts, ring: int) -> int:
        return self._stages.prepare(Request(**what), ring)

    def stages(self, which: list[str], begin_at: float) -> Facts:
        chains: dict[str, Chain] = {}
        if "gather" in which:
            chains["gather"] = self._stages.gather
        if "wire" in which:
            chains["wire"] = lambda: self._stages.wire(self._nixl, self._peer)
        if "pipeline" in which:
            chains["pipeline"] = lambda: self._stages.pipeline(self._nixl, self._peer, self._signals)
        return self._stages.run(chains, begin_at)

    def serve(self) -> None:
        while True:
            ready = select.select([sys.stdin], [], [], self._rig.nap_s if self._is_helping else None)[0]
            if self._is_helping:
                self._nixl.progress()
            if ready:
                line = sys.stdin.buffer.readline()
                if not line:
                    break
                command = json.loads(line)
                answer = getattr(self, command.pop("do"))(**command)
                sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
                sys.stdout.buffer.flush()
        self._agent.close()
        if self._alone:
            self._alone.close()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    Served(Rig(**asked["rig"]), asked["rank"], asked["epoch"], Signals(**asked["signals"])).serve()
