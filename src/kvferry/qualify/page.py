"""A report as one HTML page that needs nothing else, with the report itself in it. Pure."""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvferry.qualify.outcome import Figure
from kvferry.qualify.verdict import Report

BAR_PIXELS: Final = 200
FULL: Final = 1.25
"""The share at the end of a bar."""


def page(report: Report) -> str:
    """The verdict, what was checked, figures beside what is expected, what the machine is, and the report as JSON."""
    figures = [figure for outcome in report.outcomes for figure in outcome.figures]
    text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    return _template().render(report=report, figures=figures, bar=_bar, text=text, end=BAR_PIXELS)


def _bar(figure: Figure) -> tuple[float, float]:
    """How long its bar is, and where the mark of what is expected stands; 0 for none."""
    return _pixels(figure.share), _pixels(figure.expected)


def _pixels(share: float) -> float:
    return round(min(share, FULL) / FULL * BAR_PIXELS, 1)


@cache
def _template() -> Template:
    # Errors of libraries are texts of others: nothing reaches the page unescaped.
    loader = PackageLoader("kvferry.qualify", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2")
