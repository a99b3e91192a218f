"""Fetching a cache between engines of unequal tensor parallelism, next to how SGLang and vLLM would, and to the limits.

    python benchmarks/mixed_tp.py > benchmarks/results/mixed_tp.json
    python benchmarks/mixed_tp.py --transport shm > benchmarks/results/mixed_tp_shm.json
    python benchmarks/mixed_tp.py --transport cma > benchmarks/results/mixed_tp_cma.json
    sudo python benchmarks/mixed_tp.py --hosts --transport tcp > benchmarks/results/mixed_tp_hosts.json

Prints JSON. See docs/benchmarks.md for what is measured, and what the limits are.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from measuring import machine, say
from mixed_tp_cases import FORMATS, PAIRS, TOKENS, Request, Rig
from mixed_tp_target import Target
from two_hosts import enter_hosts

SLOW_S = 1.0
"""What takes longer is repeated twice only."""

TRANSPORTS = ("nixl", "shm", "cma", "tcp")
STAGES = ("gather", "wire", "scatter")

Figures = dict[str, Any]


class Rounds:
    """Everything once per round, in an order of its own: who comes after whom decides what is in the caches."""

    def __init__(self, target: Target) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.reports: dict[str, Any] = {}
        self._target = target
        self._peers = peers_and_limits(target)
        steps = [
            (self._ours, target.agents),
            (self._theirs, self._peers),
            (self._alone, STAGES),
            (self._together, [""]),
        ]
        self._steps = [(run, name) for run, names in steps for name in names]

    def run(self, number: int) -> None:
        random.Random(number).shuffle(self._steps)
        for run, name in self._steps:
            run(name)

    def _ours(self, name: str) -> None:
        elapsed, self.reports[name] = self._target.fetch(name)
        self.seconds[name].append(elapsed)
        # What bare lists and limits are to be compared with: they neither ask before nor verify after.
        self.seconds[f"{name}, moving"].append(self.reports[name].phases_s["wire"])

    def _theirs(self, name: str) -> None:
        known = self.seconds[name]
        if len(known) < 2 or known[0] < SLOW_S:
            known.append(self._peers[name]())

    def _alone(self, name: str) -> None:
        self.seconds[f"{name} alone"].append(self._target.stages(name)[name])

    def _together(self, _: str) -> None:
        for name, elapsed in self._target.stages(*STAGES).items():
            self.seconds["all stages" if name == "all" else f"{name} beside others"].append(elapsed)


def measure(target: Target, repeats: int) -> Figures:
    """Medians in milliseconds."""
    rounds = Rounds(target)
    for number in range(repeats):
        rounds.run(number)
    reports = rounds.reports
    return {
        "ms": {name: round(statistics.median(values) * 1e3, 3) for name, values in rounds.seconds.items()},
        "chosen": reports["auto"].strategy,
        "rows": {name: report.num_rows for name, report in reports.items()},
    }


def peers_and_limits(target: Target) -> dict[str, Callable[[], float]]:
    found = {
        "sglang": target.write_by_token,
        "vllm": target.read_by_block,
        "wire": target.read_one,
        "pipeline": target.pipeline,
    }
    if target.rig.copies_alone:
        found["one copy"] = target.copy_one
    return {**found, "sockets": target.over_sockets} if target.rig.are_apart else found


def verify(target: Target) -> None:
    """Every way brings the right bytes, and only these."""
    target.poison()
    for name in target.agents:
        target.fetch(name)
        target.check(name)
    for name in ("sglang", "vllm", "pipeline"):
        peers_and_limits(target)[name]()
        target.check(name)


def ratios(ms: Figures, chosen: str) -> Figures:
    """Above 1 is better than what it is compared with."""
    best = min(ms["wire"], ms["all stages"]) if chosen == "direct" else ms["all stages"]
    ours = {"direct / one copy": "direct", "direct, moving / one copy": "direct, moving"} if "one copy" in ms else {}
    if "sockets" in ms:
        apart = {f"{name} / sockets": round(ms["sockets"] / ms[name], 3) for name in ("auto", "direct", "pack")}
    else:
        apart = {"direct / not shared": round(ms["direct, not shared"] / ms["direct"], 3)}
    return {
        **{name: round(ms["one copy"] / ms[what], 3) for name, what in ours.items()},
        "direct / wire": round(ms["wire"] / ms["direct"], 3),
        **apart,
        "pack / pipeline": round(ms["pipeline"] / ms["pack"], 3),
        **over_the_wire(ms),
        "pack / all stages": round(ms["all stages"] / ms["pack"], 3),
        "direct, moving / wire": round(ms["wire"] / ms["direct, moving"], 3),
        "pack, moving / pipeline": round(ms["pipeline"] / ms["pack, moving"], 3),
        "auto / limit": round((ms["wire"] if chosen == "direct" else best) / ms["auto"], 3),
        "auto / best of ours": round(min(ms["direct"], ms["scatter"], ms["pack"]) / ms["auto"], 3),
        "auto / sglang": round(ms["sglang"] / ms["auto"], 2),
        "auto / vllm": round(ms["vllm"] / ms["auto"], 2),
        "moving / sglang": round(ms["sglang"] / ms["auto, moving"], 2),
        "moving / vllm": round(ms["vllm"] / ms["auto, moving"], 2),
    }


def over_the_wire(ms: Figures) -> Figures:
    """Both limits copy three times. So does what is staged between hosts; on one host ours copies twice."""
    ours = ms.get("pack, as between hosts")
    return {
        f"pack, as between hosts / {name}": round(ms[name] / ours, 3) for name in ("pipeline", "all stages") if ours
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
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--pairs", default=",".join(f"{source}-{target}" for source, target in PAIRS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ids", default="random")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="ours; peers are always on NIXL")
    parser.add_argument("--hosts", action="store_true", help="the sources are on another host; needs root")
    arguments = parser.parse_args()
    if arguments.hosts:
        enter_hosts()
    cases = []
    for pair in arguments.pairs.split(","):
        for memory_format in arguments.formats.split(","):
            source, target = map(int, pair.split("-"))
            cases += run_rig(Rig(source, target, memory_format, arguments.transport, arguments.hosts), arguments)
    command = f"python benchmarks/{' '.join(['mixed_tp.py', *sys.argv[1:]])}"
    print(
        json.dumps({"command": command, "machine": machine(), "repeats": arguments.repeats, "cases": cases}, indent=1)
    )


if __name__ == "__main__":
    main()
