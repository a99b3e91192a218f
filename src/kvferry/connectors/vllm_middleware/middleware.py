"""`FerryMiddleware`, for vLLM's HTTP server: releases, who this is, early prefills, and how an answer's cache came."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry import WIRE_VERSION, Reason
from kvferry.connectors.vllm_middleware.buffered_request import BufferedRequest
from kvferry.connectors.vllm_middleware.early import early_prefill
from kvferry.connectors.vllm_middleware.request_names import ANSWER_PATHS, named, names_of
from kvferry.connectors.vllm_middleware.responses import Delivery, EarlyResponse, HeldResponse
from kvferry.connectors.vllm_middleware.worker_reports import (
    FETCH_OUTCOMES,
    PREFILL_STARTS,
    FetchOutcomes,
    PrefillStarts,
)
from kvferry.connectors.vllm_middleware.workers import AsleepError, Workers, is_draining, num_replicas
from kvferry.errors import ConfigurationError, FerryError, RequestError, TransferError
from kvferry.http.anthropic import error_for
from kvferry.http.asgi import json_response
from kvferry.http.openai import error_body, error_of
from kvferry.kv_transfer_params import Reach, from_params

logger = logging.getLogger(__name__)

RELEASE, INFO, READY = ("POST", "/kvferry/release"), ("GET", "/kvferry/info"), ("GET", "/ready")
SLEEP_PATHS = frozenset(("/sleep", "/wake_up", "/release_kv_cache_memory", "/collective_rpc"))
MAX_RELEASE_BYTES = 1 << 20
MAX_BODY_BYTES = 16 << 20
DRAINING = "this engine is draining; hint: send the request to another engine"


class _Release(msgspec.Struct):
    """The body of a release: a prefill's parameters, which nobody will use."""

    kv_transfer_params: dict[str, object]


class FerryMiddleware:
    """ASGI middleware, which vLLM makes around its app. Requests that do not concern kvferry pass unchanged."""

    def __init__(
        self, app: ASGIApp, outcomes: FetchOutcomes = FETCH_OUTCOMES, starts: PrefillStarts = PREFILL_STARTS
    ) -> None:
        self._app = app
        self._outcomes = outcomes
        self._starts = starts
        self._workers = Workers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        call = (scope["method"], path)
        if call in (RELEASE, INFO):
            response = await self._answered(call, scope, receive)
            await response(scope, receive, send)
        elif call == READY or path in ANSWER_PATHS:
            await self._pass_unless_draining(path, scope, receive, send)
        elif path in SLEEP_PATHS:
            await self._pass_to_sleep(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass_to_sleep(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that has the engine sleep or wake up: whoever asks from then on is told anew who it is."""
        self._workers.forget()
        try:
            await self._app(scope, receive, send)
        finally:
            # Meanwhile somebody may have asked before it slept.
            self._workers.forget()

    async def _pass_unless_draining(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it while vLLM drains, which still seems healthy but answers with nothing."""
        if is_draining(scope["app"].state):
            body = error_body(DRAINING, "server_error", "draining", None)
            told = {**error_for(path, body), "status": "not ready", "reason": "it is draining"}
            response = json_response(503, told)
            await response(scope, receive, send)
        elif path == READY[1]:
            health = scope.get("root_path", "") + "/health"
            await self._app({**scope, "path": health, "raw_path": health.encode()}, receive, send)
        else:
            await self._pass(path, await BufferedRequest.read(scope, receive, MAX_BODY_BYTES), send)

    async def _pass(self, path: str, request: BufferedRequest, send: Send) -> None:
        """Pass on a request for an answer, after finding out whether it asks for an early prefill."""
        try:
            early = await self._early(path, request, send)
        except FerryError as error:
            await _refusal(error)(request.scope, request.receive, send)
            return
        if early is not None:
            await self._respond(request, early)
        else:
            await self._pass_other(path, request, send)

    async def _early(self, path: str, request: BufferedRequest, send: Send) -> EarlyResponse | None:
        """The response to an early prefill, if the request is one. Raises FerryError.

        Nothing else of the request is kept: an answer may take long, and a prompt be large.
        """
        early = early_prefill(path, request.body)
        if early is None:
            return None
        facts = await self._workers.early(request.scope["app"].state)
        request.replace(early.body(facts))
        return EarlyResponse(self._starts, early.name, early.first_event(facts), send)

    async def _pass_other(self, path: str, request: BufferedRequest, send: Send) -> None:
        header_id = Headers(scope=request.scope).get("x-request-id")
        body = named(path, header_id, request.body)
        if body is not request.body:
            request.replace(body)
        names = names_of(path, header_id, body)
        delivery = Delivery(request.receive, send)
        out = delivery.send if names.prefill_names else send
        try:
            await self._respond(request, HeldResponse(path, self._outcomes, names.decode_names, names.is_local, out))
        finally:
            if names.prefill_names and not delivery.is_done:
                await self._withdraw_leases(request.scope["app"].state, names.prefill_names)

    async def _respond(self, request: BufferedRequest, response: EarlyResponse | HeldResponse) -> None:
        try:
            await self._app(request.scope, request.receive, response.send)
        except Exception:
            if not await response.explains_failure():
                raise
        finally:
            response.close()

    async def _withdraw_leases(self, state: Any, names: Sequence[str]) -> None:
        """End the leases of a prefill that has failed or whose client has left, perhaps after its prompts were
        computed: nobody else will end them."""
        try:
            await self._workers.withdraw_leases(state, names)
        except FerryError as error:
            logger.debug("request %s: its cache is kept until its lease ends: %s", names[0], error)

    async def _answered(self, call: tuple[str, str], scope: Scope, receive: Receive) -> Response:
        try:
            return json_response(200, await (self._release(scope, receive) if call == RELEASE else self._info(scope)))
        except FerryError as error:
            return _refusal(error)

    async def _release(self, scope: Scope, receive: Receive) -> dict[str, object]:
        """End a lease. Whoever was given a reference may say that nobody will fetch it. Raises FerryError."""
        request = await BufferedRequest.read(scope, receive, MAX_RELEASE_BYTES)
        if not request.body:
            what = "the request body is empty or too large"
            raise RequestError(what, expected=f"at most {MAX_RELEASE_BYTES} bytes")
        try:
            params = msgspec.json.decode(request.body, type=_Release).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError("invalid request body", found=str(error)) from None
        # Where the source may be reached does not matter: it is here.
        reference = from_params(params, Reach.ANY_HOST).reference
        return {"released": await self._workers.release(scope["app"].state, reference)}

    async def _info(self, scope: Scope) -> dict[str, object]:
        """Who this is, for routers: they never pair engines that cannot exchange a cache."""
        state = scope["app"].state
        facts = await self._workers.facts(state)
        models = await state.openai_serving_models.show_available_models()
        return {
            "engine": "vllm",
            "version": facts["version"],
            "wire_version": str(WIRE_VERSION),
            "engine_id": facts["engine_id"],
            "epoch": facts["epoch"],
            "models": [model.id for model in models.data],
            "cache": facts["cache"],
            "prefix_cache": bool(state.engine_client.vllm_config.cache_config.enable_prefix_caching),
            "early": bool(facts.get("early")) and num_replicas(state) == 1,
            **self._meeting_place(state, facts),
        }

    def _meeting_place(self, state: Any, facts: Mapping[str, str]) -> dict[str, object]:
        """The address for rooms. Several replicas have none and only decode there, since any may compute a prompt."""
        place = urlsplit(facts.get("address", "") if num_replicas(state) == 1 else "")
        return {"meets_in_rooms": True, "bootstrap_host": place.hostname or "", "bootstrap_port": place.port or 0}


def _refusal(error: FerryError) -> Response:
    match error:
        case AsleepError():
            # It is not for ever: whoever knows the engine goes on knowing it.
            return json_response(503, error_body(str(error), "server_error", "asleep", None))
        case ConfigurationError():
            return json_response(501, error_body(str(error), "server_error", "not_available", None))
        case TransferError():
            # The error is not about a cache that did not come, but about the parameters that were sent.
            status = 400 if error.reason == Reason.MALFORMED else 404
            return json_response(status, error_body(str(error), "invalid_request_error", error.reason, None))
        case _:
            return json_response(*error_of(error))
