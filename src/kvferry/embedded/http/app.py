"""The HTTP server of one engine process, in the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry import WIRE_VERSION, __version__
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.http.responder import IS_COUNTED, Responder, caller_of, error_response
from kvferry.embedded.request.bodies import DetokenizeBody, ReleaseBody, decode_body
from kvferry.embedded.request.parse import (
    GenerationRequest,
    TokenizeRequest,
    decode_chat,
    decode_completion,
    decode_supported,
    decode_tokenize,
)
from kvferry.embedded.serving.openai_objects import ChatObjects, CompletionObjects
from kvferry.embedded.serving.service import ServeInfo, Service
from kvferry.embedded.transfer.agent_report import peers_json
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, json_response, while_connected
from kvferry.http.openai import HTTP_CODES, error_body
from kvferry.http.request_body import read_body
from kvferry.http.request_ids import id_of_refusal

Decoded = TypeVar("Decoded")

MAX_BODY_BYTES = 32 << 20
STALL_S = 60.0
"""How long a client may send nothing amid its body."""
# Routers ask who this is again when it changes.
EPOCH_HEADER = "x-kvferry-epoch"
POSTS = "/v1/completions, /v1/chat/completions, /tokenize or /detokenize"
PATHS = f"POST to {POSTS}, or GET /v1/models, /version, /health, /ready or /metrics"


class Endpoints:
    """The routes over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Responder | Response:
        decode = partial(decode_completion, max_tokens=self._service.engine.max_tokens)
        return await self._generate(request, decode, CompletionObjects())

    async def chat(self, request: Request) -> Responder | Response:
        return await self._generate(request, decode_chat, ChatObjects())

    async def _generate(
        self, request: Request, decode: Callable[[bytes], GenerationRequest], objects: CompletionObjects | ChatObjects
    ) -> Responder | Response:
        caller = caller_of(request.headers)
        ask = await self._decoded(request, decode)
        if (refusal := self._wrong_model(request, ask.model)) is not None:
            return refusal
        call = await while_connected(self._service.call(caller.request_id, ask), request.receive)
        return Responder(self._service, objects, call, caller)

    async def tokenize(self, request: Request) -> Response:
        """The tokens that a completion or a chat with this prompt computes."""
        ask = await self._decoded(request, decode_tokenize)
        if (refusal := self._wrong_model(request, ask.model)) is not None:
            return refusal
        return json_response(200, await while_connected(self._tokens(ask), request.receive))

    async def _tokens(self, ask: TokenizeRequest) -> dict[str, object]:
        prompts = self._service.prompts
        tokens = await prompts.token_ids(ask.prompt)
        return {
            "count": len(tokens),
            "max_model_len": self._service.engine.max_tokens,
            "tokens": tokens,
            "token_strs": await prompts.token_strs(tokens) if ask.return_token_strs else None,
        }

    async def detokenize(self, request: Request) -> Response:
        body = await self._decoded(request, partial(decode_supported, kind=DetokenizeBody))
        if (refusal := self._wrong_model(request, body.model)) is not None:
            return refusal
        text = await while_connected(self._service.prompts.text(tuple(body.tokens)), request.receive)
        return json_response(200, {"prompt": text})

    async def _decoded(self, request: Request, decode: Callable[[bytes], Decoded]) -> Decoded:
        """What a body asks for. Others are answered while a long one is read. Raises RequestError, ClientDisconnect,
        HTTPException."""
        body = await _body(request)
        return await while_connected(self._service.prompts.off_loop(len(body), lambda: decode(body)), request.receive)

    async def models(self, request: Request) -> Response:
        return json_response(200, {"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        return self._wrong_model(request, request.path_params["name"]) or json_response(200, self._model())

    async def version(self, request: Request) -> Response:
        return json_response(200, {"version": __version__})

    async def health(self, request: Request) -> Response:
        info, failure = self._service.info, self._service.failure
        body = {"status": "failed" if failure else "ok", "engine_id": info.engine_id, "reason": failure}
        return json_response(503 if failure else 200, body)

    async def ready(self, request: Request) -> Response:
        reason = self._service.not_ready
        body = {"status": "not ready" if reason else "ready", "reason": reason}
        return json_response(503 if reason else 200, body, {EPOCH_HEADER: self._service.info.epoch})

    async def info(self, request: Request) -> Response:
        """Who this is, for routers: they never pair engines that cannot exchange a cache."""
        info, transfer = self._service.info, self._service.transfer
        place = urlsplit(transfer.address)
        body: dict[str, object] = {
            "engine": "kvferry",
            "version": __version__,
            "wire_version": str(WIRE_VERSION),
            "engine_id": info.engine_id,
            "epoch": info.epoch,
            "models": [info.model],
            "cache": info.cache,
            "prefix_cache": False,
            "early": True,
            "meets_in_rooms": True,
            "bootstrap_host": place.hostname,
            "bootstrap_port": place.port,
            "peers": peers_json(transfer.peers),
        }
        return json_response(200, body)

    async def release(self, request: Request) -> Response:
        """Whoever was given a reference may say that nobody will fetch it."""
        params = decode_body(await _body(request), ReleaseBody).kv_transfer_params
        try:
            return json_response(200, {"released": self._service.transfer.withdraw(params)})
        except TransferError as error:
            raise RequestError("these are not the parameters of a prefill", found=str(error)) from None

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, object]:
        info = self._service.info
        return {
            "id": info.model,
            "object": "model",
            "created": info.created,
            "owned_by": "kvferry",
            "max_model_len": self._service.engine.max_tokens,
        }

    def _wrong_model(self, request: Request, name: str | None) -> Response | None:
        """Callers that name no model get the one there is."""
        served = self._service.info.model
        if name in (None, "", served):
            return None
        message = f"the model {name!r} does not exist; this engine serves {served!r}"
        body = error_body(message, "invalid_request_error", "model_not_found", "model")
        return _refused(request, 404, body)


def create_app(engine: Engine, transfer: AgentTransfer, info: ServeInfo) -> Starlette:
    """The routes of one engine. The caller starts and closes the engine; `app.state.registry` takes more metrics.

    `app.state.service` is for the caller to tell that the process is to end.
    """
    service = Service(engine, transfer, info)
    endpoints = Endpoints(service)

    async def on_ferry_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, FerryError):
            raise error
        response = error_response(error, engine.failure, _id_header(request))
        _count_refused(request, response.status_code)
        return response

    app = Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/detokenize", endpoints.detokenize, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/version", endpoints.version),
            Route("/health", endpoints.health),
            Route("/ready", endpoints.ready),
            Route("/kvferry/info", endpoints.info),
            Route("/kvferry/release", endpoints.release, methods=["POST"]),
            Route("/metrics", endpoints.metrics),
        ],
        exception_handlers={
            FerryError: on_ferry_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_defect,
        },
    )
    app.state.registry, app.state.service = service.metrics.registry, service
    return app


async def _body(request: Request) -> bytes:
    return await read_body(request, MAX_BODY_BYTES, STALL_S)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, the wrong method for it, or too much."""
    if not isinstance(error, HTTPException):
        raise error
    found, allowed = f"{request.method} {request.url.path}", (error.headers or {}).get("Allow", "")
    words = error.detail
    if error.status_code in (404, 405):
        hint = PATHS if error.status_code == 404 else ""
        words = str(RequestError(error.detail, found=found, expected=allowed, hint=hint))
    body = error_body(words, "invalid_request_error", HTTP_CODES.get(error.status_code, "http_error"), None)
    return _refused(request, error.status_code, body, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """A client that has left before it had sent its request: nobody is told."""
    _count_refused(request, CLIENT_CLOSED_REQUEST)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_defect(request: Request, error: Exception) -> Response:
    """What we did not foresee: told without details; the server logs it with all of them."""
    body = error_body("internal error", "server_error", "internal_error", None)
    return _refused(request, 500, body)


def _refused(request: Request, status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    _count_refused(request, status)
    return json_response(status, body, dict(headers or {}) | _id_header(request))


def _count_refused(request: Request, status: int) -> None:
    """Count a request whose role was not known. An answer that failed amid its work has been counted by its role."""
    if IS_COUNTED not in request.scope:
        request.app.state.service.metrics.count_request("refused", status)


def _id_header(request: Request) -> dict[str, str]:
    return {"x-request-id": id_of_refusal(request.scope["headers"])}
