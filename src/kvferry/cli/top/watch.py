"""`kvferry top`: what a router and its engines are doing, live in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from urllib.error import HTTPError

from rich.console import Console, Group
from rich.live import Live

from kvferry.cli import console
from kvferry.cli.http_get import get
from kvferry.cli.scrape import START, Reading, reading_of
from kvferry.cli.top.command import TopOptions
from kvferry.cli.top.view import Frame, summary, view
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

TIMEOUT_S = 5.0
NOT_FOUND = 404


def top(options: TopOptions, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show it. Raises ConfigurationError when the router cannot be asked; once it was shown live, it is waited for."""
    frame = _frame(options.url, START)
    if not (options.once or options.as_json):
        _live(options, frame.now, sleep)
        return
    if not options.once:
        sleep(options.interval)
        frame = _frame(options.url, frame.now)
    if options.as_json:
        console.data(summary(frame))
    else:
        Console(markup=False, emoji=False).print(view(frame))


def _live(options: TopOptions, before: Reading, sleep: Callable[[float], None]) -> None:
    """On a screen in place; into a file or a pipe one frame after the other."""
    screen = Console(markup=False, emoji=False)
    with Live(console=screen, auto_refresh=False, screen=True) if screen.is_terminal else nullcontext() as live:
        while True:
            sleep(options.interval)
            try:
                frame = _frame(options.url, before)
                before, shown = frame.now, view(frame)
            except ConfigurationError as error:
                shown = Group(str(error))
            if live is None:
                screen.print(shown)
            else:
                live.update(shown, refresh=True)


def _frame(url: str, before: Reading) -> Frame:
    """Raises ConfigurationError when the router cannot be asked."""
    try:
        members: dict[str, Any] = json.loads(get(f"{url.rstrip('/')}/kvferry/members", TIMEOUT_S))
        if not isinstance(members, dict) or not isinstance(members.get("members"), list):
            raise ValueError("a list of members is missing")
        metrics = get(f"{url.rstrip('/')}/metrics", TIMEOUT_S).decode()
        return Frame(before, reading_of(metrics, time.monotonic()), members)
    except (OSError, ValueError) as error:
        hint = "give the URL of `kvferry route`, such as http://127.0.0.1:8000"
        is_other = isinstance(error, HTTPError) and error.code == NOT_FOUND
        what = "it is no router that answers" if is_other else "no router answers"
        raise ConfigurationError(f"{what} at {url}", found=os_error_text(error), hint=hint) from error
