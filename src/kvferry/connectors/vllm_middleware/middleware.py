"""`FerryMiddleware`, for vLLM's HTTP server: releases, who this is, early legs, and how the cache of an answer came."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvferry import WIRE_VERSION, Reason
from kvferry.connectors.vllm_middleware.asgi import (
    App,
    Message,
    Opened,
    Receive,
    Scope,
    Send,
    answer_json,
    body_of,
    header,
)
from kvferry.connectors.vllm_middleware.early import early_leg
from kvferry.connectors.vllm_middleware.held_response import Delivery, EarlyPassage, Passage
from kvferry.connectors.vllm_middleware.legs import ANSWER_PATHS, is_local, leg_name, prefill_name
from kvferry.connectors.vllm_middleware.prefill_starts import BEGINNINGS, Beginnings
from kvferry.connectors.vllm_middleware.transfer_reports import ARRIVALS, Arrivals
from kvferry.connectors.vllm_middleware.workers import Workers, is_draining, num_replicas
from kvferry.errors import ConfigurationError, FerryError, RequestError, TransferError
from kvferry.http.openai import error_body, error_of
from kvferry.kv_transfer_params import Reach, from_params

logger = logging.getLogger(__name__)

RELEASE, INFO, READY = ("POST", "/kvferry/release"), ("GET", "/kvferry/info"), ("GET", "/ready")
MAX_RELEASE_BYTES = 1 << 20
MAX_BODY_BYTES = 16 << 20
REQUEST_ID = b"x-request-id"
OF_LENGTH = frozenset((b"content-length", b"transfer-encoding"))


class _Release(msgspec.Struct):
    """The body of a release: a prefill's parameters, which nobody will use."""

    kv_transfer_params: dict[str, object]


class FerryMiddleware:
    """ASGI middleware, which vLLM makes around its app. What is none of our own paths is passed on as it is."""

    def __init__(self, app: App, arrivals: Arrivals = ARRIVALS, beginnings: Beginnings = BEGINNINGS) -> None:
        self._app = app
        self._arrivals = arrivals
        self._beginnings = beginnings
        self._workers = Workers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        call = (scope["method"], path)
        if call in (RELEASE, INFO):
            status, body = await self._answered(call, scope, receive)
            await answer_json(send, status, body)
        elif call == READY or path in ANSWER_PATHS:
            await self._pass_unless_draining(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass_unless_draining(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """While it ends, vLLM goes on listening, says that it is healthy, and answers new requests with nothing."""
        if is_draining(scope["app"].state):
            body = error_body(
                "this engine is draining; hint: send the request to another engine", "server_error", "draining", None
            )
            await answer_json(send, 503, body | {"status": "not ready", "reason": "it is draining"})
        elif path == READY[1]:
            health = scope.get("root_path", "") + "/health"
            await self._app({**scope, "path": health, "raw_path": health.encode()}, receive, send)
        else:
            await self._pass(path, scope, receive, send)

    async def _pass(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """What is asked for is known before vLLM knows it."""
        opened = await Opened.read(receive, MAX_BODY_BYTES)
        try:
            promises = await self._promised(path, scope, opened)
        except FerryError as error:
            await answer_json(send, *_refusal(error))
            return
        for name, first_event in promises:
            passage = EarlyPassage(self._beginnings, name, first_event, send)
            try:
                await self._app(_of_length(scope, len(opened.body)), opened.receive, passage.send)
            finally:
                passage.close()
        if not promises:
            await self._pass_other(path, scope, opened, send)

    async def _promised(self, path: str, scope: Scope, opened: Opened) -> list[tuple[str, Message]]:
        """The name and the first event of what an early leg is promised, if it is one. Raises FerryError.

        Nothing else of it is kept: an answer may take long, and a prompt be large.
        """
        early = early_leg(path, opened.body)
        if early is None:
            return []
        facts = await self._workers.early(scope["app"].state)
        opened.replace(early.body(facts))
        return [(early.name, early.first_event(facts))]

    async def _pass_other(self, path: str, scope: Scope, opened: Opened, send: Send) -> None:
        caller_id = header(scope["headers"], REQUEST_ID)
        prefill = prefill_name(path, caller_id, opened.body)
        delivery = Delivery(opened.receive, send)
        out = delivery.send if prefill else send
        passage = Passage(self._arrivals, leg_name(path, caller_id, opened.body), is_local(opened.body), out)
        try:
            await self._app(scope, opened.receive, passage.send)
        finally:
            passage.close()
            if prefill and not delivery.is_done:
                await self._forsake(scope["app"].state, prefill)

    async def _forsake(self, state: Any, name: str) -> None:
        """A prefill has failed, or its client has left, perhaps after its prompt was computed: nobody else will end the
        lease on its cache."""
        try:
            await self._workers.forsake(state, name)
        except FerryError as error:
            logger.debug("request %s: its cache is kept until its lease ends: %s", name, error)

    async def _answered(self, call: tuple[str, str], scope: Scope, receive: Receive) -> tuple[int, object]:
        try:
            return 200, await (self._release(scope, receive) if call == RELEASE else self._info(scope))
        except FerryError as error:
            return _refusal(error)

    async def _release(self, scope: Scope, receive: Receive) -> dict[str, object]:
        """Whoever was given a reference may say that nobody will fetch it."""
        body = await body_of(receive, MAX_RELEASE_BYTES)
        try:
            params = msgspec.json.decode(body, type=_Release).kv_transfer_params
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
        }


def _of_length(scope: Scope, size_bytes: int) -> Scope:
    """The same request with a body of another length."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in OF_LENGTH]
    return {**scope, "headers": [*headers, (b"content-length", str(size_bytes).encode())]}


def _refusal(error: FerryError) -> tuple[int, dict[str, object]]:
    match error:
        case ConfigurationError():
            return 501, error_body(str(error), "server_error", "not_available", None)
        case TransferError():
            # Not of a cache that did not come, but of the parameters that were sent.
            status = 400 if error.reason == Reason.MALFORMED else 404
            return status, error_body(str(error), "invalid_request_error", error.reason, None)
        case _:
            return error_of(error)
