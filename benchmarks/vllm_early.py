"""Two real vLLM servers: decode requests that begin when the prefill request has ended, and beside it.

    python benchmarks/vllm_early.py > benchmarks/results/vllm_early.json        # in the environment of `make test-vllm`

Prompts are computed in steps of 1,024 tokens. Late and early decode take turns, one request at a time; *handover* is
from the end of the prefill request to the first token of the decode request, *whole* from the request to that token.
Prints JSON; medians in milliseconds, with the floor of `vllm_pd.py`: the first token of a decode server that has it all
cached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_pd import CPU_SERVER, both_requests, cached, first_token, questions

from proxy import Question, open_request  # isort: skip  (where it lies is known to vllm_pd)
from servers import Pair, PairSpec, ServerSpec  # isort: skip

SIZES = (2049, 8065)
WAYS = {
    "pull": (("strategy", "direct"), ("transfer_direction", "pull")),
    "push": (("strategy", "direct"), ("transfer_direction", "push")),
    "pack": (("strategy", "pack"),),
}
EARLY = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry": {"early": True}}
SERVER = ServerSpec("kv_both", cache_bytes=CPU_SERVER["cache_bytes"], flags=("--max-num-batched-tokens", "1024"))


def early_decode(pair: Pair, question: Question) -> tuple[float, float]:
    """Seconds of the prefill request, and from its end to the decode request's first token."""
    began = time.perf_counter()
    connection = open_request(pair.prefill, question, question.body(1, EARLY) | {"stream": True})
    try:
        events = _events(connection.getresponse())
        params = json.loads(next(events))["kv_transfer_params"]
        with ThreadPoolExecutor(1) as pool:
            asked_s = time.perf_counter() - began
            decoding = pool.submit(first_token, pair.decode, question, question.body(4, params))
            for _ in events:
                pass
            prefill_s = time.perf_counter() - began
            return prefill_s, asked_s + decoding.result() - prefill_s
    finally:
        connection.close()


def _events(response: Any) -> Iterator[bytes]:
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {response.read()[:500]!r}")
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield line.removeprefix(b"data: ")


def measured(pair: Pair, size: int, repeats: int, dice: random.Random) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        late, early = questions(size, 2, dice)
        sample = both_requests(pair, late)
        prefill_s, handover_s = early_decode(pair, early)
        times = {
            "whole after": sample.prefill + sample.handover,
            "whole beside": prefill_s + handover_s,
            "handover after": sample.handover,
            "handover beside": handover_s,
            "floor": cached(pair, late),
        }
        for name, took_s in times.items() if number else ():
            found.setdefault(name, []).append(took_s * 1000)
    return {"tokens": size, "ms": {name: round(statistics.median(values), 1) for name, values in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    dice, rows = random.Random(0), []
    for way, extra in WAYS.items():
        both = replace(SERVER, extra=extra)
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair.create(PairSpec("llama", both, both), "FerryConnector", Path(folder))
            pair.start()
            try:
                for size in SIZES:
                    rows.append({"way": way, **measured(pair, size, options.repeats, dice)})
                    print(rows[-1], file=sys.stderr, flush=True)
            finally:
                pair.stop()
    facts = {
        "command": f"python benchmarks/vllm_early.py --repeats {options.repeats}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rows": rows,
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
