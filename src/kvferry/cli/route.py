"""`kvferry route`: the router in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from kvferry.cli import console, http
from kvferry.router.app import create_app
from kvferry.router.config import RouterConfig

__all__ = ["RouteOptions", "route"]


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Which engines to route to, where to listen, and how long open requests may go on after SIGTERM."""

    router: RouterConfig
    host: str
    port: int
    drain_s: float
    as_json: bool
    as_child: bool


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
