"""Prefill and decode on two real vLLM servers: our connector beside the stock NixlConnector, in one run.

    python benchmarks/vllm_pd.py > benchmarks/results/vllm_pd.json        # in the environment of `make test-vllm`
    python benchmarks/vllm_pd.py --peers "stock as shipped,stock neutralised"
    KVFERRY_VLLM_DEVICE=cuda python benchmarks/vllm_pd.py                 # both servers on one GPU

Each way has a pair of servers of its own, and they take turns request by request: a pair that waits for its turn is
stopped (`SIGSTOP`). The stock connector runs as shipped, or without its busy polling and core pinning
(`neutralised/`), which on a machine with few cores is the real peer; a GPU's machine has cores enough to do without it.
`nothing moves` is a connector that says at once that the cache is there (`nothing_moves/`): what every handover takes
that vLLM loads asynchronously, as it does with the other two.
All times are what a client sees, in ms, medians:

* alone: first token of one server that does everything;
* overhead: first token after both requests, minus alone;
* handover: from the end of the prefill request to the first token of the decode request;
* floor: first token of the decode server when it has the whole prompt cached: a handover that moves nothing. Prompts
  are one token longer than whole blocks, so that in both cases one token is computed.

A row's ratios compare whole handovers, and what they take above the floor of the same pair of servers.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import machine

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from proxy import REMOTE_DECODE, Question, open_request  # noqa: E402
from servers import DEVICE, Pair, PairSpec, Server, ServerSpec  # noqa: E402


@dataclass(frozen=True)
class Way:
    """A connector of vLLM, and a folder that its servers import from first."""

    connector: str
    path: str = ""

    def start(self, folder: Path) -> Pair:
        """Two servers of their own, ready."""
        os.environ["PYTHONPATH"] = self.path
        pair = Pair.create(SPEC, self.connector, folder)
        pair.start()
        return pair


ON_CPU = DEVICE == "cpu"
OURS = "kvferry"
WAYS = {
    OURS: Way("FerryConnector"),
    "stock as shipped": Way("NixlConnector"),
    "stock neutralised": Way("NixlConnector", str(HERE / "neutralised")),
    "nothing moves": Way("NothingMoves", str(HERE / "nothing_moves")),
}
PEERS = "stock neutralised" if ON_CPU else "stock as shipped"
WARM_TOKENS = 65
FLAGS = ("--max-num-batched-tokens", "8192")
CPU_SERVER = {"cache_bytes": 1 << 30, "flags": FLAGS}
GPU_SERVER = {"cache_bytes": 8 << 30, "flags": FLAGS, "block_tokens": 16}
SERVER = CPU_SERVER if ON_CPU else GPU_SERVER
MODEL, DTYPE = ("llama", "float32") if ON_CPU else ("llama_8b_cache", "bfloat16")
SPEC = PairSpec(MODEL, ServerSpec("kv_producer", **SERVER), ServerSpec("kv_consumer", **SERVER), dtype=DTYPE)


@dataclass(frozen=True)
class Case:
    """Prompts of so many tokens, asked together."""

    tokens: int
    at_once: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.at_once} at once"


@dataclass(frozen=True)
class Sample:
    """What one client saw, in seconds."""

    prefill: float
    handover: float


def first_token(server: Server, question: Question, body: dict[str, Any]) -> float:
    """Seconds until the first event of a streamed answer, which is read to its end."""
    began = time.perf_counter()
    connection = open_request(server, question, {**body, "stream": True})
    try:
        events = _events(connection.getresponse())
        next(events)
        first_s = time.perf_counter() - began
        for _ in events:
            pass
    finally:
        connection.close()
    return first_s


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {response.read()[:500]!r}")
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield line


def whole(server: Server, question: Question, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds until a complete answer, and the answer."""
    began = time.perf_counter()
    connection = open_request(server, question, body)
    try:
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {text[:500]!r}")
    return time.perf_counter() - began, json.loads(text)


def both_requests(pair: Pair, question: Question) -> Sample:
    prefill_s, answer = whole(pair.prefill, question, question.body(1, REMOTE_DECODE))
    handover_s = first_token(pair.decode, question, question.body(4, answer["kv_transfer_params"]))
    return Sample(prefill_s, handover_s)


def alone(pair: Pair, question: Question) -> float:
    return first_token(pair.prefill, question, question.body(4, None))


def cached(pair: Pair, question: Question) -> float:
    return first_token(pair.decode, question, question.body(4, None))


def questions(size: int, number: int, dice: random.Random) -> list[Question]:
    return [
        Question(tuple(dice.randrange(300, 1000) for _ in range(size)), f"{dice.random()}", 4) for _ in range(number)
    ]


def at_once(number: int, work: Callable[[Question], Any], asked: list[Question]) -> list[Any]:
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, asked))


def turn(pair: Pair, case: Case, dice: random.Random) -> dict[str, list[float]]:
    """The times of one way's requests, in seconds, while no other pair runs."""
    pair.resume()
    both_requests(pair, *questions(WARM_TOKENS, 1, dice))
    plain = at_once(case.at_once, lambda q: alone(pair, q), questions(case.tokens, case.at_once, dice))
    asked = questions(case.tokens, case.at_once, dice)
    samples = at_once(case.at_once, lambda q: both_requests(pair, q), asked)
    again = at_once(case.at_once, lambda q: cached(pair, q), asked)
    pair.pause()
    return {
        "alone": plain,
        "both": [sample.prefill + sample.handover for sample in samples],
        "handover": [sample.handover for sample in samples],
        "floor": again,
    }


def measure(pairs: dict[str, Pair], case: Case, repeats: int, dice: random.Random) -> dict[str, dict[str, list[float]]]:
    """The times of every way in a case. The first turn does not count; of the others each way begins as many."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in pairs}
    names = list(pairs)
    for repeat in range(repeats + 1):
        names = names[1:] + names[:1]
        for name in names:
            times = turn(pairs[name], case, dice)
            for what, values in times.items() if repeat else ():
                found[name][what] += values
    return found


def metrics_of(server: Server) -> dict[str, float]:
    """Mean descriptors, megabytes and seconds per transfer, and seconds per phase where the connector tells them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith(("vllm:nixl_", "vllm:kvferry_")) and "_bucket" not in line:
            name, value = line.rsplit(" ", 1)
            phase = name.partition('phase="')[2].partition('"')[0]
            key = name.partition("{")[0] + (f" {phase}" if phase else "")
            sums[key] = sums.get(key, 0.0) + float(value)
    counted = {key.replace("_count", "_sum", 1): value for key, value in sums.items() if "_count" in key}
    return {key.replace("_sum", ""): round(sums[key] / n, 6) for key, n in counted.items() if n and key in sums}


@contextlib.contextmanager
def running(names: Sequence[str]) -> Iterator[dict[str, Pair]]:
    """The pair of each way, ready and paused."""
    with contextlib.ExitStack() as stack:
        pairs = {}
        for name in names:
            pairs[name] = WAYS[name].start(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(pairs[name].stop)
            pairs[name].pause()
        yield pairs


def summary(case: Case, samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The row of a case: medians in ms, and our handover over each of the others'."""
    row: dict[str, Any] = {"case": str(case), "samples": len(samples[OURS]["handover"])}
    for name, by_kind in samples.items():
        times = in_ms(by_kind)
        row[name] = {
            "alone_ms": round(times["alone"], 1),
            "overhead_ms": round(times["both"] - times["alone"], 1),
            "handover_ms": round(times["handover"], 1),
            "floor_ms": round(times["floor"], 1),
            "above_floor_ms": round(times["handover"] - times["floor"], 1),
        }
    for other in [name for name in samples if name != OURS]:
        for what in ("handover_ms", "above_floor_ms"):
            row[f"{what[:-3]} / {other}"] = ratio(row[OURS][what], row[other][what])
    return row


def in_ms(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values) * 1000, 2) for name, values in times.items()}


def ratio(ours: float, theirs: float) -> float | None:
    """Of two times; none where noise has made one of them nothing."""
    return round(ours / theirs, 2) if ours > 0 and theirs > 0 else None


def device_name() -> str:
    return DEVICE if ON_CPU else torch.cuda.get_device_name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", default="513,2049,8065", help="tokens, one more than whole blocks")
    parser.add_argument("--at-once", default="1,4")
    parser.add_argument("--peers", default=PEERS, help="of " + ", ".join(name for name in WAYS if name != OURS))
    options = parser.parse_args()
    dice = random.Random(0)
    rows = []
    with running([OURS, *options.peers.split(",")]) as pairs:
        for size, number in product(options.sizes.split(","), options.at_once.split(",")):
            case = Case(int(size), int(number))
            rows.append(summary(case, measure(pairs, case, options.repeats, dice)))
            # Of a run that is cut short, what was measured is not lost.
            print(rows[-1], file=sys.stderr, flush=True)
        pairs[OURS].resume()
        told = {"decode": metrics_of(pairs[OURS].decode), "prefill": metrics_of(pairs[OURS].prefill)}
    facts = {
        "command": shlex.join(["python", "benchmarks/vllm_pd.py", *sys.argv[1:]]),
        "machine": machine(),
        "device": device_name(),
        "model": f"tiny {MODEL}, {DTYPE}",
        "servers": "prompts computed in one step; every server one OpenMP thread, bound to no core",
        "rows": rows,
        "our own metrics, means of the run": told,
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
