"""Requests within an SLO: two prefill engines and one decode engine, against three that serve whole requests.

`python benchmarks/goodput.py [--rates 0.5,0.7,…] [--requests 60] [--step …] > benchmarks/results/goodput.json`

All engines are the embedded one behind the same kind of router. Real tokens of a tiny model are computed and its cache
really moves; but a step lasts as long as `--step` says, so that engines that mostly wait fit two cores. The systems run
side by side and get the same requests at the same times; every run is judged twice, by the mean of a request's time
between tokens and by the 99th percentile of its gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from goodput_model import make_model
from measuring import machine, say

from kvferry.bench.load.generator import run_load
from kvferry.bench.load.target import Target
from kvferry.bench.load.workload import Lengths, PlannedRequest, Synthetic, rates_named, synthetic
from kvferry.bench.report.figures import Report, best_of, report_of
from kvferry.bench.report.record import Record
from kvferry.bench.report.slo import ItlBy, Slo, slo_named
from kvferry.cli.up.fleet import Fleet, FleetOptions

# The mark: Llama-3.3-70B int4, fp8 cache, 8 cards, 1,500 tokens in and 150 out: 1.06 against 0.64 requests/s.
MARK = 1.65
ISL, OSL = 1500, 150
# One real token of a prompt stands for so many, and a step takes as long as for all of them: the small model's own
# attention over so many long prompts would take the two cores longer than the steps may last.
SCALE = 10
SLO = "ttft=5s,itl=100ms"
ATTAINMENT = 0.9
# Requests that an engine's cache holds at once.
ROOM = 32
WARM_UP = 4
TIMEOUT_S = 300.0
# Nobody needs to know how a system that serves less than this does at even higher rates.
HOPELESS = 0.2


@dataclass(frozen=True, slots=True)
class System:
    """Engines, and the most tokens that one of their steps computes."""

    name: str
    num_prefill: int
    num_decode: int
    chunk_tokens: int


def systems(chunks: list[int]) -> list[System]:
    """The engine's default of 512 for ours; the baseline with each of several."""
    return [System("2P1D", 2, 1, 512)] + [System(f"3 whole, chunks of {chunk}", 0, 3, chunk) for chunk in chunks]


def prepared(system: System, step: str, logs: Path) -> Fleet:
    """Not started yet. The model lies beside the logs."""
    folder = logs / system.name.replace(" ", "-")
    folder.mkdir()
    model = ("--model", str(logs / "model"))
    arguments = (*model, "--simulated-step", step, "--max-batch-tokens", str(system.chunk_tokens // SCALE))
    cache_tokens = ROOM * (ISL // SCALE + OSL + 16)
    return Fleet(FleetOptions(system.num_prefill, system.num_decode, arguments, 16, 16, cache_tokens, 0), folder)


def ignore(record: Record) -> None:
    """Nobody watches."""


def load(rate: float, num_requests: int, seed: int) -> tuple[PlannedRequest, ...]:
    wanted = Synthetic(num_requests, Lengths(ISL // SCALE, ISL // SCALE), Lengths(OSL, OSL), seed)
    # The times that goodput_search.py draws.
    dice = random.Random(seed)
    return synthetic(wanted, tuple(accumulate(dice.expovariate(rate) for _ in range(num_requests))))


async def curve(system: System, target: Target, options: argparse.Namespace) -> list[Report]:
    """A run per rate, until it is hopeless."""
    await run_load(target, load(1.0, WARM_UP, 999), 2, TIMEOUT_S, ignore)
    reports: list[Report] = []
    for rate in options.rates:
        outcome = await run_load(target, load(rate, options.requests, options.seed), 0, TIMEOUT_S, ignore)
        reports.append(report_of(outcome.records, outcome.duration_s, rate, outcome.most_open, slo_named(SLO)))
        parts = "  ".join(f"{by}: {judged(reports[-1], by).attainment:.0%}" for by in ItlBy)
        ttft, itl = reports[-1].times_s["ttft"], reports[-1].times_s["itl"]
        times = f"ttft {ttft.median:.2f} p99 {ttft.p99:.2f} s, itl {itl.mean:.3f}" if ttft and itl else "no answer"
        say(f"{system.name:22} {rate:4.2f}/s  {parts}  {times}")
        if max(judged(reports[-1], by).attainment for by in ItlBy) < HOPELESS:
            break
    return reports


def judged(report: Report, by: ItlBy) -> Report:
    """The same run, judged another way."""
    slo: Slo = replace(report.slo, itl_by=by)
    return replace(report, slo=slo)


def facts(system: System, fleet: Fleet, reports: list[Report]) -> dict[str, Any]:
    best = {str(by): asdict(best_of([judged(report, by) for report in reports], ATTAINMENT)) for by in ItlBy}
    runs = []
    for report in reports:
        attainment = {f"attainment_by_{by}": judged(report, by).attainment for by in ItlBy}
        goodput = {f"goodput_by_{by}": judged(report, by).goodput for by in ItlBy}
        runs.append(report.as_json() | attainment | goodput)
    return {
        "engines": {"prefill": system.num_prefill, "decode": system.num_decode, "chunk_tokens": system.chunk_tokens},
        "best": best,
        "moved_bytes": sum(moved_bytes(url) for url in fleet.decode_urls),
        "runs": runs,
    }


def moved_bytes(url: str) -> float:
    """What an engine's own metrics say that it has fetched."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvferry_engine_received_bytes_total")
    )


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours over each baseline, and over the best of them, whose chunks are then chosen for it in hindsight."""
    ours, *others = found
    answer: dict[str, Any] = {}
    for by in map(str, ItlBy):
        for key in ("highest_rate_within_slo", "best_goodput"):
            mine = found[ours]["best"][by][key]
            theirs = {name: found[name]["best"][by][key] for name in others}
            each = {name: mine / value if value else None for name, value in theirs.items()}
            top = max(theirs.values())
            answer[f"{key}_by_{by}"] = {"ours": mine, **each, "over the best of them": mine / top if top else None}
    return answer


async def measure(fleets: dict[str, tuple[System, Fleet]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All systems at the same time: what else the machine does hits all alike."""
    pairs = list(fleets.values())
    work = (curve(system, Target(fleet.url, fleet.model), options) for system, fleet in pairs)
    curves = await asyncio.gather(*work)
    return {system.name: facts(system, fleet, reports) for (system, fleet), reports in zip(pairs, curves, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=rates_named, default=rates_named("0.3,0.5,0.6,0.7,0.8,0.9,1.0,1.1"))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--step", default="token=12ms,step=48ms,sequence=1.55ms,overlap=0")
    parser.add_argument("--chunks", default="512,200", help="chunk sizes of the baseline, comma between")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    fleets: dict[str, tuple[System, Fleet]] = {}
    with tempfile.TemporaryDirectory() as logs:
        make_model(Path(logs) / "model")
        wanted = systems([int(chunk) for chunk in options.chunks.split(",")])
        for system in wanted:
            fleets[system.name] = (system, prepared(system, options.step, Path(logs)))
        try:
            with ThreadPoolExecutor() as starting:
                list(starting.map(lambda pair: pair[1].start(), fleets.values()))
            found = asyncio.run(measure(fleets, options))
        finally:
            for _, fleet in fleets.values():
                fleet.__exit__(None, None, None)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "simulated_step": options.step,
        "load": {
            "prompt_tokens": ISL,
            "real_tokens_of_a_prompt": ISL // SCALE,
            "output_tokens": OSL,
            "requests": options.requests,
            "slo": SLO,
        },
        "mark": MARK,
        "ratios": ratios(found),
        "systems": found,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
