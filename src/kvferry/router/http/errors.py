"""What is answered when a request does not get as far as a flow."""

from __future__ import annotations

import logging
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvferry.errors import FerryError
from kvferry.http.anthropic import error_for
from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, json_response
from kvferry.http.openai import HTTP_CODES, INVALID_REQUEST, SERVER_ERROR, error_body, error_of
from kvferry.http.request_ids import id_of_refusal
from kvferry.router.answers.refusals import too_late
from kvferry.router.events import TOO_LATE, Failed
from kvferry.router.http.tokenize import TokenizerPath
from kvferry.router.request.client_request import Endpoint
from kvferry.router.telemetry.access_log import NO_PATH, AccessLogEntry
from kvferry.router.telemetry.metrics import Metrics
from kvferry.router.upstream.failures import MESSAGES

logger = logging.getLogger(__name__)

# When a request came to the router, in its scope.
BEGAN_S = "kvferry.began_s"
# Whether a driver serves a request, in its scope: the driver counts it, and writes its entry in the access log.
IS_SERVED = "kvferry.is_served"
OTHERS = "/v1/models, /version, /health, /ready or /metrics"


async def on_http_error(http: Request, error: Exception) -> Response:
    """404, 405, 408, 413, 504: an OpenAI error object where the framework would send text."""
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    if error.status_code == 504:
        return _refuse(http, 504, too_late(Failed(TOO_LATE, MESSAGES[TOO_LATE])).body, headers)
    if error.status_code == 404:
        message = f"unknown path {http.url.path}; hint: {_hint(http.url.path)}"
    elif error.status_code == 405:
        allowed = headers.get("Allow", "other methods")
        message = f"{http.url.path} does not take {http.method}; expected: {allowed}"
    else:
        message = error.detail
    code = HTTP_CODES.get(error.status_code, "http_error")
    body = error_body(message, INVALID_REQUEST, code, None)
    return _refuse(http, error.status_code, body, headers)


def _hint(path: str) -> str:
    if path.startswith(f"{Endpoint.RESPONSES}/"):
        return f"responses are not kept here: send the whole conversation to {Endpoint.RESPONSES}"
    return f"POST to {', '.join((*Endpoint, *TokenizerPath))}, or GET {OTHERS}"


async def on_ferry_error(http: Request, error: Exception) -> Response:
    if not isinstance(error, FerryError):
        raise error
    status, body = error_of(error)
    if status >= 500:
        logger.error("an internal error of the router ended a request", exc_info=error)
    return _refuse(http, status, body, {})


async def on_defect(http: Request, error: Exception) -> Response:
    """A defect of ours: the server logs the traceback, the client learns that it was not its fault."""
    return _refuse(http, 500, error_body("internal error of the router", SERVER_ERROR, "internal_error", None), {})


def _refuse(http: Request, status: int, body: dict[str, object], headers: dict[str, str]) -> Response:
    request_id = id_of_refusal(http.scope["headers"])
    error = body.get("error")
    reason = str(error.get("code", "")) if isinstance(error, dict) else ""
    tell_refusal(http.app.state.metrics, http.scope, request_id, status, reason)
    return json_response(status, error_for(http.scope["path"], body), headers | {"x-request-id": request_id})


def tell_left(http: Request) -> None:
    """Count and log a request whose client has left before all of it had come."""
    _tell(http, CLIENT_CLOSED_REQUEST, "client_left")


def tell_ended(http: Request) -> None:
    """Count and log a request that no driver serves at the end of the router, whose server tells the client."""
    _tell(http, 503, "server_ended")


def _tell(http: Request, status: int, reason: str) -> None:
    tell_refusal(http.app.state.metrics, http.scope, id_of_refusal(http.scope["headers"]), status, reason)


def tell_refusal(metrics: Metrics, scope: Scope, request_id: str, status: int, reason: str) -> None:
    """Count and log a request that was refused when only its path and, perhaps, its id were known."""
    if IS_SERVED in scope:
        return
    path = scope["path"]
    known = path if path in (*Endpoint, *TokenizerPath) else "other"
    metrics.requests.labels(known, NO_PATH, status).inc()
    # Only a request that generates has a line in the access log, and only one.
    if BEGAN_S in scope:
        AccessLogEntry(request_id, path, status, reason, time.monotonic() - scope[BEGAN_S]).log()
