"""The figures of a simulated fleet as tables on stdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli.units import format_seconds

Facts = Mapping[str, Any]
ROWS = (
    *("requests", "good", "goodput", "failed", "unfinished", "retried", "decode alone", "recomputed"),
    *("ttft p50", "ttft p99", "itl p50", "itl p99"),
)


def show(facts: Facts) -> None:
    """Print a table with a column for the run and up to three for each incident, and then what is scarce."""
    out = Console(highlight=False, markup=False, emoji=False)
    columns = {"all": facts["figures"]}
    for number, incident in enumerate(facts["incidents"], 1):
        phases = (name for name in ("before", "during", "after") if incident[name]["requests"])
        columns |= {f"{number}: {name}": incident[name] for name in phases}
    table = _table("", *columns)
    cells_of = [_cells(figures, facts["grace_s"]) for figures in columns.values()]
    for name, *cells in zip(ROWS, *cells_of, strict=True):
        table.add_row(name, *cells)
    _print(out, table)
    for line in lines_of(facts):
        out.print(line, soft_wrap=True)


def show_ratio(facts: Facts) -> None:
    """Print a table with a row for each fleet that was tried, and then the best one."""
    out = Console(highlight=False, markup=False, emoji=False)
    best = facts["best"]
    table = _table("prefill", "decode", "good", "goodput", "ttft p99", "itl p50", "scarcest")
    for row in facts["tried"]:
        scarcest = f"{row['scarcest']['name']} {row['scarcest']['share']:.0%}"
        times = ttft_words(row, "p99", facts["grace_s"]), time_words(row["median_itl_s"])
        is_best = best is not None and row["num_prefill"] == best["num_prefill"]
        cells = str(row["num_prefill"]), str(row["num_decode"]), f"{row['good_share']:.1%}", f"{row['goodput']:.4g}/s"
        table.add_row(*cells, *times, scarcest, style="bold" if is_best else None)
    _print(out, table)
    for line in (*_best_lines(best, facts["as_good"]), _effort(facts)):
        out.print(line, soft_wrap=True)


def _best_lines(best: Facts | None, as_good: Sequence[int]) -> Iterator[str]:
    """What the best fleet is, and whether others are as good."""
    if best is None:
        yield "none of those tried answers a request within the limits: more engines or a lower --rate may help"
        return
    yield (
        f"best: {best['num_prefill']} prefill and {best['num_decode']} decode engines, {best['goodput']:.4g} good "
        f"requests/s, {best['good_share']:.1%} of all"
    )
    if len(as_good) > 1:
        yield (
            f"{len(as_good)} of those tried, from {min(as_good)} to {max(as_good)} prefill engines, are as good: this "
            "one has the most left of what is the scarcest; a higher --rate tells them apart"
        )


def lines_of(facts: Facts) -> list[str]:
    """What the figures say, in sentences."""
    first, *others = facts["resources"]
    rest = ", ".join(f"{resource['name']} {resource['share']:.0%}" for resource in others)
    lines = [f"scarcest: {first['name']}, {first['share']:.0%} ({first['words']}); then {rest}"]
    numbered = enumerate(facts["incidents"], 1)
    lines += [f"{number}: {incident['words']}: {recovery_words(incident)}" for number, incident in numbered]
    return [*lines, *unfinished_lines(facts), _effort(facts)]


def unfinished_lines(facts: Facts) -> list[str]:
    """What became of requests that had not ended when the run did, if there are any."""
    if not (number := facts["figures"]["unfinished"]):
        return []
    counted = "not good, and later than all that were answered"
    return [f"unfinished {facts['grace_s']:g} s after the last request came: {number:,}; they count as {counted}"]


def time_words(seconds: float | None) -> str:
    """A time, or `-` for one that nobody had."""
    return "-" if seconds is None else format_seconds(seconds)


def ttft_words(figures: Facts, part: str, grace_s: float) -> str:
    """The same of times to the first token: one that is that of an unfinished request is longer than `grace_s`."""
    seconds = figures[f"{part}_ttft_s"]
    return f"> {format_seconds(grace_s)}" if seconds is None and figures["unfinished"] else time_words(seconds)


def recovery_words(incident: Facts) -> str:
    """How long until everything was as before."""
    if not incident["compared"]:
        missing = "came after it began" if incident["before"]["requests"] else "that counts ended before it"
        return f"no request {missing}: nothing to compare with"
    if incident["recovery_s"] is None:
        return "not back to normal at the end"
    if not incident["recovery_s"]:
        return "no window had clearly fewer good requests than before"
    return f"back to normal {incident['recovery_s']:.0f} s after it began"


def _effort(facts: Facts) -> str:
    share = f"{facts['router_choice_share']:.0%} of it in {facts['router_choices']:,} choices of the router"
    return f"simulated {facts['duration_s']:g} s in {facts['cpu_s']:.1f} s of a processor, {share}"


def _table(*names: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _print(out: Console, table: Table) -> None:
    """Print a table as wide as it has to be, rather than with figures that are cut."""
    width = Console(width=1000, markup=False, emoji=False).measure(table).maximum
    Console(width=max(out.width, width), highlight=False, markup=False, emoji=False).print(table)


def _cells(figures: Facts, grace_s: float) -> tuple[str, ...]:
    names = ("failed", "unfinished", "retried", "decode_alone", "recomputed")
    return (
        f"{figures['requests']:,}",
        f"{figures['good_share']:.1%}",
        f"{figures['goodput']:.4g}/s",
        *(f"{figures[name]:,}" for name in names),
        *(ttft_words(figures, part, grace_s) for part in ("median", "p99")),
        *(time_words(figures[f"{part}_itl_s"]) for part in ("median", "p99")),
    )
