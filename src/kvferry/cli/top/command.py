"""Options of `kvferry top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvferry.cli.options import Json, command_of
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TopOptions:
    """How to watch a router. With `once` or `as_json` the command prints once and ends, else it ends with Ctrl-C.

    `once` shows totals since the router started. JSON without it shows rates over one `interval`, in seconds.
    """

    url: Annotated[str, typer.Argument(help="URL of the router.")] = "http://127.0.0.1:8000"
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Print totals since the router started, and exit.")] = False
    as_json: Json = False


@command_of(TopOptions, "router")
def top(context: typer.Context, options: TopOptions) -> None:
    """Show live what a router and its engines are doing."""
    if not options.url.startswith(("http://", "https://")):
        raise ConfigurationError("invalid router URL", found=options.url, expected="such as http://127.0.0.1:8000")
    from kvferry.cli.top import watch

    watch.top(options)
