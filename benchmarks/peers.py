"""What each further peer costs an agent: memory, descriptors, threads, wake-ups, and the time of a fetch beside them.

    python benchmarks/peers.py > benchmarks/results/peers.json
    python benchmarks/peers.py --peers 1,100 --transport nixl
    python benchmarks/peers.py --peers 64,240 --roles meeting --transport shm

One agent in a process of its own, and so many peers, each a real agent with a socket of its own, in other processes.
Each peer fetches one token of a model with 32 layers from it once (`source`), or it from each of them (`target`); then
all are idle. Memory is the process's own (`USS`); what the kernel keeps for sockets is not in it. With `meeting` it
asks all of them for a token at the same time, and has met none before. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import psutil
from measuring import machine, num_wake_ups, say

import kvferry
from kvferry.kv_transfer_params import from_params, to_params
from kvferry.layout import EngineShape, attention, describe

MODEL = attention(num_layers=32, num_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2)
BLOCK_TOKENS, NUM_BLOCKS = 16, 2
TABLES = ((0,),)
# Of a peer. It holds slots of its own size, which nobody uses here.
STAGING_BYTES = 1 << 20
AT_ONCE = 16
PEERS_OF_A_PROCESS = 125
ANSWER_S = 600.0
NUM_FETCHES = 50
# Peers stay known, so that a slow machine measures all of them.
TIMING = kvferry.Timing(idle_peer_s=3600.0, handshake_s=120.0, lease_s=600.0, missed_heartbeats=30)
MEETING_TIMING = kvferry.Timing(lease_s=600.0)


class Engine:
    """An agent with one block for what it leases, and one for what it fetches."""

    def __init__(self, name: str, transport: str, timing: kvferry.Timing) -> None:
        shape = EngineShape(1, 1, BLOCK_TOKENS, NUM_BLOCKS, format="block-major")
        self._shared = kvferry.allocate_shared(NUM_BLOCKS * BLOCK_TOKENS * MODEL.bytes_per_token, name)
        cache = kvferry.Cache(describe(MODEL, shape, self._shared.memory.address), (self._shared.memory,))
        policy = kvferry.StagingPolicy(frozenset({kvferry.Strategy.DIRECT}), STAGING_BYTES // 16)
        config = kvferry.AgentConfig(
            name, transport=transport, timing=timing, staging_bytes=STAGING_BYTES, staging=policy
        )
        self._fetches: dict[str, Future[float]] = {}
        self._agent = kvferry.open_agent(config, cache, self._hear)
        self._agent.start()

    def lease(self, request_id: str) -> dict[str, Any]:
        request = kvferry.LeaseRequest(request_id, kvferry.new_lease_id(), TABLES, 1)
        return to_params(self._agent.lease(request), [self._agent.address], TABLES, 1)

    def fetch(self, request_id: str, params: dict[str, Any]) -> float:
        """Fetch one token; returns how many seconds that took."""
        began = time.perf_counter()
        return self.begin(request_id, params).result(ANSWER_S) - began

    def begin(self, request_id: str, params: dict[str, Any]) -> Future[float]:
        """When the token is there."""
        remote, future = from_params(params), Future[float]()
        self._fetches[request_id] = future
        ranges = (kvferry.TokenRange(0, 1),)
        self._agent.fetch(kvferry.FetchRequest(request_id, remote.reference, remote.addresses, ((1,),), ranges))
        return future

    def fetch_together(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[float]:
        """Seconds after which each of these was there; infinity for one that did not come."""
        began = time.perf_counter()
        futures = [self.begin(*request) for request in requests]
        wait(futures, ANSWER_S)
        return [math.inf if future.exception(0) else future.result(0) - began for future in futures]

    def close(self) -> None:
        self._agent.close()
        self._shared.close()

    def _hear(self, notice: kvferry.Notice) -> None:
        match notice:
            case kvferry.Fetched(request_id):
                self._fetches.pop(request_id).set_result(time.perf_counter())
            case kvferry.FetchFailed(request_id, error):
                self._fetches.pop(request_id).set_exception(error)


def serve(pipe: Connection, names: Sequence[str], transport: str, timing: kvferry.Timing) -> None:
    """A process with some engines, which does what it is told until the pipe ends."""
    engines = [Engine(name, transport, timing) for name in names]
    numbers = count()
    pipe.send("ready")
    while True:
        try:
            match pipe.recv():
                case "lease", places:
                    pipe.send([engines[place].lease(f"lease-{next(numbers)}") for place in places])
                case "fetch", places, params:
                    requests = [(f"fetch-{next(numbers)}", each) for each in params]
                    pipe.send([engines[p].fetch(*request) for p, request in zip(places, requests, strict=True)])
                case "fetch together", params:
                    pipe.send(engines[0].fetch_together([(f"fetch-{next(numbers)}", each) for each in params]))
                case "usage", seconds:
                    pipe.send(usage(seconds))
        except EOFError:
            break
    for engine in engines:
        engine.close()


def usage(seconds: float) -> dict[str, float]:
    """Of this process: what it holds, and what it does in a time in which nobody asks anything of it."""
    process = psutil.Process()
    began, cpu, switches = time.perf_counter(), time.process_time(), num_wake_ups()
    threading.Event().wait(seconds)
    took = time.perf_counter() - began
    return {
        "memory_bytes": process.memory_full_info().uss,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "wake_ups_per_s": (num_wake_ups() - switches) / took,
        "cpu_share": (time.process_time() - cpu) / took,
    }


class Remote:
    """A process with engines, seen from the one that measures."""

    def __init__(self, names: Sequence[str], transport: str, timing: kvferry.Timing, started: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, names, transport, timing), daemon=True)
        self._process.start()
        theirs.close()
        self.size = len(names)
        started.callback(self._end)

    def ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        return self.answer()

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise SystemExit("a process of the benchmark has not answered")
        return self._pipe.recv()

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(60.0)


@contextmanager
def started(names: Sequence[str], transport: str, timing: kvferry.Timing = TIMING) -> Iterator[list[Remote]]:
    with ExitStack() as stack:
        parts = [names[first : first + PEERS_OF_A_PROCESS] for first in range(0, len(names), PEERS_OF_A_PROCESS)]
        remotes = [Remote(part, transport, timing, stack) for part in parts]
        for remote in remotes:
            remote.answer()
        yield remotes


def meet(subject: Remote, crowd: list[Remote], role: str) -> None:
    """Each of the crowd fetches once from the subject, or the subject from it."""
    for remote in crowd:
        for first in range(0, remote.size, AT_ONCE):
            places = list(range(first, min(first + AT_ONCE, remote.size)))
            same = [0] * len(places)
            if role == "source":
                remote.ask("fetch", places, subject.ask("lease", same))
            else:
                subject.ask("fetch", same, remote.ask("lease", places))


def fetches(subject: Remote, one: Remote, role: str) -> list[float]:
    """Seconds of fetches between the subject and a peer that it has met."""
    source, target = (subject, one) if role == "source" else (one, subject)
    took = []
    for _ in range(NUM_FETCHES):
        took += target.ask("fetch", [0], source.ask("lease", [0]))
    return took


def row(role: str, num_peers: int, transport: str, idle_s: float) -> dict[str, Any]:
    """A fresh agent, then its peers."""
    names = [f"peer-{number}" for number in range(num_peers)]
    with ExitStack() as stack:
        (subject,), (first,), crowd = (
            stack.enter_context(started(each, transport)) for each in (["subject"], ["first"], names)
        )
        # The first peer of all brings libraries, compiled loops and buffers with it.
        meet(subject, [first], role)
        subject.ask("usage", idle_s)
        alone = subject.ask("usage", idle_s)
        began = time.perf_counter()
        meet(subject, crowd, role)
        met_s = time.perf_counter() - began
        # What was kept warm for the last fetches ends in the first part of this time.
        subject.ask("usage", idle_s)
        idle = subject.ask("usage", idle_s)
        took = fetches(subject, crowd[0], role)
    each = {name: (idle[name] - alone[name]) / num_peers for name in ("memory_bytes", "descriptors", "threads")}
    return {
        "role": role,
        "peers": num_peers,
        "of_each_peer": each,
        "idle": idle,
        "alone": alone,
        "meet_ms": met_s / num_peers * 1000,
        "fetch_ms": statistics.median(took) * 1000,
    }


def meeting(num_peers: int, transport: str) -> dict[str, Any]:
    """A fresh agent that asks all its peers at the same time."""
    names = [f"peer-{number}" for number in range(num_peers)]
    with (
        started(["subject"], transport, MEETING_TIMING) as (subject,),
        started(names, transport, MEETING_TIMING) as crowd,
    ):
        params = [each for remote in crowd for each in remote.ask("lease", list(range(remote.size)))]
        came = [seconds for seconds in subject.ask("fetch together", params) if math.isfinite(seconds)]
    return {
        "role": "meeting",
        "peers": num_peers,
        "fetched": len(came),
        "first_s": min(came, default=None),
        "median_s": statistics.median(came) if came else None,
        "last_s": max(came, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="1,10,100,1000", help="with commas between them")
    parser.add_argument("--roles", default="source,target")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long wake-ups are counted")
    options = parser.parse_args()
    rows = []
    for role in options.roles.split(","):
        for number in map(int, options.peers.split(",")):
            is_meeting = role == "meeting"
            rows.append(
                meeting(number, options.transport)
                if is_meeting
                else row(role, number, options.transport, options.idle_s)
            )
            say(str(rows[-1]))
    command = " ".join(["python", *sys.argv])
    print(
        json.dumps({"command": command, "machine": machine(), "transport": options.transport, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
