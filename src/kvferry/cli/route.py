"""`kvferry route`: the router in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from kvferry.cli import console, http
from kvferry.errors import ConfigurationError
from kvferry.router.app import create_app
from kvferry.router.config import RouterConfig
from kvferry.router.policy import Limits

__all__ = ["RouteOptions", "limits_of", "route"]


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Which engines to route to, where to listen, and how long open requests may go on after SIGTERM."""

    router: RouterConfig
    host: str
    port: int
    drain_s: float
    as_json: bool
    as_child: bool


def limits_of(ttft_s: float, max_requests: int, skip_below: str) -> Limits:
    """The limits of the command line. Raises ConfigurationError when `skip_below` is no number and not `auto`."""
    if skip_below != "auto" and not skip_below.isdecimal():
        raise ConfigurationError("--skip-prefill-below has no meaning", found=skip_below, expected="a number, or auto")
    below = 0 if skip_below == "auto" else int(skip_below)
    return Limits(ttft_s, max_requests, below, skip_by_cost=skip_below == "auto")


def route(options: RouteOptions) -> None:
    """Route until told to stop. Raises ConfigurationError."""
    http.log_plainly()
    with http.listen(options.host, options.port) as bound:
        url = http.url_of(bound)
        if options.as_json:
            console.data({"event": "ready", "url": url})
        else:
            console.say(f"routing at {url}/v1")
        asyncio.run(_route(options, bound))


async def _route(options: RouteOptions, bound: socket.socket) -> None:
    ends = [http.stdin_closed()] if options.as_child else []
    app = create_app(options.router)
    drain = http.Drain(options.drain_s, app.state.membership.drain)
    await http.run(app, bound, ends, http.ROUTER_GRACE_S, drain)
