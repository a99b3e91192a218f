"""Whether any way that a cache can take changes an answer: each way's split beside one engine that does everything.

    python benchmarks/accuracy.py > benchmarks/results/accuracy.json
    python benchmarks/accuracy.py --model gemma-3-270m --only "blocks of 16 to 64;bfloat16"
    python benchmarks/accuracy.py --model gemma-3-270m --engines vllm     # in the environment of `make test-vllm`

Both engines are started anew for each way, and asked those prompts of `kvferry bench accuracy` that are short enough.
What other batches alone change is measured once for each decode engine and dtype, and says what a way may change;
between different engines, so is how far the prefill engine's own answers are from those of the decode engine. The exit
code is 1 if an answer in float32 differs, or one in bfloat16 by more than other batches make.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy_ways import WAYS, Way
from measuring import machine, say

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured
from kvferry.bench.accuracy.items import Item, shipped_items
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.bench.accuracy.verdict import Limits, faults
from kvferry.cli.models import resolve
from kvferry.cli.up.processes import Child

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from engine_server import VLLM_ON_CPU

CACHE_TOKENS = 16_384
MOST_BYTES = 6_000
READY_S = 600.0
EXTENT = Extent(answer_tokens=16, score_tokens=2)
IN_OTHER_BATCHES, BY_ITSELF = "the whole, in other batches", "the prefill engine by itself"


def chosen(number: int) -> tuple[Item, ...]:
    """Of all kinds, as evenly as they are in the file."""
    short = [item for item in shipped_items() if len(item.prompt) < MOST_BYTES]
    return tuple(short[:: max(1, len(short) // number)][:number])


def counting(name: str, total: int) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class Urls:
    prefill: str
    decode: str
    router: str


@contextlib.contextmanager
def running(way: Way, model: tuple[str, str], logs: Path) -> Iterator[Urls]:
    """Both engines and a router, ready."""
    path, name = model
    common = ("--model", path, "--served-name", name, "--dtype", way.dtype, *way.transfer)
    with contextlib.ExitStack() as started:

        def start(name: str, *arguments: str) -> Child:
            child = Child(name, arguments, logs / f"{name}.log", port=0)
            started.callback(child.stop)
            started.callback(child.terminate)
            return child

        def url(child: Child) -> str:
            return str(child.wait_until_ready(deadline)["url"])

        deadline = time.monotonic() + READY_S
        sides = {"prefill": way.prefill, "decode": way.decode}
        children = [
            start(role, "serve", "--engine-id", role, *common, *side.arguments(CACHE_TOKENS))
            for role, side in sides.items()
        ]
        prefill, decode = (url(child) for child in children)
        early = ("--early-decode-from", "1") if way.early else ()
        router = start("router", "route", "--prefill", prefill, "--decode", decode, *early)
        yield Urls(prefill, decode, url(router))


def compare(
    way: Way, model: tuple[str, str], items: tuple[Item, ...], *, with_control: bool, between_engines: bool
) -> tuple[Measured, Measured | None]:
    """The split beside the decode engine alone; and the prefill engine alone beside it, where that is asked for."""

    async def ask(urls: Urls) -> tuple[Measured, Measured | None]:
        prefill, whole, split = (
            Server(url, model[1], at_once=4, salt=f"accuracy-{place}")
            for place, url in enumerate((urls.prefill, urls.decode, urls.router))
        )
        measured = await measure(whole, split, items, EXTENT, counting, with_control=with_control)
        if not between_engines:
            return measured, None
        return measured, await measure(whole, prefill, items, EXTENT, counting, with_control=False)

    with tempfile.TemporaryDirectory() as logs, running(way, model, Path(logs)) as urls:
        return asyncio.run(ask(urls))


def figures(run: Comparison, found: list[str]) -> dict[str, Any]:
    return {
        "equal": run.num_equal,
        "compared": run.num_compared,
        "first_different_token": run.divergences,
        "mean_difference": run.mean_difference,
        "largest_difference": run.difference(100),
        "perplexity": run.perplexity,
        "split": run.num_split,
        "errors": run.errors,
        "faults": found,
    }


def measured_ways(
    ways: dict[str, Way], model: tuple[str, str], items: tuple[Item, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row of each way, and before it what its decode engine does by itself where that is not known yet."""
    controls: dict[str, Comparison] = {}
    for name, way in ways.items():
        control = controls.get(way.dtype)
        engines_differ = way.prefill.engine != way.decode.engine
        first_of_dtype = control is None
        measured, beside = compare(
            way, model, items, with_control=first_of_dtype, between_engines=first_of_dtype and engines_differ
        )
        if control is None:
            assert measured.control is not None
            control = controls[way.dtype] = measured.control
            yield f"{IN_OTHER_BATCHES} ({way.dtype})", figures(control, [])
        if beside is not None:
            yield f"{BY_ITSELF} ({way.dtype})", figures(beside.split, [])
        limits = Limits(min_equal=1.0 if way.dtype == "float32" else None)
        measured = Measured(measured.items, measured.baseline, measured.split, control, measured.unscored)
        yield name, figures(measured.split, faults(measured, limits))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engines", choices=WAYS, default="transformers")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--only", default="", help="some of the ways, a semicolon between them")
    options = parser.parse_args()
    os.environ.update(VLLM_ON_CPU)
    items, model = chosen(options.prompts), resolve(options.model)
    ways = WAYS[options.engines]
    if options.only:
        ways = {name: ways[name] for name in options.only.split(";")}
    rows: dict[str, Any] = {}
    for name, row in measured_ways(ways, model, items):
        rows[name] = row
        say(f"{name}: {row}")
    command = " ".join(["python", *sys.argv])
    print(
        json.dumps(
            {
                "command": command,
                "machine": machine(),
                "model": options.model,
                "engines": options.engines,
                "prompts": len(items),
                "rows": rows,
            },
            indent=1,
        )
    )
    return int(any(row["faults"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
