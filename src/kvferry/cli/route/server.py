"""`kvferry route`: the router in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import gc
import socket
from dataclasses import dataclass

import uvloop

from kvferry.cli import console, environment
from kvferry.cli.server import http, listening
from kvferry.cli.server.logs import LogFormat, log_to_stderr
from kvferry.errors import ConfigurationError
from kvferry.http.access import Access, guarded
from kvferry.http.registration import KEY_PURPOSE
from kvferry.router.config import NO_REGISTRATION, Registration, RouterConfig
from kvferry.router.http.app import RouterApp, create_app
from kvferry.router.policy.records import Limits
from kvferry.router.policy.settings import PrefillFallback
from kvferry.router.telemetry.tracing import NO_TRACING, Tracing

# More than a hundred open streams hold, and looked through in a few milliseconds.
NUM_NEW_OBJECTS = 10_000


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is written about requests: lines of a format, one per request if `access`, and spans if `otel`."""

    format: LogFormat = LogFormat.PLAIN
    access: bool = False
    otel: bool = False


DEFAULT_LOGS = LogOptions()
EVERYBODY = Access()


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Which engines to route to, where to listen, and how long open requests may go on after SIGTERM."""

    router: RouterConfig
    host: str
    port: int
    drain_s: float
    as_json: bool
    as_child: bool
    logs: LogOptions = DEFAULT_LOGS
    access: Access = EVERYBODY


def limits_of(ttft_s: float, max_requests: int, skip_below: str) -> Limits:
    """The limits of the command line. Raises ConfigurationError when `skip_below` is no number and not `auto`."""
    if skip_below != "auto" and not skip_below.isdecimal():
        raise ConfigurationError("invalid --skip-prefill-below", found=skip_below, expected="a number, or auto")
    below = 0 if skip_below == "auto" else int(skip_below)
    return Limits(ttft_s, max_requests, below, skip_by_cost=skip_below == "auto")


def fallback_of(name: str) -> PrefillFallback:
    """What happens without a prefill engine. Raises ConfigurationError."""
    if name not in tuple(PrefillFallback):
        expected = " or ".join(PrefillFallback)
        raise ConfigurationError("invalid --prefill-fallback", found=name, expected=expected)
    return PrefillFallback(name)


def registration_of(is_open: bool, token_file: str) -> Registration:
    """Who may register. Raises ConfigurationError for a token that cannot be used, or that nobody would show."""
    if not is_open and token_file:
        expected = "--accept-registrations as well"
        raise ConfigurationError("--token-file needs --accept-registrations", found=token_file, expected=expected)
    if not is_open:
        return NO_REGISTRATION
    # Not at the top: a router that has no use for a token does without the transfer agent's libraries.
    from kvferry.agent.control.shared_token import read_token

    token = read_token(token_file or environment.token_file())
    return Registration(True, token.derived(KEY_PURPOSE) if token else b"")


def route(options: RouteOptions) -> None:
    """Route until told to stop. Raises ConfigurationError."""
    log_to_stderr(options.logs.format, options.logs.access)
    tracing = _tracing(options.logs.otel)
    # What is wrong with its settings is told before anybody takes it for ready.
    app = create_app(options.router, tracing)
    with listening.listen(options.host, options.port) as bound:
        url = listening.url_of(bound)
        if options.as_json:
            console.data({"event": "ready", "url": url})
        else:
            console.say(f"routing at {url}/v1")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_route(options, app, bound, tracing))


def _tracing(otel: bool) -> Tracing:
    if not otel:
        return NO_TRACING
    from kvferry.router.telemetry.opentelemetry import exporting

    return exporting()


async def _route(options: RouteOptions, app: RouterApp, bound: socket.socket, tracing: Tracing) -> None:
    ends = [http.stdin_closed()] if options.as_child else []
    drain = http.Drain(
        options.drain_s, app.state.membership.drain, senders="clients and load balancers", open_work="open requests"
    )
    # What is there now stays: a collector that looks at all of it again holds up every open stream for tens of ms. A
    # request that is answered leaves no cycles behind, so there is nothing to look for often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS)
    try:
        await http.run(guarded(app, options.access, app.turn_away), bound, ends, http.ROUTER_GRACE_S, drain)
    finally:
        tracing.close()
