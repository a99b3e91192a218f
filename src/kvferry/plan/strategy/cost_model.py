"""Which of the three strategies is the fastest: a price for each, from calibrated costs and three counts of a transfer.

A transfer moves through up to three stages: gather, wire, scatter. Over a transfer of `num_bytes` in `num_rows`, with
`num_slots = ceil(num_bytes / slot_bytes)`:

    gather  = num_slots * launch_s + num_rows * copy_row_s + num_bytes / gather_bytes_per_s
    wire    = wire_rows * row_s + num_bytes / wire_bytes_per_s
    scatter = num_slots * launch_s + num_rows * copy_row_s + num_bytes / scatter_bytes_per_s

While one slot is on the wire the next is gathered and the one before is scattered, so only the slowest stage is seen in
full; of the others, what one slot takes. But stages share cores and the memory, so that no more than `num_at_once` of
them run at full speed at a time:

    seconds = latency_s + max(slowest + (sum of the others) / max(1, num_bytes / slot_bytes),
                              (sum of all) * fan_in / num_at_once, unless all three get on)

The divisor is no whole number, for a last slot that is almost empty hides almost nothing. `wire_rows` is `num_rows` for
direct, `num_source_runs` and at most one more per slot border for scatter, and `num_slots` for pack. What is staged
takes `staging_s` on top. Where a source gathers into the target's own slots (`gathers_into_peer`), pack has no wire.

A target that receives `fan_in` times as much, from several sources at once, scatters for all of them and has one link,
or memory, for all: as the slowest stage, scatter and bytes take as many times as long, and rows `rows_fan_in` times,
but for pack, where each source writes. Gathers are made by each source for itself.

Where copies are made by the processors of both ranks, sources can write a share of what moves directly while the target
reads the rest. With `fan_out` targets that a source does that for at the same time, each side copies an equal part:
that takes `sharing_s * fan_in` on top, and of the wire `fan_out / (fan_in + fan_out)`, or `1 / num_at_once` if that is
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.plan.programs.copies import Column, Copies
from kvferry.plan.strategy.calibration import NUM_STAGES, Costs
from kvferry.plan.strategy.strategies import Strategy, source_runs


@dataclass(frozen=True, slots=True)
class Counts:
    """All that a price depends on. `num_source_runs`: pieces that are contiguous at the source alone."""

    num_bytes: int
    num_rows: int
    num_source_runs: int


class _Stage(NamedTuple):
    """The time of a stage for one source, and for all sources of a target where they are served one by one."""

    once_s: float
    all_s: float


@dataclass(frozen=True, slots=True)
class Price:
    """What one strategy would take. `num_rows` are posted (for scatter, at most; pack has slots). `shared` is the share
    that the source writes while the target reads the rest, mostly 0."""

    strategy: Strategy
    seconds: float
    num_rows: int
    shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest strategy, the prices of all three (cheapest first), and why, in one sentence for people."""

    strategy: Strategy
    predicted_s: float
    prices: tuple[Price, ...]
    reason: str


def counts_of(copies: Copies, source_starts: Column) -> Counts:
    """The numbers of some rows. `source_starts`: where the source's regions begin, as in RegionStarts."""
    return Counts(copies.num_bytes, len(copies), source_runs(copies, source_starts))


def choose(counts: Counts, costs: Costs) -> Choice:
    """The cheapest way to move rows with these numbers. Ties go to the simpler strategy."""
    found = prices(counts, costs)
    return Choice(found[0].strategy, found[0].seconds, found, _reason(counts, costs, found))


def prices(counts: Counts, costs: Costs) -> tuple[Price, ...]:
    """The prices of all three strategies, cheapest first; equal ones with the simpler strategy first."""
    return tuple(sorted((_price(strategy, counts, costs) for strategy in Strategy), key=lambda price: price.seconds))


def _price(strategy: Strategy, counts: Counts, costs: Costs) -> Price:
    if not counts.num_bytes:
        return Price(strategy, 0.0, 0)
    num_rows = _wire_rows(strategy, counts, costs)
    rows_s, bytes_s = num_rows * costs.row_s, counts.num_bytes / costs.wire_bytes_per_s
    rows_times = 1.0 if strategy.source_gathers else costs.rows_fan_in
    stages = []
    if not strategy.source_gathers or not costs.gathers_into_peer:
        stages.append(_Stage(rows_s + bytes_s, rows_s * rows_times + bytes_s * costs.fan_in))
    if strategy.source_gathers:
        gather_s = _copy_s(counts, costs, costs.gather_bytes_per_s)
        stages.append(_Stage(gather_s, gather_s))
    if strategy.is_staged:
        scatter_s = _copy_s(counts, costs, costs.scatter_bytes_per_s)
        stages.append(_Stage(scatter_s, scatter_s * costs.fan_in))
    moving_s = _overlapped_s(stages, counts, costs)
    if not strategy.is_staged:
        return _direct(num_rows, moving_s, costs)
    return Price(strategy, costs.latency_s + costs.staging_s + moving_s, num_rows)


def _direct(num_rows: int, wire_s: float, costs: Costs) -> Price:
    """The price of the faster direct way: one side moves everything, or each side a share."""
    alone_s = costs.latency_s + wire_s
    if costs.sharing_s:
        theirs = costs.fan_in / (costs.fan_in + costs.fan_out)
        ours = max(1.0 - theirs, 1.0 / costs.num_at_once)
        shared_s = costs.latency_s + costs.sharing_s * costs.fan_in + ours * wire_s
        if shared_s < alone_s:
            return Price(Strategy.DIRECT, shared_s, num_rows, theirs)
    return Price(Strategy.DIRECT, alone_s, num_rows)


def _wire_rows(strategy: Strategy, counts: Counts, costs: Costs) -> int:
    if not strategy.is_staged:
        return counts.num_rows
    num_slots = _num_slots(counts, costs)
    return num_slots if strategy.source_gathers else counts.num_source_runs + num_slots - 1


def _num_slots(counts: Counts, costs: Costs) -> int:
    return -(-counts.num_bytes // costs.slot_bytes)


def _copy_s(counts: Counts, costs: Costs, bytes_per_s: float) -> float:
    """One gather or scatter of everything, slot by slot."""
    return (
        _num_slots(counts, costs) * costs.launch_s + counts.num_rows * costs.copy_row_s + counts.num_bytes / bytes_per_s
    )


def _overlapped_s(stages: Sequence[_Stage], counts: Counts, costs: Costs) -> float:
    """The time of stages that work on different slots at a time: all of the slowest, one slot of each other; or, where
    they hold each other up, their share of all the work."""
    depth = max(1.0, counts.num_bytes / costs.slot_bytes)
    once_s = sum(stage.once_s for stage in stages)
    slowest_s = max(stage.all_s + (once_s - stage.once_s) / depth for stage in stages)
    if costs.num_at_once < NUM_STAGES:
        return max(slowest_s, once_s * costs.fan_in / costs.num_at_once)
    return slowest_s


def _reason(counts: Counts, costs: Costs, found: tuple[Price, ...]) -> str:
    """`found` is sorted: direct is compared with the runner-up, a staged winner with direct."""
    if not counts.num_bytes:
        return "direct: there is nothing to move"
    best, second = found[0], found[1]
    rows = f"{_plural(counts.num_rows, 'row')} of {_mean_text(counts)}"
    if not best.strategy.is_staged:
        instead = f"with {second.strategy} it would be {_time_text(second.seconds)}"
        return f"direct: {rows} would cost {_time_text(best.seconds)}; {instead}"
    alone = next(price.seconds for price in found if not price.strategy.is_staged)
    how = f"{_how(best.strategy, counts, costs)} it is {_time_text(best.seconds)}"
    return f"{best.strategy}: {rows} would cost {_time_text(alone)} one by one; {how}"


def _how(strategy: Strategy, counts: Counts, costs: Costs) -> str:
    slots = _plural(_num_slots(counts, costs), "slot")
    if strategy.source_gathers:
        return f"gathered into {slots}"
    return f"read as {_plural(counts.num_source_runs, 'run')} through {slots} at the target"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _mean_text(counts: Counts) -> str:
    """The size of a row; of the mean row where the rows cannot all be equal."""
    about = "about " if counts.num_bytes % counts.num_rows else ""
    return about + _size_text(counts.num_bytes / counts.num_rows)


def _size_text(size_bytes: float) -> str:
    if size_bytes < 1 << 10:
        return f"{size_bytes:.4g} bytes"
    if size_bytes < 1 << 20:
        return f"{size_bytes / (1 << 10):.4g} KiB"
    return f"{round(size_bytes / (1 << 20), 1):,g} MiB"


def _time_text(seconds: float) -> str:
    """Three digits; the limits are those at which three digits become four."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 999.5e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.2f} s"
