"""How fast the transports move rows: against memcpy, and against one descriptor of the same bytes.

    python benchmarks/transports.py > benchmarks/results/transports.json
    sudo python benchmarks/transports.py --hosts --transports tcp > benchmarks/results/transports_hosts.json
    sudo python benchmarks/transports.py --hosts --transports tcp --mbits-per-connection 2000

Prints JSON. The peer is another process on this host; with `--hosts` it is on another one, a network namespace at the
other end of a veth pair, with or without a limit of what one connection gets, as in many clouds. Beside tcp the same
bytes go over a plain connection, which is its limit. Rows are in random order on the far side and every second place of
a row is left out on both, as in a paged cache. Every repeat measures everything once, so that what else the machine
does hits all alike; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from plain_sockets import PlainSockets
from two_hosts import FAR, FAR_HOST, NEAR, enter_hosts, limit_connections

from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.peer import PeerProcess, make_transport
from kvferry.transport.base import Direction, Transport
from kvferry.transport.registered_memory import View
from kvferry.transport.rowcopy import copier
from kvferry.transport.selection.self_test import fill_probe
from kvferry.transport.shm.transport import allocate_shared

ROW_BYTES = (256, 1 << 10, 4 << 10, 64 << 10, 1 << 20)
SEED = 11
LIMITED_BY_SOCKETS = ("tcp",)


@dataclass(frozen=True, slots=True)
class Bench:
    """A transport connected to a peer, and the memory of both: `total_bytes` are moved, twice that is registered."""

    transport: Transport
    peer_address: int
    near_address: int
    near: View
    pattern: View
    total_bytes: int

    def rows(self, row_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Far offsets, near offsets and lengths."""
        num_rows = self.total_bytes // row_bytes
        far = np.random.default_rng(SEED).permutation(num_rows).astype(np.uint64) * np.uint64(2 * row_bytes)
        near = np.arange(num_rows, dtype=np.uint64) * np.uint64(2 * row_bytes)
        return far, near, np.full(num_rows, row_bytes, np.uint64)

    def run(self, row_bytes: int, direction: Direction) -> float:
        """Seconds from the post to the completion."""
        far, near, length = self.rows(row_bytes)
        there, here = far + np.uint64(self.peer_address), near + np.uint64(self.near_address)
        source, target = (there, here) if direction is Direction.READ else (here, there)
        begin = time.perf_counter()
        self.transport.post("peer", Copies(source, target, length, len(length)), direction)
        while not (ended := self.transport.poll()):
            time.sleep(0)
        elapsed = time.perf_counter() - begin
        assert not ended[0].error, ended
        return elapsed

    def check(self, row_bytes: int) -> None:
        """What a read brings is what the peer has."""
        self.near.fill(0)
        self.run(row_bytes, Direction.READ)
        far, near, _ = self.rows(row_bytes)
        for i in (0, len(far) // 2, len(far) - 1):
            wanted = self.pattern[int(far[i]) : int(far[i]) + row_bytes]
            assert np.array_equal(self.near[int(near[i]) : int(near[i]) + row_bytes], wanted)


def measure(benches: dict[str, Bench], sockets: PlainSockets, num_repeats: int) -> dict[tuple[str, str, int], float]:
    """Median seconds by (transport, direction, row bytes); "memcpy" is np.copyto of the same number of bytes."""
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    first = next(iter(benches.values()))
    for repeat in range(num_repeats + 1):
        for key, run in cases(benches, sockets, first):
            elapsed = run()
            if repeat:  # The first round only warms up.
                seconds[key].append(elapsed)
        print(f"round {repeat} of {num_repeats}", file=sys.stderr)
    return {key: statistics.median(values) for key, values in seconds.items()}


def cases(
    benches: dict[str, Bench], sockets: PlainSockets, first: Bench
) -> Iterator[tuple[tuple[str, str, int], Callable[[], float]]]:
    yield ("memcpy", "", first.total_bytes), lambda: memcpy(first)
    memory = first.near.data[: first.total_bytes]
    for direction in Direction:
        yield (sockets.name, str(direction), first.total_bytes), lambda way=str(direction): sockets.run(way, memory)
    for name, bench in benches.items():
        for direction in Direction:
            for row_bytes in (*ROW_BYTES, bench.total_bytes):
                yield (
                    (name, str(direction), row_bytes),
                    lambda bench=bench, size=row_bytes, way=direction: bench.run(size, way),
                )


def memcpy(bench: Bench) -> float:
    begin = time.perf_counter()
    np.copyto(bench.near[: bench.total_bytes], bench.pattern[: bench.total_bytes])
    return time.perf_counter() - begin


def report(seconds: dict[tuple[str, str, int], float], total_bytes: int, num_repeats: int) -> dict[str, object]:
    base = seconds["memcpy", "", total_bytes]
    results = [
        {
            "transport": name,
            "direction": direction,
            "row_bytes": row_bytes,
            "num_rows": total_bytes // row_bytes,
            "ms": round(elapsed * 1e3, 2),
            "gigabytes_per_s": round(total_bytes / elapsed / 1e9, 2),
            "ratio_to_memcpy": round(base / elapsed, 3),
            "ratio_to_one_descriptor": round(seconds[name, direction, total_bytes] / elapsed, 3),
        }
        | over_sockets(seconds["sockets", direction, total_bytes] / elapsed, name)
        for (name, direction, row_bytes), elapsed in seconds.items()
        if name != "memcpy"
    ]
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    head: dict[str, object] = {"total_bytes": total_bytes, "repeats": num_repeats, "numpy": np.__version__, **machine}
    head["rows_copied_by"] = copier.current().name
    head["load_average"] = os.getloadavg()[0]
    return {**head, "memcpy_ms": round(base * 1e3, 2), "results": results}


def over_sockets(ratio: float, name: str) -> dict[str, float]:
    return {"ratio_to_sockets": round(ratio, 3)} if name in LIMITED_BY_SOCKETS else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shm,cma,tcp,nixl")
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hosts", action="store_true", help="the peer is on another host; needs root")
    parser.add_argument("--mbits-per-connection", type=int, default=0, help="of hosts; needs the program tc")
    arguments = parser.parse_args()
    if arguments.hosts:
        enter_hosts()
    if arguments.mbits_per_connection:
        limit_connections(arguments.mbits_per_connection)
    near_host, far_host, prefix = (NEAR, FAR, FAR_HOST) if arguments.hosts else ("127.0.0.1", "127.0.0.1", ())
    total_bytes = arguments.mebibytes << 20
    copier.compile_in_background()
    copier.wait_until_compiled(120)
    shared = allocate_shared(2 * total_bytes, "benchmark")
    near = np.frombuffer(shared.buffer, np.uint8)
    pattern = np.empty(2 * total_bytes, np.uint8)
    fill_probe(pattern, SEED)
    with ExitStack() as stack:
        benches = {}
        for name in arguments.transports.split(","):
            peer = stack.enter_context(PeerProcess(name, 2 * total_bytes, SEED, prefix, far_host))
            transport = make_transport(name, near_host)
            stack.callback(transport.close)
            transport.register(shared.memory)
            transport.connect("peer", peer.descriptor)
            bench = Bench(transport, peer.probe.address, shared.memory.address, near, pattern, total_bytes)
            for row_bytes in (*ROW_BYTES, total_bytes):
                bench.check(row_bytes)
            benches[name] = bench
        sockets = stack.enter_context(PlainSockets(far_host, prefix))
        seconds = measure(benches, sockets, arguments.repeats)
    limit = {"mbits_per_connection": arguments.mbits_per_connection} if arguments.mbits_per_connection else {}
    print(json.dumps(limit | report(seconds, total_bytes, arguments.repeats), indent=1))


if __name__ == "__main__":
    main()
