"""Prefill and decode on two real vLLM servers: our connector beside the stock NixlConnector, in one run.

    python benchmarks/vllm_pd.py > benchmarks/results/vllm_pd.json        # in the environment of `make test-vllm`
    KVFERRY_VLLM_DEVICE=cuda python benchmarks/vllm_pd.py                 # both servers on one GPU

Three variants take turns: ours, the stock one as shipped, and the stock one without its busy polling and core pinning
(`neutralised/`), which on a machine with few cores is the real peer; a GPU's machine has cores enough to do without it.
All times are what a client sees, in ms, medians:

* alone: first token of one server that does everything;
* overhead: first token after both requests, minus alone;
* handover: from the end of the prefill request to the first token of the decode request;
* floor: first token of the decode server when it has the whole prompt cached: a handover that moves nothing. Prompts
  are one token longer than whole blocks, so that in both cases one token is computed.

A row's ratios compare whole handovers, and what they take above the floor of the same pair of servers.
"""

import argparse
import http.client
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from proxy import REMOTE_DECODE, Question, open_request  # noqa: E402
from servers import DEVICE, Pair, PairSpec, Server, ServerSpec  # noqa: E402

SIZES = (513, 2049, 8065)
CONCURRENCY = (1, 4)
ON_CPU = DEVICE == "cpu"
VARIANTS = {
    "kvferry": ("FerryConnector", ""),
    "stock as shipped": ("NixlConnector", ""),
    **({"stock neutralised": ("NixlConnector", str(HERE / "neutralised"))} if ON_CPU else {}),
}
# It takes minutes where two cores poll for four processes, and differs by so much that one sample tells enough.
RUN_ONCE = ("stock as shipped",) if ON_CPU else ()
FLAGS = ("--max-num-batched-tokens", "8192")
CPU_SERVER = {"cache_bytes": 1 << 30, "flags": FLAGS}
GPU_SERVER = {"cache_bytes": 8 << 30, "flags": FLAGS, "block_tokens": 16}
SERVER = CPU_SERVER if ON_CPU else GPU_SERVER
MODEL, DTYPE = ("llama", "float32") if ON_CPU else ("llama_8b_cache", "bfloat16")
SPEC = PairSpec(MODEL, ServerSpec("kv_producer", **SERVER), ServerSpec("kv_consumer", **SERVER), dtype=DTYPE)


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


def measure(pair: Pair, repeats: int, dice: random.Random) -> dict[str, dict[str, list[float]]]:
    """Per size and concurrency, the times of every request."""
    at_once(1, lambda question: both_requests(pair, question), questions(300, 2, dice))
    found: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        for number in CONCURRENCY:
            num_requests = repeats if number == 1 else number
            plain = at_once(number, lambda q: alone(pair, q), questions(size, num_requests, dice))
            asked = questions(size, num_requests, dice)
            samples = at_once(number, lambda q: both_requests(pair, q), asked)
            again = at_once(number, lambda q: cached(pair, q), asked)
            found[f"{size} tokens, {number} at once"] = {
                "alone": plain,
                "both": [sample.prefill + sample.handover for sample in samples],
                "handover": [sample.handover for sample in samples],
                "floor": again,
            }
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


def run(variant: str, repeats: int, dice: random.Random) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    connector, path = VARIANTS[variant]
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair.create(SPEC, connector, Path(folder))
        pair.start()
        try:
            return measure(pair, repeats, dice), metrics_of(pair.decode)
        finally:
            pair.stop()


def summary(samples: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """One row per size and concurrency: medians in ms, and our handover over each stock one's."""
    rows = []
    for case in next(iter(samples.values())):
        row: dict[str, Any] = {"case": case}
        for variant, by_case in samples.items():
            times = in_ms(by_case[case])
            row[variant] = {
                "alone_ms": round(times["alone"], 1),
                "overhead_ms": round(times["both"] - times["alone"], 1),
                "handover_ms": round(times["handover"], 1),
                "floor_ms": round(times["floor"], 1),
                "above_floor_ms": round(times["handover"] - times["floor"], 1),
            }
        for stock in [variant for variant in samples if variant != "kvferry"]:
            for what in ("handover_ms", "above_floor_ms"):
                row[f"{what[:-3]} / {stock}"] = ratio(row["kvferry"][what], row[stock][what])
        rows.append(row)
    return rows


def in_ms(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values) * 1000, 2) for name, values in times.items()}


def ratio(ours: float, theirs: float) -> float | None:
    """Of two times; none where noise has made one of them nothing."""
    return round(ours / theirs, 2) if ours > 0 and theirs > 0 else None


def device_name() -> str:
    return DEVICE if ON_CPU else torch.cuda.get_device_name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    dice = random.Random(0)
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    told: dict[str, dict[str, float]] = {}
    for number in range(options.rounds):
        for variant in [each for each in VARIANTS if number == 0 or each not in RUN_ONCE]:
            print(f"round {number + 1} of {options.rounds}: {variant}", file=sys.stderr, flush=True)
            found, told[variant] = run(variant, 1 if variant in RUN_ONCE else options.repeats, dice)
            for case, times in found.items():
                # Of a run that is cut short, what was measured is not lost.
                print(f"{case}: {in_ms(times)}", file=sys.stderr, flush=True)
                for name, values in times.items():
                    samples.setdefault(variant, {}).setdefault(case, {}).setdefault(name, []).extend(values)
    facts = {
        "command": f"python benchmarks/vllm_pd.py --rounds {options.rounds} --repeats {options.repeats}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "device": device_name(),
        "model": f"tiny {MODEL}, {DTYPE}",
        "servers": "prompts computed in one step; every server one OpenMP thread, bound to no core",
        "rows": summary(samples),
        "decode side's own metrics, means of the last round": told,
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
