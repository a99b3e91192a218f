"""Simulated fleets of 100, 1,000 and 5,000 engines: what incidents cost, and what the simulation itself takes.

    python benchmarks/simulate_fleet.py > benchmarks/results/simulate_fleet.json

Each row is one run of `kvferry simulate fleet`, in a process of its own, without the course of the run. The engines'
costs are the command's defaults: they are assumed and not measured. What is measured is the simulation: `cpu_s` of one
processor, and which part of it the router's own choices take (`router_choice_share`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

from measuring import machine, say

HUNDRED = "--prefill 25 --decode 75 --rate 120 --duration 120"
SCENARIOS = {
    "100 engines": HUNDRED,
    "100 engines, a rack dies": f"{HUNDRED} --incident 'rack 2 dies from 30 to 60'",
    "100 engines, a slow link": f"{HUNDRED} --incident 'link of rack 2 at 1% from 30 to 60'",
    "100 engines, a rollout": f"{HUNDRED} --start-up 10 --incident 'rollout from 20 by 20'",
    "100 engines, a hot prefix": f"{HUNDRED} --incident 'hot prefix 40% of 2048 tokens from 30 to 90'",
    "40 engines, the best ratio": "--prefill 10 --decode 30 --rate 250 --duration 10 --warm-up 3 --find-ratio",
    "1,000 engines": "--prefill 250 --decode 750 --rate 1200 --duration 60",
    "5,000 engines": "--prefill 1250 --decode 3750 --rate 6000 --duration 12 --warm-up 2",
}
LEFT_OUT = ("course", "samples", "costs", "wires")
DEADLINE_S = 3600.0


def measured(words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvferry", "simulate", "fleet", "--json", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return {name: value for name, value in json.loads(done.stdout).items() if name not in LEFT_OUT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument("--extra", default="", help="options that are added to each of them")
    options = parser.parse_args()
    rows = {}
    for name, words in SCENARIOS.items():
        if options.only in name:
            rows[name] = measured(f"{words} {options.extra}")
            say(f"{name}: {rows[name]['cpu_s']} s, {rows[name]['router_choice_share']:.0%} in choices")
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
