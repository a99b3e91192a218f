"""A simulated fleet as one self-contained page: the facts of `kvferry simulate fleet --json` in, HTML text out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

from kvferry.cli.simulate.page.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, bands_of, charts_of, seconds_of
from kvferry.cli.simulate.table import lines_of, recovery_words, time_words, ttft_words, unfinished_lines
from kvferry.cli.units import format_bytes

BOX = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "width": WIDTH, "height": HEIGHT}


def page(facts: Mapping[str, Any]) -> str:
    """The page of one run. It refers to nothing outside itself and has no script."""
    environment = _environment()
    loader = environment.loader
    style = loader.get_source(environment, "plan/page.css")[0] if loader else ""
    return environment.get_template("simulate/page.html.j2").render(
        run=facts,
        style=Markup(style),
        box=BOX,
        charts=charts_of(facts),
        bands=bands_of(facts),
        seconds=seconds_of(facts),
        unfinished=unfinished_lines(facts),
        last_line=lines_of(facts)[-1],
    )


@cache
def _environment() -> Environment:
    # The words of incidents and names of files come from users: nothing reaches the page unescaped.
    folders = {name: PackageLoader(f"kvferry.cli.{name}.page", "") for name in ("plan", "simulate")}
    environment = Environment(
        loader=PrefixLoader(folders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["size"] = format_bytes
    environment.filters["time"] = time_words
    environment.globals |= {"recovery_words": recovery_words, "ttft_words": ttft_words}
    return environment
