"""The router as an ASGI app: its routes, what it owns, and what becomes of each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvferry import __version__
from kvferry.errors import FerryError
from kvferry.http.access import INVALID_KEY, UNAUTHORIZED
from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, json_response
from kvferry.http.registration import MEMBERS_PATH
from kvferry.http.request_body import read_body
from kvferry.router.config import RouterConfig
from kvferry.router.discovery.members_file import MembersFile
from kvferry.router.discovery.registry import Registry
from kvferry.router.discovery.section import Section
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.probes import Prober
from kvferry.router.flow.client import Client
from kvferry.router.flow.driver import BROKEN_OFF, Driver
from kvferry.router.http.errors import (
    BEGAN_S,
    IS_SERVED,
    on_defect,
    on_ferry_error,
    on_http_error,
    tell_ended,
    tell_left,
    tell_refusal,
)
from kvferry.router.http.models import find_model, list_models
from kvferry.router.http.status import readiness, status_of
from kvferry.router.http.tokenize import TokenizerPath, ask
from kvferry.router.request.client_request import Call, Endpoint, parse_request
from kvferry.router.request.headers import prefill_headers, request_id_of, timeout_of
from kvferry.router.request.prompt_cost import cost_of
from kvferry.router.services import Services
from kvferry.router.telemetry.access_log import NO_PATH
from kvferry.router.telemetry.metrics import Metrics
from kvferry.router.telemetry.scrapes import Scrapes
from kvferry.router.telemetry.tracing import NO_TRACING, Tracing
from kvferry.router.upstream.http_client import HttpClient, HttpRequest

if TYPE_CHECKING:
    from kvferry.router.discovery.pod_watch import PodWatch

logger = logging.getLogger(__name__)

MAX_ANNOUNCEMENT_BYTES = 4096


def create_app(config: RouterConfig, tracing: Tracing = NO_TRACING) -> RouterApp:
    """The router for these instances. Its lifespan owns the connections and the health probe."""
    metrics = Metrics(config.max_metric_labels)
    pool = InstancePool(config.instances, metrics, config.policy_settings)
    files = [MembersFile(path, pool, config.probe_interval_s) for path in (config.members_file,) if path]
    for file in files:
        file.look()
    pods = _pod_watch(config, pool)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aclosing(HttpClient(config.connect_timeout_s, config.engine_api_key)) as http:
            app.state.services = Services(config, pool, metrics, http, tracing)
            async with _following(pool, Prober(http, pool, config), files, pods):
                yield

    handlers = {HTTPException: on_http_error, FerryError: on_ferry_error, Exception: on_defect}
    app = Starlette(routes=_routes(), lifespan=lifespan, exception_handlers=handlers)
    # `/v1/completions/` would be answered with a redirection, at which clients lose the body.
    app.router.redirect_slashes = False
    app.state.pool, app.state.metrics, app.state.config = pool, metrics, config
    app.state.registry = Registry(config, pool, metrics)
    app.state.scrapes = Scrapes(metrics, partial(_show, pool, metrics, config))
    return RouterApp(app, pods)


def _routes() -> list[Route]:
    return [
        *(Route(endpoint, Generate(endpoint), methods=["POST"]) for endpoint in Endpoint),
        *(Route(path, tokenizer, methods=["POST"]) for path in TokenizerPath),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", models, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route(MEMBERS_PATH, show_members, methods=["GET"]),
        Route(MEMBERS_PATH, take_member, methods=["POST"]),
    ]


@asynccontextmanager
async def _following(
    pool: InstancePool, prober: Prober, files: list[MembersFile], pods: list[PodWatch]
) -> AsyncIterator[None]:
    """Probe all instances, and then keep the pool up to date. Raises ConfigurationError."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        for watch in pods:
            await watch.begin()
        await prober.probe_all()
        for run in (prober.run(), *(file.run() for file in files), *(watch.run() for watch in pods)):
            tasks.add(task := asyncio.create_task(run))
            task.add_done_callback(partial(_ended, pool))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watch in pods:
            await watch.aclose()


def _show(pool: InstancePool, metrics: Metrics, config: RouterConfig) -> None:
    """Set the metrics whose values are only known when somebody asks."""
    metrics.router_ready.set(readiness(pool, config.needs_pair)[0] == 200)
    pool.show()


def _ended(pool: InstancePool, task: asyncio.Task[None]) -> None:
    """Drain the router if a task that should run for ever has failed: it would go on with what it knew then."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("a task of the router has ended: it asks to be replaced", exc_info=error)
        pool.drain()


def _pod_watch(config: RouterConfig, pool: InstancePool) -> list[PodWatch]:
    """The watch of pods, if any are selected. Raises MissingExtraError without the Kubernetes client it needs."""
    if config.pods is None:
        return []
    from kvferry.router.discovery.pod_watch import PodWatch

    return [PodWatch(config.pods, Section(pool, Origin.KUBERNETES))]


class RouterApp:
    """The ASGI app. Requests that generate take a short way past the framework, which costs as much as their flow.

    Everything else, and whatever has another method, is the framework's; `state` is what all of them share.
    """

    def __init__(self, framework: Starlette, pods: list[PodWatch]) -> None:
        self.state = framework.state
        self._pods = pods
        self._framework = framework
        self._generating = {str(one): ServerErrorMiddleware(Generate(one), handler=on_defect) for one in Endpoint}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        generate = self._generating.get(scope["path"]) if is_post else None
        if generate is None:
            await self._framework(scope, receive, send)
            return
        scope["app"], scope[BEGAN_S] = self, time.monotonic()
        await generate(scope, receive, send)

    async def begin(self) -> None:
        """Ask what the router depends on, on the loop where it will serve; its lifespan ends what this has opened.
        Raises ConfigurationError; without this, the lifespan fails with the same."""
        for watch in self._pods:
            await watch.begin()

    def turn_away(self, scope: Scope, request_id: str) -> None:
        """Count a request that was refused for its API key before it came here."""
        is_generating = scope["method"] == "POST" and scope["path"] in self._generating
        began = {BEGAN_S: time.monotonic()} if is_generating else {}
        tell_refusal(self.state.metrics, {**scope, **began}, request_id, UNAUTHORIZED, INVALID_KEY)


class Generate:
    """The ASGI app of one generating endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            call = await self._call(http)
            stall_s = http.app.state.config.stall_timeout_s
            await self._serve(http, call, Client(receive, send, stall_s, call.deadline_s))
        except ClientDisconnect:
            tell_left(http)
        except asyncio.CancelledError:
            tell_ended(http)
            raise
        except HTTPException as error:
            await (await on_http_error(http, error))(scope, receive, send)
        except FerryError as error:
            await (await on_ferry_error(http, error))(scope, receive, send)

    async def _call(self, http: Request) -> Call:
        """What the client wants. Raises HTTPException, RequestError or ClientDisconnect."""
        started_s = time.monotonic()
        headers = http.scope["headers"]
        request_id = request_id_of(headers)
        deadline_s = started_s + timeout_of(headers)
        config = http.app.state.config
        body = await read_body(http, config.max_body_bytes, config.stall_timeout_s, deadline_s)
        request, target = parse_request(body, self._endpoint), _target(self._endpoint, http)
        return Call(target, headers, request_id, request, cost_of(request), started_s, deadline_s)

    async def _serve(self, http: Request, call: Call, client: Client) -> None:
        services: Services = http.app.state.services
        driver = Driver(services, call, client)
        http.scope[IS_SERVED] = True
        try:
            await driver.run()
        except Exception:
            # A defect, of which the client is told further out; a client that has left is not told.
            if client.status == CLIENT_CLOSED_REQUEST and not client.has_left:
                client.status = 500
            raise
        except asyncio.CancelledError:
            # The router ends. Its server tells the client so: with 503, or at the end of what has begun.
            if not client.has_left:
                client.status = 503 if client.status == CLIENT_CLOSED_REQUEST else BROKEN_OFF
            raise
        finally:
            services.metrics.requests.labels(self._endpoint, driver.path, client.status).inc()
            driver.close(self._endpoint)


async def _unsent(_: Message) -> None:
    """Send nothing."""


async def tokenizer(http: Request) -> Response:
    """Have one engine answer a request about tokens, and pass its answer on."""
    path, headers = TokenizerPath(http.scope["path"]), http.scope["headers"]
    began_s, state = time.monotonic(), http.app.state
    request_id, deadline_s = request_id_of(headers), began_s + timeout_of(headers)
    try:
        body = await read_body(http, state.config.max_body_bytes, state.config.stall_timeout_s, deadline_s)
        request = HttpRequest("POST", "", _target(path, http), prefill_headers(headers, request_id), body)
        asked = partial(ask, state.services, request, deadline_s)
        # The framework sends the answer.
        answer = await Client(http.receive, _unsent).unless_left(asked, 0.0)
    except ClientDisconnect:
        tell_left(http)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except asyncio.CancelledError:
        tell_ended(http)
        raise
    status = CLIENT_CLOSED_REQUEST if answer is None else answer.status
    state.metrics.requests.labels(path, NO_PATH, status).inc()
    if answer is None:
        return Response(status_code=status)
    response = Response(answer.body, status)
    response.raw_headers = [*answer.headers, (b"x-request-id", request_id.encode())]
    return response


async def models(http: Request) -> Response:
    """Answer with all models, or the one that the path names."""
    services = http.app.state.services
    headers = prefill_headers(http.scope["headers"], request_id_of(http.scope["headers"]))
    if "name" in http.path_params:
        return json_response(*await find_model(services, "/v1/models", headers, http.path_params["name"]))
    return json_response(*await list_models(services, _target("/v1/models", http), headers))


async def version(http: Request) -> Response:
    """Answer with the version of the router: its engines may have several."""
    return json_response(200, {"version": __version__})


async def health(http: Request) -> Response:
    return json_response(200, {"status": "ok"})


async def ready(http: Request) -> Response:
    return json_response(*readiness(http.app.state.pool, http.app.state.config.needs_pair))


async def show_members(http: Request) -> Response:
    return json_response(200, status_of(http.app.state.pool))


async def take_member(http: Request) -> Response:
    """An engine registers itself, renews that, or leaves."""
    try:
        body = await read_body(http, MAX_ANNOUNCEMENT_BYTES, http.app.state.config.stall_timeout_s)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    host = http.client.host if http.client else ""
    return json_response(*http.app.state.registry.take(body, dict(http.headers), host))


async def show_metrics(http: Request) -> Response:
    return Response(await http.app.state.scrapes.text(), media_type=CONTENT_TYPE_LATEST)


def _target(path: str, http: Request) -> str:
    """A path that the router knows, with the client's query. The client's own path may differ in its encoded bytes."""
    query = http.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path
