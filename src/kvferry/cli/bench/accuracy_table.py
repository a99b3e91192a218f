"""What came of `kvferry bench accuracy`, as a table on stdout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvferry.bench.accuracy.comparison import Comparison, Measured, num_correct, perplexity

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the split is not as good as the whole, and what else a reader should know."""

    faults: list[str]
    remarks: list[str]

    def as_json(self) -> dict[str, object]:
        return {"faults": self.faults, "remarks": self.remarks}


def show(measured: Measured, verdict: Verdict) -> None:
    """Print the table, with a row for each figure and a column for each run, and then the verdict."""
    out = Console(highlight=False, markup=False, emoji=False)
    out.print(_table(measured))
    if measured.unscored:
        out.print(f"references were not scored: {measured.unscored}", soft_wrap=True)
    if left_out := measured.left_out:
        out.print(
            f"{len(left_out)} requests were left out, the whole server refuses them: {left_out[0]}", soft_wrap=True
        )
    for name, token in list(measured.split.divergences.items())[:5]:
        out.print(f"differs from token {token + 1} on: prompt {name}", soft_wrap=True)
    show_verdict(out, verdict)


def show_verdict(out: Console, verdict: Verdict) -> None:
    """Print whether the split is as good as the whole, or why not."""
    for remark in verdict.remarks:
        out.print(remark, soft_wrap=True)
    if verdict.faults:
        out.print("The split does not answer as the whole does:", style="bold red")
        for fault in verdict.faults:
            out.print(f"  {fault}", soft_wrap=True)
    else:
        out.print("The split answers as the whole does.", style="bold green")


def runs_table() -> Table:
    """A table with a column for each run and no rows yet."""
    table = Table(title="Whole and split", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("whole", "whole, in other batches", "split"):
        table.add_column(name, justify="right")
    return table


def _table(measured: Measured) -> Table:
    table = runs_table()
    runs = (measured.control, measured.split)

    def row(name: str, own: str, of: Callable[[Comparison], str]) -> None:
        table.add_row(name, own, *(of(run) if run is not None else NOTHING for run in runs))

    row("prompts", str(len(measured.items)), lambda run: str(run.num_compared))
    row("equal answers", NOTHING, lambda run: f"{run.num_equal} of {run.num_compared}")
    row("difference of log-probability, mean", NOTHING, lambda run: f"{run.mean_difference:.2g}")
    row("  99 % of tokens below", NOTHING, lambda run: f"{run.difference(99):.2g}")
    row("  largest", NOTHING, lambda run: f"{run.difference(100):.2g}")
    row(
        "perplexity of references",
        number(perplexity(measured.baseline.scores)),
        lambda run: number(run.perplexity),
    )
    if with_answer := sum(item.has_answer for item in measured.items):
        own = num_correct(measured.items, measured.baseline.answers)
        row("right answers", f"{own} of {with_answer}", lambda run: f"{run.num_correct} of {with_answer}")
    row("errors", NOTHING, lambda run: str(len(run.errors)))
    if measured.split.num_split is not None:
        asked = len(measured.split.run.all)
        row("went through a split", NOTHING, lambda run: part_of(run.num_split, asked))
    return table


def number(value: float | None) -> str:
    """The number to four decimals, or `-` for None."""
    return NOTHING if value is None else f"{value:.4f}"


def part_of(part: int | None, total: int) -> str:
    """`3 of 5`, or `-` where the part is None."""
    return NOTHING if part is None else f"{part} of {total}"
