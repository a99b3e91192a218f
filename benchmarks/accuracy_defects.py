"""How many prompts `kvferry bench accuracy` needs until it sees a transfer that is wrong.

    python benchmarks/accuracy_defects.py > benchmarks/results/accuracy_defects.json
    python benchmarks/accuracy_defects.py --model gemma-3-270m --defects short,neighbour,window

The embedded engine in float32, digests off. The decode engine reads what `tests/twisted_serve.py` makes of each read:
two blocks of one state swapped (of the tiny model), rows a head too early, the last token left out, the blocks of a
neighbour, or those of a neighbour for layers with a window alone. All prompts are asked once; then prompts are drawn
from them, and the verdict is asked whether it sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accuracy import chosen, counting
from measuring import machine, say

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured, Run
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.bench.accuracy.verdict import Limits, faults
from kvferry.cli.models import resolve

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS)]

from chaos_support import Process, running  # noqa: E402

SHARES = (0.5, 0.95)
NUM_DRAWS = 400
# No references: a prompt is one answer.
EXTENT = Extent(answer_tokens=8, score_tokens=0)
TRANSFER = ("--transport", "shm", "--strategy", "direct", "--transfer-direction", "pull", "--digest", "off")


@dataclass(frozen=True)
class Site:
    """The engine that does everything, the one that reads what it is told to, and a router before both."""

    whole: Server
    split: Server
    twisted: Process


def some(measured: Measured, places: list[int]) -> Measured:
    """As if only these prompts had been asked."""
    items = tuple(measured.items[place] for place in places)

    def run(of: Run) -> Run:
        return Run(tuple(of.answers[place] for place in places), ())

    def compared(of: Comparison) -> Comparison:
        return Comparison(items, run(of.baseline), run(of.run))

    control = compared(measured.control) if measured.control is not None else None
    return Measured(items, run(measured.baseline), compared(measured.split), control, "")


def shares_seen(measured: Measured) -> list[float]:
    """The share of draws of 1, 2, 3… prompts in which the verdict is not clean."""
    dice, places = random.Random(0), range(len(measured.items))
    return [
        sum(bool(faults(some(measured, dice.sample(places, size)), Limits())) for _ in range(NUM_DRAWS)) / NUM_DRAWS
        for size in range(1, len(places) + 1)
    ]


def until(shares: list[float], part: float) -> int | None:
    """From how many prompts on it is seen in this part of the draws, also with more; None if all of them do not do.

    Of one or two prompts the verdict says only that they are too few, whatever differs.
    """
    missed = [number for number, share in enumerate(shares, 1) if share < part]
    first = max(missed, default=0) + 1
    return first if first <= len(shares) else None


def measured_defects(site: Site, defects: Sequence[str], num_prompts: int) -> dict[str, Any]:
    items, rows = chosen(num_prompts), dict[str, Any]()
    for defect in ("", *defects):
        if defect:
            site.twisted.gate.write_text(defect)
        whole, split = (replace(server, salt=f"{server.salt}-{defect}") for server in (site.whole, site.split))
        measured = asyncio.run(measure(whole, split, items, EXTENT, counting, with_control=True))
        shares = shares_seen(measured)
        needed = {f"{part:.0%}": until(shares, part) for part in SHARES}
        name = defect or "nothing is wrong"
        rows[name] = {
            "equal": measured.split.num_equal,
            "compared": measured.split.num_compared,
            "mean_difference": measured.split.mean_difference,
            "split": measured.split.num_split,
            "prompts_until_seen": needed,
        }
        say(f"{name}: {rows[name]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--defects", default="swapped,shifted,short,neighbour", help="with commas between them")
    options = parser.parse_args()
    path, name = resolve(options.model)
    common = ("serve", "--model", path, "--served-name", name, *TRANSFER, "--engine-id")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        whole = Process(logs / "whole.log", *common, "whole")
        twisted = Process(logs / "twisted.log", *common, "twisted", script=TESTS / "twisted_serve.py")
        with running(whole, twisted):
            router = Process(logs / "router.log", "route", "--prefill", whole.url, "--decode", twisted.url)
            with running(router):
                asked = (Server(url, name, at_once=4, salt="defects") for url in (whole.url, router.url))
                rows = measured_defects(Site(*asked, twisted), options.defects.split(","), options.prompts)
    found = {"machine": machine(), "model": options.model, "prompts": options.prompts, "rows": rows}
    print(json.dumps({"command": " ".join(["python", *sys.argv]), **found}, indent=1))


if __name__ == "__main__":
    main()
