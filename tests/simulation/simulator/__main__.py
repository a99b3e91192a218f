"""`python -m simulator`: play many runs, replay one with its log, or look for planted defects."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from simulator.defects.defect import DEFECTS, NO_DEFECT
from simulator.many import first_violation, play_all
from simulator.report.summary import Summary
from simulator.run import simulate

MAX_DEFECT_RUNS = 2000


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when nothing was wrong, or when every planted defect was found; else 1."""
    chosen = _parser().parse_args(arguments)
    if chosen.defects:
        return _look_for_defects(chosen)
    if chosen.log:
        return _tell(chosen)
    return _play(chosen)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--runs", type=_count, default=1000, metavar="N", help="how many runs (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first run's seed; the others follow")
    parser.add_argument("--processes", type=_count, default=2, metavar="N", help="how many at once (default: 2)")
    parser.add_argument("--log", action="store_true", help="print everything that happens in the runs")
    parser.add_argument("--defect", choices=sorted(DEFECTS), default="", metavar="NAME", help="play with a defect")
    parser.add_argument("--defects", action="store_true", help="look for every planted defect")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _play(chosen: argparse.Namespace) -> int:
    summary, began = Summary(), time.monotonic()
    seeds = range(chosen.seed, chosen.seed + chosen.runs)
    for outcome in play_all(seeds, DEFECTS.get(chosen.defect, NO_DEFECT), min(chosen.processes, chosen.runs)):
        summary.add(outcome)
        if summary.num_runs % 50 == 0:
            _progress(f"{summary.num_runs:,} of {chosen.runs:,} runs, {len(summary.violations)} with a violation")
    _progress("")
    elapsed_s = time.monotonic() - began
    _report(json.dumps(summary.as_json(elapsed_s), indent=2) if chosen.json else summary.as_text(elapsed_s))
    return 1 if summary.violations else 0


def _tell(chosen: argparse.Namespace) -> int:
    is_well = True
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        outcome = simulate(seed, DEFECTS.get(chosen.defect, NO_DEFECT), is_logged=True)
        is_well = is_well and not outcome.violation
        _report("\n".join(outcome.log))
    return 0 if is_well else 1


def _look_for_defects(chosen: argparse.Namespace) -> int:
    rows: list[dict[str, object]] = []
    seeds = range(chosen.seed, chosen.seed + MAX_DEFECT_RUNS)
    for number, defect in enumerate(DEFECTS.values()):
        _progress(f"{number} of {len(DEFECTS)} planted defects, now {defect.name}")
        found = first_violation(defect, seeds)
        num_runs = found[0].seed - chosen.seed + 1 if found else 0
        rows.append({"name": defect.name, "what": defect.what, "runs": num_runs, "found": [o.violation for o in found]})
    _progress("")
    if chosen.json:
        _report(json.dumps(rows, indent=2))
    else:
        lines = [f"{row['name']:<15}{row['runs'] or 'never':>7}  {row['what']}" for row in rows]
        _report("\n".join([f"{'planted defect':<15}{'runs':>7}", *lines]))
    return 0 if all(row["runs"] for row in rows) else 1


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<78}\r")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
