"""Options of `kvferry route`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvferry.cli.console import friendly
from kvferry.cli.logs import LogFormat
from kvferry.cli.options import HERE, Child, Drain, Host, Json, addresses, output, times

__all__ = ["route"]

engines = partial(typer.Option, rich_help_panel="Engines")
choice = partial(typer.Option, rich_help_panel="Who gets a request")


def route(
    prefill: Annotated[list[str], engines(help="URL of a prefill engine; repeat for more.")] = [],  # noqa: B006
    decode: Annotated[list[str], engines(help="URL of a decode engine; repeat for more.")] = [],  # noqa: B006
    members_file: Annotated[str, engines(help="JSON file with more engines; it may change.")] = "",
    accept_registrations: Annotated[bool, engines("--accept-registrations", help="Engines may register.")] = False,
    token_file: Annotated[str, engines(help="The token that they must share; else KVFERRY_TOKEN_FILE.")] = "",
    require_prefill: Annotated[bool, engines("--require-prefill", help="Not ready without a pair.")] = False,
    policy: Annotated[str, choice(help="balanced, an entry point's name, or module:function.")] = "balanced",
    skip_prefill_below: Annotated[str, choice(help="Tokens that decode computes itself: a number, or auto.")] = "0",
    early_decode_from: Annotated[
        int, choice(min=0, help="Decode legs of prompts with so many tokens begin with prefill; 0: none.")
    ] = 0,
    max_requests: Annotated[int, choice(min=0, help="Per decode engine at a time; 0: any number.")] = 0,
    ttft_slo: Annotated[float, times(min=0, help="Turn away what would start later; 0: never.")] = 0.0,
    prefill_timeout: Annotated[float, times(min=0.1, help="For a whole prefill.")] = 300.0,
    decode_timeout: Annotated[float, times(min=0.1, help="Until an answer begins.")] = 1800.0,
    stall_timeout: Annotated[float, times(min=0.1, help="Of silence inside an answer.")] = 120.0,
    drain_timeout: Drain = 30.0,
    host: Host = HERE,
    port: Annotated[int, addresses(min=0, max=65535, help="Port to listen on.")] = 8000,
    log_format: Annotated[LogFormat, output(help="Lines for people, or JSON for machines.")] = LogFormat.PLAIN,
    access_log: Annotated[bool, output("--access-log", help="A line per request.")] = False,
    otel: Annotated[bool, output("--otel", help="Send OpenTelemetry spans; see the OTEL_* variables.")] = False,
    as_json: Json = False,
    as_child: Child = False,
) -> None:
    """Route OpenAI requests over prefill and decode engines."""
    with friendly("router"):
        from kvferry.cli.route import server
        from kvferry.router.config import RouterConfig
        from kvferry.router.judgement import Judgement
        from kvferry.router.plugins import policy_named

        limits = server.limits_of(ttft_slo, max_requests, skip_prefill_below)
        router = RouterConfig(
            prefill_urls=tuple(prefill),
            decode_urls=tuple(decode),
            prefill_timeout_s=prefill_timeout,
            decode_timeout_s=decode_timeout,
            stall_timeout_s=stall_timeout,
            members_file=members_file,
            registration=server.registration_of(accept_registrations, token_file),
            judgement=Judgement(policy_named(policy), limits),
            require_prefill=require_prefill,
            early_from_tokens=early_decode_from,
        )
        logs = server.LogOptions(log_format, access_log, otel)
        server.route(server.RouteOptions(router, host, port, drain_timeout, as_json, as_child, logs))
