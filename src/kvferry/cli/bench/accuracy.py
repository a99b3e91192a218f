"""`kvferry bench accuracy`: two servers, the same prompts; a table or JSON, a page, and a verdict."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured, num_correct, perplexity
from kvferry.bench.accuracy.items import Item, read_items, shipped_items
from kvferry.bench.accuracy.page import accuracy_page
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.bench.accuracy.verdict import Limits, faults, remarks
from kvferry.bench.load.target import served_model
from kvferry.cli import console
from kvferry.cli.bench.accuracy_table import Verdict, show
from kvferry.cli.bench.command import AccuracyOptions, base_of
from kvferry.cli.bench.progress import BenchProgress
from kvferry.cli.bench.serve import headers_named
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

PARTS = (50, 99, 100)


def bench_accuracy(options: AccuracyOptions) -> int:
    """Exit code 0 when the split answers as the whole does, as far as the limits say. Raises ConfigurationError."""
    plot, items = console.page_file(options.plot), _items(options)
    measured = asyncio.run(_run(options, items))
    found = faults(measured, Limits(options.min_equal, options.factor))
    split = measured.split
    different, by_chance = len(split.divergences), measured.num_different_by_chance
    verdict = Verdict(found, list(remarks(different, split.num_compared, by_chance, split.num_split)))
    if options.as_json:
        console.data(_json(options, measured) | verdict.as_json())
    else:
        show(measured, verdict)
    if plot is not None:
        console.write_page(plot, accuracy_page(f"{options.url} against {options.against}", measured, found))
    return 1 if found else 0


def _items(options: AccuracyOptions) -> tuple[Item, ...]:
    if not options.prompts:
        items = shipped_items()
    else:
        try:
            with open(options.prompts, encoding="utf-8-sig") as lines:
                items = read_items(lines)
        except (OSError, UnicodeDecodeError) as error:
            found = f"{options.prompts}: {os_error_text(error)}"
            raise ConfigurationError("cannot read the prompts", found=found, expected="a JSONL file") from None
    number = min(options.limit or len(items), len(items))
    return tuple(items[place * len(items) // number] for place in range(number))


async def servers_of(options: AccuracyOptions) -> tuple[Server, Server]:
    """The whole server and the split. Raises ConfigurationError."""
    headers, salt = headers_named(options.header), f"accuracy-{secrets.token_hex(4)}"
    sides = []
    for url in (options.against, options.url):
        base = base_of(url)
        model = await served_model(base, options.model, headers)
        sides.append(Server(base, model, headers, options.concurrency, salt, options.timeout))
    whole, split = sides
    return whole, split


async def _run(options: AccuracyOptions, items: tuple[Item, ...]) -> Measured:
    whole, split = await servers_of(options)
    extent = Extent(options.max_tokens, options.score_tokens)
    with BenchProgress() as progress:

        def phase(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.update(task, advance=1)

        return await measure(whole, split, items, extent, phase, with_control=options.control)


def _json(options: AccuracyOptions, measured: Measured) -> dict[str, object]:
    return {
        "url": options.url,
        "against": options.against,
        "prompts": len(measured.items),
        "max_tokens": options.max_tokens,
        "at_once": options.concurrency,
        "baseline": {
            "perplexity": perplexity(measured.baseline.scores),
            "correct": num_correct(measured.items, measured.baseline.answers),
        },
        "split": _figures(measured.split),
        "control": _figures(measured.control) if measured.control else None,
        "with_answer": sum(item.has_answer for item in measured.items),
        "left_out": measured.left_out,
        "not_scored": measured.unscored or None,
    }


def _figures(run: Comparison) -> dict[str, object]:
    return {
        "compared": run.num_compared,
        "equal": run.num_equal,
        "first_different_token": run.divergences,
        "logprob_difference": {
            "mean": run.mean_difference,
            **{("max" if part == 100 else f"p{part}"): run.difference(part) for part in PARTS},
            "tokens": len(run.differences),
        },
        "perplexity": run.perplexity,
        "correct": run.num_correct,
        "split": run.num_split,
        "errors": run.errors,
    }
