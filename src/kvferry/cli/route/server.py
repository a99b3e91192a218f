"""`kvferry route`: the router in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import gc
from contextlib import closing
from functools import partial

import uvloop

from kvferry.cli import console, environment
from kvferry.cli.route.command import PodOptions, RouteOptions
from kvferry.cli.server import http, listening
from kvferry.cli.server.logs import log_to_stderr
from kvferry.errors import ConfigurationError
from kvferry.http.access import guarded
from kvferry.http.registration import KEY_PURPOSE
from kvferry.router.config import (
    NO_REGISTRATION,
    PodSelection,
    PolicySettings,
    PrefillFallback,
    Registration,
    RouterConfig,
)
from kvferry.router.discovery.pods import check_selection
from kvferry.router.http.app import create_app
from kvferry.router.policy.plugins import policy_named
from kvferry.router.policy.records import Limits
from kvferry.router.telemetry.tracing import NO_TRACING, Tracing

# More than a hundred open streams hold, and looked through in a few milliseconds.
NUM_NEW_OBJECTS = 10_000
MAX_DIGITS = 12


def limits_of(ttft_s: float, max_requests: int, skip_below: str) -> Limits:
    """The limits of the command line. Raises ConfigurationError when `skip_below` is no number and not `auto`."""
    if skip_below != "auto" and not (skip_below.isdecimal() and len(skip_below) <= MAX_DIGITS):
        found, expected = skip_below[:80], f"a number of at most {MAX_DIGITS} digits, or auto"
        raise ConfigurationError("invalid --skip-prefill-below", found=found, expected=expected)
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
    return Registration(True, tuple(each.derived(KEY_PURPOSE) for each in token.each))


def pods_of(options: RouteOptions) -> PodSelection | None:
    """Which pods are engines; None where none is asked for. Raises ConfigurationError for what no cluster takes."""
    pods = options.pods
    if pods.kubernetes_selector:
        return check_selection(
            PodSelection(
                pods.kubernetes_selector, pods.kubernetes_namespace, pods.kubernetes_role_label, pods.kubernetes_port
            )
        )
    if pods != PodOptions():
        expected = "--kubernetes-selector as well"
        raise ConfigurationError("an option of --kubernetes-* is alone", found="no selector", expected=expected)
    return None


def config_of(options: RouteOptions) -> RouterConfig:
    """Raises ConfigurationError."""
    limits = limits_of(options.ttft_slo, options.max_requests, options.skip_prefill_below)
    return RouterConfig(
        prefill_urls=tuple(options.prefill),
        decode_urls=tuple(options.decode),
        prefill_timeout_s=options.prefill_timeout,
        decode_timeout_s=options.decode_timeout,
        stall_timeout_s=options.stall_timeout,
        members_file=options.members_file,
        registration=registration_of(options.accept_registrations, options.token_file),
        pods=pods_of(options),
        policy_settings=PolicySettings(policy_named(options.policy), limits),
        require_prefill=options.require_prefill,
        prefill_fallback=fallback_of(options.prefill_fallback),
        early_from_tokens=options.early_decode_from,
        max_metric_labels=options.max_metric_labels,
        engine_api_key=options.engine_api_key or environment.engine_api_key(),
    )


def route(options: RouteOptions) -> None:
    """Route until told to stop. Raises ConfigurationError."""
    # What is wrong with its settings is told as any command tells it, and before anything is opened.
    config, access = config_of(options), options.http_access.checked()
    log_to_stderr(options.log_format, options.access_log)
    tracing = _tracing(options.otel)
    app = create_app(config, tracing)
    served = guarded(app, access, app.turn_away)
    drain = http.Drain(
        options.drain_timeout,
        app.state.pool.drain,
        senders="clients and load balancers",
        open_work="open requests",
    )
    with (
        closing(tracing),
        listening.listen(options.host, options.port, options.stall_timeout) as bound,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(app.begin())
        url = listening.url_of(bound)
        # What is there now stays: a collector that looks at all of it again holds up every open stream for tens of ms.
        # A request that is answered leaves no cycles behind, so there is nothing to look for often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(NUM_NEW_OBJECTS)
        ends = [http.stdin_closed()] if options.as_child else []
        announce = partial(console.announce, options.as_json, f"routing at {url}/v1", url=url)
        runner.run(http.run(served, bound, ends, http.ROUTER_GRACE_S, drain, announce))


def _tracing(otel: bool) -> Tracing:
    if not otel:
        return NO_TRACING
    from kvferry.router.telemetry.opentelemetry import exporting

    return exporting()
