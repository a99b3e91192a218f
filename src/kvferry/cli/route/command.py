"""Options of `kvferry route`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from kvferry.cli.options import (
    HERE,
    AccessOptions,
    Child,
    Drain,
    Host,
    Json,
    TokenFile,
    access,
    command_of,
    common,
    output,
    times,
)
from kvferry.cli.server.logs import LogFormat

engines = partial(typer.Option, rich_help_panel="Advanced: engines")
cluster = partial(typer.Option, rich_help_panel="Advanced: Kubernetes")
choice = partial(typer.Option, rich_help_panel="Advanced: scheduling")


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Which pods of a Kubernetes cluster are engines."""

    kubernetes_selector: Annotated[str, cluster(help="Route to the pods with these labels, as they come and go.")] = ""
    kubernetes_namespace: Annotated[str, cluster(help="Namespace of the pods; default: the router's own.")] = ""
    kubernetes_role_label: Annotated[str, cluster(help="Label of a pod that says prefill or decode.")] = (
        "kvferry.io/role"
    )
    kubernetes_port: Annotated[str, cluster(help="Container port where engines serve, by name or number.")] = "http"


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Which engines to route to, how, and where to listen. All time limits are in seconds."""

    prefill: Annotated[list[str], common(help="URL of a prefill engine; repeatable.")] = field(default_factory=list)
    decode: Annotated[list[str], common(help="URL of a decode engine; repeatable.")] = field(default_factory=list)
    members_file: Annotated[str, engines(help="JSON file that lists engines; reread when it changes.")] = ""
    accept_registrations: Annotated[
        bool, common("--accept-registrations", help="Let engines join (serve --register).")
    ] = False
    pods: PodOptions = field(default_factory=PodOptions)
    token_file: TokenFile = ""
    require_prefill: Annotated[
        bool, engines("--require-prefill", help="/ready answers 503 without a prefill engine.")
    ] = False
    prefill_fallback: Annotated[
        str, engines(help="Without a prefill engine: decode computes the prompt, or refuse with 503.")
    ] = "decode"
    policy: Annotated[str, choice(help="balanced, an entry point's name, or module:function.")] = "balanced"
    skip_prefill_below: Annotated[
        str, common(help="The decode engine computes prompts of fewer tokens itself: a number, or auto.")
    ] = "0"
    early_decode_from: Annotated[
        int, choice(min=0, help="Start decode together with prefill from this prompt length on; 0: never.")
    ] = 0
    max_requests: Annotated[int, choice(min=0, help="Open requests per decode engine; 0: no limit.")] = 0
    ttft_slo: Annotated[
        float, common(min=0, help="Refuse requests (429) whose first token would take longer, in seconds; 0: never.")
    ] = 0.0
    prefill_timeout: Annotated[float, times(min=0.1, help="Until a prefill is complete.")] = 300.0
    decode_timeout: Annotated[float, times(min=0.1, help="Until an answer begins.")] = 1800.0
    stall_timeout: Annotated[float, times(min=0.1, help="Between two pieces of an answer, or of a request.")] = 120.0
    drain_timeout: Drain = 30.0
    host: Host = HERE
    port: Annotated[int, common(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000
    http_access: AccessOptions = field(default_factory=AccessOptions)
    engine_api_key: Annotated[str, access(help="API key to show to engines. Else KVFERRY_ENGINE_API_KEY.")] = field(
        default="", repr=False
    )
    log_format: Annotated[LogFormat, output(help="Format of the log on stderr.")] = LogFormat.PLAIN
    access_log: Annotated[bool, common("--access-log", help="Log every request.")] = False
    max_metric_labels: Annotated[
        int,
        output(
            min=0, help="Instances with metrics of their own; a quarter as many pairs have some. The rest is other."
        ),
    ] = 1024
    otel: Annotated[bool, output("--otel", help="Export OpenTelemetry spans; set OTEL_* variables.")] = False
    as_json: Json = False
    as_child: Child = False


@command_of(RouteOptions, "router")
def route(context: typer.Context, options: RouteOptions) -> None:
    """Start a router: an OpenAI API in front of prefill and decode engines."""
    from kvferry.cli.route import server

    server.route(options)
