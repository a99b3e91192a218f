"""API keys and CORS, on real HTTP servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvferry.cli.server import http, listening
from kvferry.errors import ConfigurationError
from kvferry.http.access import Access, OnUnauthorized, guarded

KEYS = ("first-key", "second-key")
PAGE = "https://chat.example"
DEADLINE_S = 30.0


@asynccontextmanager
async def served(access: Access, on_unauthorized: OnUnauthorized = lambda *_: None) -> AsyncIterator[str]:
    """A server that answers on every path."""

    async def show(request: Request) -> JSONResponse:
        return JSONResponse({"shown": request.headers.get("authorization")}, headers={"x-kvferry-cache": "local"})

    routes = [Route("/{path:path}", show, methods=["GET", "POST"])]
    ended = asyncio.Event()
    with listening.listen("127.0.0.1", 0) as bound:
        app = guarded(Starlette(routes=routes), access, on_unauthorized)
        running = asyncio.create_task(http.run(app, bound, [ended.wait()], 1, http.Drain(0.0, list)))
        try:
            yield listening.url_of(bound)
        finally:
            ended.set()
            await asyncio.wait_for(running, DEADLINE_S)


async def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named) as response:
        return response.status, {name.lower(): value for name, value in response.headers.items()}, await response.text()


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"])
async def test_the_api_needs_a_key_and_says_so(shown: str) -> None:
    headers = {"authorization": shown} if shown else {}
    async with served(Access(KEYS)) as url:
        for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, told, text = await ask(url + path, **headers)
            assert (status, told["www-authenticate"]) == (401, "Bearer"), path
            error = json.loads(text)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert not any(key in text for key in KEYS)


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with served(Access(KEYS)) as url:
        assert (await ask(url + "/v1/messages", x_api_key="second-key"))[0] == 200
        # Where both are sent, the first one's word is taken.
        assert (await ask(url + "/v1/messages", x_api_key="first-key", authorization="Bearer wrong"))[0] == 401
        status, told, text = await ask(url + "/v1/messages", x_api_key="wrong")
        assert (status, told["www-authenticate"]) == (401, "Bearer")
        assert json.loads(text)["type"] == "error"
        assert json.loads(text)["error"]["type"] == "authentication_error"


async def test_neither_key_reaches_the_application() -> None:
    async def show(request: Request) -> JSONResponse:
        return JSONResponse(sorted(request.headers))

    app = guarded(Starlette(routes=[Route("/v1/messages", show)]), Access(KEYS), lambda *_: None)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-api-key", b"first-key"), (b"accept", b"a")]
    scope = {"type": "http", "method": "GET", "path": "/v1/messages", "query_string": b"", "headers": headers}
    await app(scope, asyncio.Queue().get, send)
    assert json.loads(sent[1]["body"]) == ["accept"]


@pytest.mark.parametrize(("given", "is_kept"), [("trip-7", True), ("", False), ("a,b", False)])
async def test_who_is_refused_gets_an_id_that_the_server_is_told(given: str, is_kept: bool) -> None:
    ids: list[str] = []
    headers = {"x_request_id": given} if given else {}
    async with served(Access(KEYS), lambda scope, request_id: ids.append(request_id)) as url:
        status, told, _ = await ask(f"{url}/v1/models", **headers)
        assert (status, [told["x-request-id"]]) == (401, ids)
        assert (await ask(f"{url}/v1/models", authorization="Bearer first-key"))[0] == 200
    assert len(ids) == 1
    assert (ids == [given]) == is_kept


async def test_every_key_is_good_and_what_operators_ask_needs_none() -> None:
    async with served(Access(KEYS)) as url:
        for key in KEYS:
            for scheme in ("Bearer", "bearer"):
                status, _, text = await ask(f"{url}/v1/models", authorization=f"{scheme} {key}")
                assert (status, json.loads(text)["shown"]) == (200, None), "an engine behind it would learn the key"
        for path in ("/health", "/ready", "/metrics", "/version", "/kvferry/info", "/v1x"):
            assert (await ask(url + path))[0] == 200, path


def test_without_keys_and_origins_nothing_is_in_the_way() -> None:
    app = Starlette()
    assert guarded(app, Access(), lambda *_: None) is app


async def test_pages_of_an_origin_may_ask_and_can_read_refusals() -> None:
    async with served(Access(KEYS, origins=(PAGE,))) as url:
        preflight = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
        status, told, _ = await ask(f"{url}/v1/completions", "OPTIONS", origin=PAGE, **preflight)
        assert (status, told["access-control-allow-origin"]) == (200, PAGE)
        status, told, _ = await ask(f"{url}/v1/completions", "POST", origin=PAGE)
        assert (status, told["access-control-allow-origin"]) == (401, PAGE)
        status, told, _ = await ask(f"{url}/v1/models", origin=PAGE, authorization="Bearer first-key")
        assert status == 200
        assert "x-kvferry-cache" in told["access-control-expose-headers"]
        _, told, _ = await ask(f"{url}/v1/models", origin="https://other.example", authorization="Bearer first-key")
        assert "access-control-allow-origin" not in told


@pytest.mark.parametrize("key", ["", "two words", "cl\u00e9", "line\nend"])
def test_a_key_that_cannot_travel_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII") as raised:
        Access((key,))
    assert not key or key not in str(raised.value)


def test_keys_are_not_shown_by_accident() -> None:
    assert "first-key" not in repr(Access(KEYS))
