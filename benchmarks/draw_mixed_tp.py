"""The figures of benchmarks/mixed_tp.py as a picture for people.

    pip install matplotlib
    python benchmarks/draw_mixed_tp.py

Writes docs/images/mixed_tp.svg. It carries a digest of the results that it was drawn from: a test compares the two.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/mixed_tp.json"
PICTURE = ROOT / "docs/images/mixed_tp.svg"

# Colours that are told apart without seeing red or green (Okabe and Ito).
LINES = {
    "sglang": ("a descriptor per token, as SGLang's default", "#d55e00", "s-"),
    "vllm": ("a descriptor per block, as vLLM's", "#e69f00", "^-"),
    "auto": ("kvferry, a whole fetch", "#0072b2", "o-"),
    "wire": ("one descriptor, as many bytes: the wire alone", "#999999", ":"),
}


class Case(NamedTuple):
    """`ranks` as in 4 to 2, `layout` of the memory, and milliseconds by name."""

    ranks: str
    layout: str
    num_tokens: int
    ms: dict[str, float]


def cases(results: dict[str, Any]) -> list[Case]:
    found = []
    for case in results["cases"]:
        named = re.fullmatch(r"(\d to \d), ([\w-]+), (\d+) tokens, .*", case["case"])
        if named is None:
            raise SystemExit(f"no case of mixed_tp.py: {case['case']}")
        found.append(Case(named[1], named[2], int(named[3]), case["ms"]))
    return found


def draw(found: list[Case]) -> None:
    layouts, ranks = (
        list(dict.fromkeys(case.layout for case in found)),
        list(dict.fromkeys(case.ranks for case in found)),
    )
    figure, grid = plt.subplots(len(layouts), len(ranks), figsize=(10, 5.2), sharex=True, sharey=True)
    for layout, row in zip(layouts, grid, strict=True):
        for each, axes in zip(ranks, row, strict=True):
            panel(axes, [case for case in found if (case.layout, case.ranks) == (layout, each)])
            axes.set_title(f"{each} ranks, {layout}", fontsize=9)
        row[0].set_ylabel("milliseconds")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))


def panel(axes: Axes, found: list[Case]) -> None:
    tokens = [case.num_tokens for case in found]
    for name, (label, colour, style) in LINES.items():
        axes.plot(tokens, [case.ms[name] for case in found], style, color=colour, label=label, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 8.5})
    written = RESULTS.read_bytes()
    draw(cases(json.loads(written)))
    PICTURE.parent.mkdir(exist_ok=True)
    drawn_from = f"sha256 of {RESULTS.name}: {hashlib.sha256(written).hexdigest()}"
    plt.savefig(PICTURE, facecolor="white", metadata={"Date": None, "Description": drawn_from})


if __name__ == "__main__":
    main()
