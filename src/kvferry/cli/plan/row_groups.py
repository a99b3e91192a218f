"""Pairs of ranks that are alike become one row of the table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.cli.plan.page.matrix import boxes_of
from kvferry.cli.units import format_count_of

MAX_RUNS = 3


class Row:
    """Pairs that move as much, of as many heads, in the same way."""

    def __init__(self, pairs: Sequence[dict[str, Any]]) -> None:
        self.pairs = pairs
        self.first = pairs[0]

    @property
    def ranks(self) -> str:
        """The ranks of source and target, such as `0 → 0`, or `0-3 → 0-1` for several pairs."""
        sources, targets = (sorted({pair[key] for pair in self.pairs}) for key in ("source_rank", "target_rank"))
        return f"{_ranks(sources)} → {_ranks(targets)}"

    @property
    def what(self) -> list[str]:
        """Lines that say which part of each axis and which tokens move, or how much each of several pairs moves."""
        first = self.first
        if len(self.pairs) == 1:
            return [*first["boxes"]] + ([first["tokens"]] if first["tokens"] != "all" else [])
        boxes = [f"{format_count_of(last - start, axis)} each" for axis, start, last in boxes_of(first["boxes"])]
        same_tokens = len({pair["tokens"] for pair in self.pairs}) == 1
        tokens = first["tokens"] if same_tokens else "its own tokens"
        return [f"{len(self.pairs)} pairs", *boxes, *([tokens] if tokens != "all" else [])]


def rows_of(pairs: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of the table, in the order of the first pair of each."""
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for pair in pairs:
        alike.setdefault(_kind(pair), []).append(pair)
    return [Row(each) for each in alike.values()]


def _kind(pair: dict[str, Any]) -> tuple[object, ...]:
    boxes = tuple((axis, last - first) for axis, first, last in boxes_of(pair["boxes"]))
    layers = tuple(map(tuple, pair["layers"]))
    prices = tuple(pair["prices"].items())
    sizes = tuple(pair[key] for key in ("bytes", "rows_before_merge", "rows", "strategy", "states"))
    return layers, boxes, pair["tokens"] == "all", sizes, prices


def _ranks(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) > MAX_RUNS:
        return f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
