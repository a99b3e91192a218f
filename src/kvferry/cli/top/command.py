"""Options of `kvferry top`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import errors_as_messages
from kvferry.cli.options import Json
from kvferry.errors import ConfigurationError


def top(
    url: Annotated[str, typer.Argument(help="URL of the router.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print totals since the router started, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show live what a router and its engines are doing."""
    with errors_as_messages("router"):
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError("invalid router URL", found=url, expected="such as http://127.0.0.1:8000")
        from kvferry.cli.top import watch

        watch.top(watch.TopOptions(url, interval, once, as_json))
