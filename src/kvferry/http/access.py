"""API keys and CORS of an HTTP server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.errors import ConfigurationError
from kvferry.http.anthropic import error_for
from kvferry.http.openai import INVALID_REQUEST, error_body
from kvferry.http.request_ids import NAME, id_of_refusal

# The paths that need a key, as in vLLM. Health, readiness and metrics are for whoever runs the server.
GUARDED = ("/v1", "/tokenize", "/detokenize")
EVERYTHING = ("*",)
SHOWN_HEADERS = (
    *("x-request-id", "server-timing", "retry-after"),
    *("x-kvferry-path", "x-kvferry-reason", "x-kvferry-cache", "x-kvferry-cache-reason"),
)
AUTHORIZATION, SCHEME = b"authorization", b"bearer "
# Clients of Anthropic's API show their key in this one.
API_KEY = b"x-api-key"
UNAUTHORIZED, INVALID_KEY = 401, "invalid_api_key"

OnUnauthorized = Callable[[Scope, str], None]
"""Called with each request that was refused for its API key, and with the request id in the answer."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server. With `api_keys`, requests to the OpenAI API need one of them. Pages of `origins` may use it
    from a browser, with these methods and headers, and with cookies if `credentials`. Raises ConfigurationError."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = EVERYTHING
    headers: tuple[str, ...] = EVERYTHING
    credentials: bool = False

    def __post_init__(self) -> None:
        for key in self.api_keys:
            check_key(key)


def check_key(key: str) -> None:
    """Raises ConfigurationError for a key that cannot travel in a header. The message does not show it."""
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ConfigurationError(
            "an API key cannot be used",
            found="an empty key" if not key else "blanks or letters beyond ASCII in it",
            expected="printable ASCII characters without blanks",
            hint="such as the output of: openssl rand -hex 32",
        )


def bearer(key: str) -> tuple[bytes, bytes]:
    """The Authorization header of a client with this key."""
    return AUTHORIZATION, b"Bearer " + key.encode()


def guarded(app: ASGIApp, access: Access, on_unauthorized: OnUnauthorized) -> ASGIApp:
    """The application behind its guards. CORS comes first: a browser has to be able to read a refusal."""
    if access.api_keys:
        app = _ApiKeys(app, access.api_keys, on_unauthorized)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_methods=access.methods,
            allow_headers=access.headers,
            allow_credentials=access.credentials,
            expose_headers=SHOWN_HEADERS,
        )
    return app


class _ApiKeys:
    """Lets requests through that show a key that is known; keys are compared as digests, in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], on_unauthorized: OnUnauthorized) -> None:
        self._app = app
        self._on_unauthorized = on_unauthorized
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and _is_guarded(scope["path"]):
            key = _shown_key(scope["headers"])
            if not self._is_known(key):
                request_id = id_of_refusal(scope["headers"])
                self._on_unauthorized(scope, request_id)
                await _refusal(scope["path"], request_id, was_shown=bool(key))(scope, receive, send)
                return
            # A router forwards headers to engines, which must not learn the key of its clients.
            kept = [pair for pair in scope["headers"] if pair[0] not in (AUTHORIZATION, API_KEY)]
            scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        shown = _digest(key)
        # Every digest is compared, so that the time does not tell which key it is.
        return sum(hmac.compare_digest(shown, digest) for digest in self._digests) > 0


def _is_guarded(path: str) -> bool:
    return any(path == guarded or path.startswith(f"{guarded}/") for guarded in GUARDED)


def _shown_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The key of a request; empty if it shows none, or several. Anthropic's header counts if there is no other."""
    shown = {name: [value for key, value in headers if key == name] for name in (AUTHORIZATION, API_KEY)}
    if not shown[AUTHORIZATION]:
        return shown[API_KEY][0].strip() if len(shown[API_KEY]) == 1 else b""
    values = shown[AUTHORIZATION]
    is_bearer = len(values) == 1 and values[0][: len(SCHEME)].lower() == SCHEME
    return values[0][len(SCHEME) :].strip() if is_bearer else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(path: str, request_id: str, was_shown: bool) -> JSONResponse:
    message = "the API key is not valid" if was_shown else "an API key is needed: Authorization: Bearer KEY"
    headers = {"www-authenticate": "Bearer", NAME.decode(): request_id}
    body = error_for(path, error_body(message, INVALID_REQUEST, INVALID_KEY, None))
    return JSONResponse(body, UNAUTHORIZED, headers)
