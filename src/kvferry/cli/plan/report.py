"""`kvferry plan`: what moves where between two topologies, and what it costs, without any hardware."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import lcm
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvferry.catalog import Entry, Options, read
from kvferry.cli import console
from kvferry.cli.plan.command import PlanOptions
from kvferry.cli.plan.plan_facts import (
    ModelNames,
    Side,
    group_facts,
    layout_facts,
    moved_words,
    pair_facts,
    plain,
    side_facts,
    sums,
)
from kvferry.cli.plan.row_groups import rows_of
from kvferry.cli.plan.shape import BLOCK_TOKENS, link_of, shape_of
from kvferry.cli.plan.verdict import prefill_of, verdict_of
from kvferry.cli.units import format_bytes, format_seconds
from kvferry.errors import ConfigurationError, LayoutError, TooManyRowsError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import CacheModel, attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.request import Ranges
from kvferry.plan.strategy.calibration import Costs, typical_device
from kvferry.plan.strategy.request_estimate import Quote, quote

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
MAX_WIDTH = 1000
MAX_TOKENS_PER_S = 10**12


def plan(options: PlanOptions, entry: Entry, typed: str) -> None:
    """Compute and print; `typed` is the command line. Raises ConfigurationError or the planner's own errors."""
    page = console.page_file(options.html)
    with console.stderr.status("planning"):
        facts = facts_of(options, entry) | {"command": typed}
    if page:
        from kvferry.cli.plan.page import html

        console.write_page(page, html.page(facts))
    if options.as_json:
        console.data(facts)
        return
    screen = Console(markup=False, emoji=False)
    tables = {_width_of(table): table for table in (_table(facts), _table(facts, is_narrow=True))}
    # Numbers that are cut are worse than lines that wrap.
    needed = next((width for width in tables if width <= screen.width), min(tables))
    Console(width=max(screen.width, needed), markup=False, emoji=False).print(tables[needed])
    for line in _summary(facts):
        screen.print(line, highlight=False, markup=False)


def model_of(options: PlanOptions) -> Entry:
    """A model by its `config.json` or its name in the catalog."""
    return read(options.model, Options(options.cache_dtype, options.draft, options.assume_standard))


def model_of_numbers(options: PlanOptions) -> Entry:
    """A model of full attention by its numbers. Raises ConfigurationError for an unknown dtype."""
    num_layers, num_heads, head_dim, dtype = options.layers, options.heads, options.head_dim, options.dtype
    if dtype not in ITEM_BYTES:
        raise ConfigurationError("unknown dtype", found=dtype, expected=", ".join(ITEM_BYTES))
    name = f"{num_layers} layers of {num_heads} heads of {head_dim} {dtype}"
    return Entry(name, attention(num_layers, num_heads, head_dim, dtype, ITEM_BYTES[dtype]), 0, ())


def check_speed(tokens_per_s: float) -> None:
    """Raises ConfigurationError for a speed that cannot be meant."""
    if not 1 <= tokens_per_s <= MAX_TOKENS_PER_S:
        expected = f"--prefill-speed from 1 to {MAX_TOKENS_PER_S:,} tokens/s"
        raise ConfigurationError("--prefill-speed is out of range", found=f"{tokens_per_s:g}", expected=expected)


def facts_of(options: PlanOptions, entry: Entry) -> dict[str, Any]:
    """The whole plan as plain data: see the README for its keys."""
    model = entry.cache
    if not 0 <= options.cached <= options.tokens:
        found, expected = f"{options.cached} of {options.tokens}", "0 <= cached <= tokens"
        raise ConfigurationError("--cached is larger than --tokens", found=found, expected=expected)
    source = _side("--prefill", options.prefill, options, model, 1 << 50)
    target = _side("--decode", options.decode, options, model, 1 << 51)
    tables = _tables(source, options), _tables(target, options)
    wanted = TokenRange(options.cached, options.tokens)
    link_bytes_per_s = link_of(options.link)
    costs = typical_device(link_bytes_per_s)
    quoted = _quoted((source, target), tables, (wanted,) * len(model.groups()), costs)
    names = ModelNames(model)
    pairs = [pair_facts(pair, names) for pair in quoted.pairs]
    prefill = prefill_of(options.prefill_speed, entry.num_active_parameters, source.shape.num_ranks)
    return {
        "model": entry.name,
        "tokens": options.tokens,
        "cached_tokens": options.cached,
        "bytes_per_token": plain(model.bytes_per_token),
        "lasting_bytes_per_token": plain(model.lasting_bytes_per_token),
        "fixed_bytes": model.fixed_bytes,
        **sums(quoted),
        "link_bytes_per_s": link_bytes_per_s,
        "blocks": "scattered" if options.scattered else "adjacent",
        "groups": group_facts(model, wanted),
        "source": side_facts(source, names, pairs, "source_rank"),
        "target": side_facts(target, names, pairs, "target_rank"),
        "layouts": {"source": layout_facts(source, names), "target": layout_facts(target, names)},
        "pairs": pairs,
        "verdict": asdict(verdict_of(len(wanted), quoted.predicted_s, prefill)),
        "notes": list(entry.notes),
        "fields": [asdict(field) for field in entry.fields],
    }


def _quoted(sides: tuple[Side, Side], tables: tuple[BlockTables, BlockTables], ranges: Ranges, costs: Costs) -> Quote:
    source, target = sides
    try:
        return quote((source.layouts, target.layouts), tables, ranges, costs)
    except TooManyRowsError as error:
        hint = "fewer --tokens: prices grow with them. Engines that pack look at one slot after the other"
        what = "this prompt falls into more rows than kvferry plan looks at one by one"
        raise ConfigurationError(what, found=error.found, expected=error.expected, hint=hint) from error


def _side(name: str, words: str, options: PlanOptions, model: CacheModel, first_address: int) -> Side:
    """An engine whose pool is twice as large as the prompt needs. Raises ConfigurationError, with the side's name."""
    try:
        return _engine(words, options, model, first_address)
    except (ConfigurationError, LayoutError) as error:
        is_layout = error.found == options.layout and "format=" not in words
        what = f"{'--layout' if is_layout else f'{name} {words}'}: {error.what}"
        raise ConfigurationError(what, found=error.found, expected=error.expected, hint=error.hint) from error


def _engine(words: str, options: PlanOptions, model: CacheModel, first_address: int) -> Side:
    # Blocks hold whole entries where several tokens share one.
    block_tokens = lcm(BLOCK_TOKENS, *(kept.state.compress_ratio for kept in model.kept()))
    shape, replicas = shape_of(words, options.layout, block_tokens)
    _check_outer(shape.outer_axis, model)
    num_needed = _num_needed(shape, options.tokens)
    shape = replace(shape, num_blocks=2 * num_needed * max(1, len(model.groups())))
    return Side(words, shape, replicas, describe(model, shape, first_address))


def _check_outer(axis: str, model: CacheModel) -> None:
    known = sorted({axis.name for kept in model.kept() if not kept.state.per_token for axis in kept.state.axes})
    if axis and axis not in known:
        raise ConfigurationError(
            "outer= names an unknown axis",
            found=f"outer={axis}",
            expected=", ".join(known) or "no outer=, as the model has no state of fixed size",
        )


def _num_needed(shape: EngineShape, tokens: int) -> int:
    """Blocks for all tokens of one rank; under context parallelism a rank has a run more than its share at most."""
    num_shares = shape.context_parallel * shape.decode_context_parallel
    own = -(-tokens // num_shares) + (shape.run_tokens if num_shares > 1 else 0)
    return max(1, -(-own // shape.block_tokens))


def _tables(side: Side, options: PlanOptions) -> list[Sequence[int]]:
    """Block ids of the prompt per group: adjacent, or at random (the same ones every time) as in a busy pool.

    Different for every group, so that groups that share a pool do not meet.
    """
    ids: Sequence[int] = range(side.shape.num_blocks)
    if options.scattered:
        ids = list(ids)
        random.Random(0).shuffle(ids)
    num_needed = _num_needed(side.shape, options.tokens)
    num_groups = len(side.layouts[0].groups)
    return [ids[index * num_needed : (index + 1) * num_needed] for index in range(num_groups)]


def _table(facts: dict[str, Any], *, is_narrow: bool = False) -> Table:
    """The table of a plan. With `is_narrow`, layers have no column of their own."""
    title = f"{facts['model']}: {facts['source']['words']} → {facts['target']['words']}"
    table = Table(title=title, title_justify="left", show_footer=True, show_edge=False, pad_edge=not is_narrow)
    columns = [
        ("from → to", "all"),
        ("layers", ""),
        ("what", ""),
        ("size", format_bytes(facts["bytes"])),
        ("rows", _rows_words(facts)),
        ("strategy", ""),
        ("time", format_seconds(facts["predicted_s"])),
    ]
    for name, footer in columns:
        justify: Literal["left", "right"] = "right" if name in ("size", "rows", "time") else "left"
        if not (is_narrow and name == "layers"):
            table.add_column(name, footer=footer, justify=justify, no_wrap=True)
    for row in rows_of(facts["pairs"]):
        layers, what = _layers_words(row.first), row.what
        beside = ["\n".join([f"layers {layers}", *what])] if is_narrow else [layers, "\n".join(what) or "all of it"]
        table.add_row(row.ranks, *beside, *_figures(row.first, len(row.pairs)))
    return table


def _width_of(table: Table) -> int:
    """How many columns of a screen a table takes if nothing is cut."""
    screen = Console(width=MAX_WIDTH, markup=False, emoji=False)
    return Measurement.get(screen, screen.options, table).maximum


def _figures(pair: dict[str, Any], num_alike: int) -> list[str | Text]:
    """The size and rows of a pair, and the time that each strategy takes, the chosen one first."""
    each = "\neach" if num_alike > 1 else ""
    others = {name: price for name, price in pair["prices"].items() if name != pair["strategy"]}
    return [
        format_bytes(pair["bytes"]) + each,
        _rows_words(pair) + each,
        _above(pair["strategy"], [f"({name})" for name in others]),
        _above(format_seconds(pair["predicted_s"]), [format_seconds(price) for price in others.values()]),
    ]


def _above(chosen: str, others: list[str]) -> Text:
    """Lines with the chosen strategy's text first, and the others dimmed below it."""
    return Text("\n").join([Text(chosen), *(Text(other, "dim") for other in others)])


def _rows_words(facts: dict[str, Any]) -> str:
    """How many rows, and how many are left when neighbours are joined."""
    before, after = facts["rows_before_merge"], facts["rows"]
    return f"{before:,}" if before == after else f"{before:,}\n→ {after:,}"


def _layers_words(pair: dict[str, Any]) -> str:
    runs = pair["layers"]
    words = f"{sum(last - first for first, last in runs)} of {runs[0][0]}-{runs[-1][1] - 1}"
    if len(runs) <= 2:
        words = " ".join(f"{first}-{last - 1}" if last - first > 1 else str(first) for first, last in runs)
    return f"{words}\n+ draft" if pair["draft_layers"] else words


def _remarks(facts: dict[str, Any]) -> list[str]:
    """Lines about draft layers and replicas."""
    drafts = sorted({layer for pair in facts["pairs"] for layer in pair["draft_layers"]})
    lines = [f"  draft layers: {len(drafts)}, stored and moved with the last layer"] if drafts else []
    for name, side in (("prefill", facts["source"]), ("decode", facts["target"])):
        if (replicas := side["data_parallel"]) > 1:
            what = "each is an engine of its own, with its own ranks and cache; the plan is for one of them"
            lines.append(f"  {name} dp={replicas}: {replicas} replicas; {what}")
    return lines


def _each(facts: dict[str, Any]) -> str:
    early, late = facts["bytes_per_token"], facts["lasting_bytes_per_token"]
    lasting = f" while no window is full, {round(late, 2):,} from then on" if late != early else ""
    return f"{round(early, 2):,} bytes each{lasting}"


def _summary(facts: dict[str, Any]) -> list[str]:
    moved = facts["tokens"] - facts["cached_tokens"]
    lines = [
        f"{moved:,} of {facts['tokens']:,} tokens, {_each(facts)}"
        + (f", and {facts['fixed_bytes']:,} bytes that do not depend on the length" if facts["fixed_bytes"] else "")
        + f"; blocks {facts['blocks']}; {facts['link_bytes_per_s'] / 1e9:,.1f} GB/s per rank"
    ]
    lines += [
        f"  group {group['name']}: {group['layers']} layers, {moved_words(group)} move"
        for group in facts["groups"]
        if len(facts["groups"]) > 1 and group["bytes_per_token"]
    ]
    lines += _remarks(facts)
    reasons = dict.fromkeys(pair["reason"] for pair in facts["pairs"])
    lines += [f"  {reason}" for reason in list(reasons)[:4]]
    lines.append(facts["verdict"]["text"])
    lines += [f"note: {note}" for note in facts["notes"]]
    return lines
