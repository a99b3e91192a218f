"""Fetching a cache between engines of unequal tensor parallelism, next to how SGLang and vLLM would, and to the limits.

    python benchmarks/mixed_tp.py > benchmarks/results/mixed_tp.json

Prints JSON. See docs/benchmarks.md for what is measured, and what the limits are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from measuring import machine, say
from mixed_tp_cases import FORMATS, PAIRS, TOKENS, Request, Rig
from mixed_tp_target import AGENTS, Target

SLOW_S = 1.0
"""What takes longer is repeated twice only."""

Figures = dict[str, Any]


def measure(target: Target, repeats: int) -> Figures:
    """Everything once per repeat, one after the other; medians in milliseconds."""
    seconds: dict[str, list[float]] = defaultdict(list)
    reports: dict[str, Any] = {}
    for _ in range(repeats):
        for name in AGENTS:
            elapsed, reports[name] = target.fetch(name)
            seconds[name].append(elapsed)
        # What the peers' bare lists are to be compared with: neither asking before nor verifying after.
        seconds["auto, moving"].append(reports["auto"].phases_s["wire"])
        for name, run in peers_and_limits(target).items():
            if len(seconds[name]) < 2 or seconds[name][0] < SLOW_S:
                seconds[name].append(run())
        for name in ("gather", "wire", "scatter"):
            seconds[f"{name} alone"].append(target.stages(name)[name])
        for name, elapsed in target.stages("gather", "wire", "scatter").items():
            seconds["all stages" if name == "all" else f"{name} beside others"].append(elapsed)
    return {
        "ms": {name: round(statistics.median(values) * 1e3, 3) for name, values in seconds.items()},
        "chosen": reports["auto"].strategy,
        "rows": {name: report.num_rows for name, report in reports.items()},
    }


def peers_and_limits(target: Target) -> dict[str, Callable[[], float]]:
    return {
        "sglang": target.write_by_token,
        "vllm": target.read_by_block,
        "wire": target.read_one,
    }


def verify(target: Target) -> None:
    """Every way brings the right bytes, and only these."""
    target.poison()
    for name in AGENTS:
        target.fetch(name)
        target.check(name)
    for name in ("sglang", "vllm"):
        peers_and_limits(target)[name]()
        target.check(name)


def ratios(ms: Figures, chosen: str) -> Figures:
    """Above 1 is better than what it is compared with."""
    best = min(ms["wire"], ms["all stages"]) if chosen == "direct" else ms["all stages"]
    return {
        "direct / wire": round(ms["wire"] / ms["direct"], 3),
        "pack / all stages": round(ms["all stages"] / ms["pack"], 3),
        "auto / limit": round((ms["wire"] if chosen == "direct" else best) / ms["auto"], 3),
        "auto / best of ours": round(min(ms["direct"], ms["scatter"], ms["pack"]) / ms["auto"], 3),
        "auto / sglang": round(ms["sglang"] / ms["auto"], 2),
        "auto / vllm": round(ms["vllm"] / ms["auto"], 2),
        "moving / sglang": round(ms["sglang"] / ms["auto, moving"], 2),
        "moving / vllm": round(ms["vllm"] / ms["auto, moving"], 2),
    }


def run_rig(rig: Rig, arguments: argparse.Namespace) -> list[Figures]:
    target = Target(rig)
    found = []
    try:
        memories = target.source_memories()
        for ids in arguments.ids.split(","):
            for num_tokens in map(int, arguments.tokens.split(",")):
                counts = target.choose(Request(num_tokens, ids), memories)
                verify(target)
                figures = measure(target, arguments.repeats)
                figures["ratios"] = ratios(figures["ms"], figures["chosen"])
                name = f"{rig.source_parallel} to {rig.target_parallel}, {rig.format}, {num_tokens} tokens, {ids} ids"
                found.append({"case": name, "copier": target.copier, **counts, **figures})
                say(f"{name}: {figures['chosen']} {figures['ms']} {figures['ratios']}")
    finally:
        target.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", default=",".join(f"{source}-{target}" for source, target in PAIRS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ids", default="random")
    arguments = parser.parse_args()
    cases = []
    for pair in arguments.pairs.split(","):
        for memory_format in arguments.formats.split(","):
            source, target = map(int, pair.split("-"))
            cases += run_rig(Rig(source, target, memory_format), arguments)
    command = f"python benchmarks/{' '.join(['mixed_tp.py', *sys.argv[1:]])}"
    print(
        json.dumps({"command": command, "machine": machine(), "repeats": arguments.repeats, "cases": cases}, indent=1)
    )


if __name__ == "__main__":
    main()
