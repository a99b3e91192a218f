"""Whether any way that a cache can take changes an answer: each way's split beside one engine that does everything.

    python benchmarks/accuracy.py > benchmarks/results/accuracy.json
    python benchmarks/accuracy.py --model gemma-3-270m --only "blocks of 16 to 64;bfloat16"
    python benchmarks/accuracy.py --model gemma-3-270m --engines vllm     # in the environment of `make test-vllm`

Both engines are started anew for each way, and asked those prompts of `kvferry bench accuracy` that are short enough.
What other batches alone change is measured once for each decode engine and dtype, and says what a way may change;
between different engines, so is how far the prefill engine's own answers are from those of the decode engine. In
bfloat16, so is what the decode engine answers where it computes one token with the prompt that it has computed in a
step of its own, as a split does with the prompt's last token. The exit code is 1 if an answer in float32 differs, or
one in bfloat16 by more than other batches make.
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
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accuracy_controls import beside, mean_of_answers, with_first_token
from accuracy_ways import WAYS, Way
from measuring import machine, say

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured
from kvferry.bench.accuracy.items import Item, shipped_items
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.bench.accuracy.verdict import Limits, faults
from kvferry.cli.child_processes import Child
from kvferry.cli.models import resolve

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from engine_server import VLLM_ON_CPU

CACHE_TOKENS = 32_768
# The tiny model takes no longer prompts, and two cores take hours over all ways with them.
MAX_PROMPT_BYTES = 6_000
READY_S = 600.0
ANSWER_TOKENS = 16
IN_OTHER_BATCHES, BY_ITSELF = "the whole, in other batches", "the prefill engine by itself"
WITH_THE_PROMPT = "the whole, the first token with the prompt"
EXACT = "float32"
EARLY = "kvferry_router_early_decodes_total"


def chosen(number: int, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> tuple[Item, ...]:
    """Of all kinds, as evenly as they are in the file."""
    short = [item for item in shipped_items() if len(item.prompt) < max_prompt_bytes]
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


@dataclass(frozen=True)
class Asked:
    """What came of one way; `num_early` only of one that begins early."""

    measured: Measured
    controls: dict[str, Comparison]
    num_early: int | None


def compare(way: Way, model: tuple[str, str], items: tuple[Item, ...], extent: Extent, *, with_controls: bool) -> Asked:
    """The split beside the decode engine alone; and where that is asked for, what else differs from that, by name."""

    async def ask(urls: Urls) -> tuple[Measured, dict[str, Comparison]]:
        prefill, whole, split = (
            Server(url, model[1], at_once=4, salt=f"accuracy-{place}")
            for place, url in enumerate((urls.prefill, urls.decode, urls.router))
        )
        measured = await measure(whole, split, items, extent, counting, with_control=with_controls)
        controls: dict[str, Comparison] = {}
        if measured.control is not None:
            controls[IN_OTHER_BATCHES] = measured.control
            if way.dtype != EXACT:
                again, tokens = replace(whole, salt="accuracy-with-the-prompt"), extent.answer_tokens
                controls[WITH_THE_PROMPT] = await with_first_token(again, items, measured.baseline, tokens)
            if way.prefill.engine != way.decode.engine:
                found = await measure(whole, prefill, items, extent, counting, with_control=False)
                controls[BY_ITSELF] = found.split
        return measured, controls

    with tempfile.TemporaryDirectory() as logs, running(way, model, Path(logs)) as urls:
        measured, controls = asyncio.run(ask(urls))
        return Asked(measured, controls, num_early(urls.router) if way.early else None)


def num_early(router: str) -> int:
    """How many decode requests have begun before their prompt was computed, as the router counts them: it does not ask
    engines whose caches cannot leave early for that."""
    with urllib.request.urlopen(f"{router}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return next((int(float(line.split()[1])) for line in lines if line.startswith(f"{EARLY} ")), 0)


def figures(run: Comparison, found: list[str]) -> dict[str, Any]:
    return {
        "equal": run.num_equal,
        "compared": run.num_compared,
        "first_different_token": run.divergences,
        "mean_difference": run.mean_difference,
        "mean_difference_of_answers": mean_of_answers(run),
        "largest_difference": run.difference(100),
        "perplexity": run.perplexity,
        "split": run.num_split,
        "errors": run.errors,
        "faults": found,
    }


def measured_ways(
    ways: dict[str, Way], model: tuple[str, str], items: tuple[Item, ...], extent: Extent
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row of each way, and before it those of its controls, where its decode engine and dtype are the first."""
    known: dict[str, dict[str, Comparison]] = {}
    for name, way in ways.items():
        asked = compare(way, model, items, extent, with_controls=way.dtype not in known)
        for control, comparison in asked.controls.items():
            yield f"{control} ({way.dtype})", figures(comparison, [])
        controls = known.setdefault(way.dtype, asked.controls)
        limits = Limits(min_equal=1.0 if way.dtype == EXACT else None)
        measured = replace(asked.measured, control=controls[IN_OTHER_BATCHES])
        row = figures(measured.split, faults(measured, limits))
        if asked.num_early is not None:
            row["early"] = asked.num_early
        if way.dtype != EXACT:
            row["beside"] = {each: asdict(beside(measured.split, controls[each])) for each in controls}
        yield name, row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engines", choices=WAYS, default="transformers")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-prompt-bytes", type=int, default=MAX_PROMPT_BYTES)
    parser.add_argument("--score-tokens", type=int, default=2, help="of each reference")
    parser.add_argument("--only", default="", help="some of the ways, a semicolon between them")
    options = parser.parse_args()
    os.environ.update(VLLM_ON_CPU)
    items, model = chosen(options.prompts, options.max_prompt_bytes), resolve(options.model)
    ways, extent = WAYS[options.engines], Extent(ANSWER_TOKENS, options.score_tokens)
    if options.only:
        ways = {name: ways[name] for name in options.only.split(";")}
    rows: dict[str, Any] = {}
    for name, row in measured_ways(ways, model, items, extent):
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
                "score_tokens": options.score_tokens,
                "longest_prompt_bytes": max(len(item.prompt) for item in items),
                "rows": rows,
            },
            indent=1,
        )
    )
    return int(any(row["faults"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
