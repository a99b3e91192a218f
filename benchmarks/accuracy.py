"""Whether any way that a cache can take changes an answer: each way's split beside one engine that does everything.

    python benchmarks/accuracy.py > benchmarks/results/accuracy.json
    python benchmarks/accuracy.py --model gemma-3-270m --prompts 27 --only "blocks of 16 to 64"

Both are the embedded engine in float32, started anew for each way, with those prompts of `kvferry bench accuracy` that
are short enough. What other batches alone change is measured once, and says what a way may change. The exit code is 1
if an answer of any way differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import machine, say

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured
from kvferry.bench.accuracy.items import Item, shipped_items
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.cli.models import resolve
from kvferry.cli.up.fleet import Fleet, FleetOptions

CACHE_TOKENS = 16_384
MOST_BYTES = 6_000
EXTENT = Extent(answer_tokens=16, score_tokens=2)


@dataclass(frozen=True)
class Way:
    """Blocks on both sides in tokens, and what else the engines are told."""

    prefill_block: int = 16
    decode_block: int = 16
    arguments: tuple[str, ...] = ()


def told(**options: str) -> Way:
    words = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return Way(arguments=tuple(word for pair in words for word in pair))


WAYS = {
    "as it is by itself": Way(),
    **{f"blocks of {one} to {other}": Way(one, other) for one, other in ((16, 64), (64, 16), (16, 128), (128, 16))},
    **{
        f"{transport}, {strategy}": told(transport=transport, strategy=strategy, digest="off")
        for transport in ("shm", "cma", "tcp", "nixl")
        for strategy in ("direct", "scatter", "pack")
    },
    "pull": told(transfer_direction="pull", digest="off"),
    "push": told(transfer_direction="push", digest="off"),
    "full digests": told(digest="full"),
}


def chosen(number: int) -> tuple[Item, ...]:
    """Of all kinds, as evenly as they are in the file."""
    short = [item for item in shipped_items() if len(item.prompt) < MOST_BYTES]
    return tuple(short[:: max(1, len(short) // number)][:number])


def counting(name: str, total: int) -> Callable[[], None]:
    return lambda: None


def compare(way: Way, model: tuple[str, str], items: tuple[Item, ...], *, with_control: bool) -> Measured:
    path, name = model
    words = ("--model", path, "--served-name", name, *way.arguments)
    options = FleetOptions(1, 1, words, way.prefill_block, way.decode_block, CACHE_TOKENS, port=0)
    with tempfile.TemporaryDirectory() as logs, Fleet(options, Path(logs)) as fleet:
        fleet.start()
        whole, split = (Server(url, name, at_once=4, salt="accuracy") for url in (fleet.decode_urls[0], fleet.url))
        return asyncio.run(measure(whole, split, items, EXTENT, counting, with_control=with_control))


def figures(run: Comparison) -> dict[str, Any]:
    return {
        "equal": run.num_equal,
        "compared": run.num_compared,
        "mean_difference": run.mean_difference,
        "largest_difference": run.difference(100),
        "perplexity": run.perplexity,
        "split": run.num_split,
        "errors": run.errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--only", default="", help="some of the ways, a semicolon between them")
    options = parser.parse_args()
    items, model = chosen(options.prompts), resolve(options.model)
    rows: dict[str, Any] = {}
    for name in options.only.split(";") if options.only else WAYS:
        found = compare(WAYS[name], model, items, with_control=not rows)
        if found.control is not None:
            rows["the whole, in other batches"] = figures(found.control)
        rows[name] = figures(found.split)
        say(f"{name}: {rows[name]}")
    command = " ".join(["python", *sys.argv])
    print(json.dumps({"command": command, "machine": machine(), "model": options.model, "rows": rows}, indent=1))
    return int(any(row["equal"] < len(items) or row["errors"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
