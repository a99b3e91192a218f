"""`kvferry top`: what a router and its engines are doing, live in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live

from kvferry.cli import console
from kvferry.cli.scrape import Look, look_at
from kvferry.cli.top_view import Frame, summary, view
from kvferry.errors import ConfigurationError

__all__ = ["TopOptions", "top"]

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Which router, how often, and how many times (0: until Ctrl-C)."""

    url: str
    interval_s: float
    num_frames: int
    as_json: bool


def top(options: TopOptions, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show it. Raises ConfigurationError when the router cannot be asked at the start; later it is waited for."""
    before = _look(options.url)
    if options.as_json:
        sleep(options.interval_s)
        frame = Frame(before, _look(options.url), _members(options.url))
        console.data(summary(frame))
        return
    shown = 0
    with Live(console=Console(), auto_refresh=False, screen=not options.num_frames) as live:
        while not options.num_frames or shown < options.num_frames:
            sleep(options.interval_s)
            try:
                now, members = _look(options.url), _members(options.url)
            except ConfigurationError as error:
                live.update(str(error), refresh=True)
                shown += 1
                continue
            live.update(view(Frame(before, now, members)), refresh=True)
            before, shown = now, shown + 1


def _look(url: str) -> Look:
    return look_at(_get(url, "/metrics").decode(), time.monotonic())


def _members(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_get(url, "/kvferry/members"))
    return found


def _get(url: str, path: str) -> bytes:
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except (OSError, ValueError) as error:
        hint = "give the URL of `kvferry route`, such as http://127.0.0.1:8000"
        raise ConfigurationError(f"no router answers at {url}", found=str(error), hint=hint) from error
