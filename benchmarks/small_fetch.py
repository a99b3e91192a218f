"""A fetch of few tokens in long rows: where its time goes, and what it saves to read before the grant.

    python benchmarks/small_fetch.py > benchmarks/results/small_fetch.json

Prints JSON: medians in milliseconds, by transport. Two agents of one process fetch the same request in turns: one whose
references name blocks, so that it reads while it asks (*at once*), and one that waits for the grant. Beside them the
rows of vLLM over NIXL, as a list that lies ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from measuring import machine, say
from mixed_tp_cases import Request, Rig
from mixed_tp_target import Target

AGENTS = {"at once": "direct", "granted first": "direct, granted first"}
PHASES = ("claim", "wire", "verify")
WARM_UP = 5


def measure(transport: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    target = Target(Rig(2, 2, "head-major", transport), tuple(AGENTS.values()))
    try:
        target.choose(Request(num_tokens, "random"), target.source_memories())
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(repeats + WARM_UP):
            for words, name in sorted(AGENTS.items(), reverse=bool(number % 2)):
                elapsed, report = target.fetch(name)
                found[words].append(elapsed)
                for phase in PHASES:
                    found[f"{words}, {phase}"].append(report.phases_s[phase])
            found["vllm's rows over nixl"].append(target.read_by_block())
    finally:
        target.close()
    ms = {words: round(statistics.median(values[WARM_UP:]) * 1e3, 2) for words, values in found.items()}
    return {"ms": ms, "at once / granted first": round(ms["at once"] / ms["granted first"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--transports", default="nixl,shm,cma")
    arguments = parser.parse_args()
    results = {}
    for transport in arguments.transports.split(","):
        results[transport] = measure(transport, arguments.tokens, arguments.repeats)
        say(f"{transport}: {results[transport]}")
    command = f"python benchmarks/{' '.join(['small_fetch.py', *sys.argv[1:]])}"
    print(json.dumps({"command": command, "machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
