"""The stand-in for llm-d's sidecar between servers that write down what they get: what llm-d's own tests say of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llm_d import json_of_go
from llm_d.nixlv2 import REMOTE_DECODE, nixlv2
from llm_d.proxy import PREFILL_HEADER, Sidecar

RETURNED = {
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_port": 5600,
    "kvferry": {"lease_id": "f" * 16},
}
ASKED = {"model": "m", "prompt": [5, 6], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
STREAM = 'data: {"usage":{"prompt_tokens":2}}\n\ndata: {"choices":[1.0]}\n\ndata: [DONE]\n\n'


class Engine:
    """A server that keeps the last request's headers and body, and answers what it is told."""

    def __init__(self, answer: web.Response) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.read()
        self.asked.append((request.headers.copy(), json.loads(text) if text else None))
        return self.answer


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[TestServer]:
    server = TestServer(app)
    await server.start_server()
    try:
        yield server
    finally:
        await server.close()


def app_of(engine: Engine) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    return app


def answer(status: int = 200, **fields: Any) -> web.Response:
    return web.json_response(fields, status=status, headers={"x-of-engine": "yes"})


@contextlib.asynccontextmanager
async def through(prefill: Engine, decode: Engine) -> AsyncIterator[Any]:
    """A function that sends a request through the sidecar, and says status, headers and text."""
    async with serving(app_of(prefill)) as first, serving(app_of(decode)) as second:
        sidecar = Sidecar(str(second.make_url("")).rstrip("/"), nixlv2)
        async with serving(sidecar.app()) as front, aiohttp.ClientSession() as http:

            async def send(body: Any, path: str = "/v1/completions", prefill: str = "", **headers: str) -> Any:
                named = prefill or f"127.0.0.1:{first.port}, elsewhere:1"
                sent = {PREFILL_HEADER: named, **{key.replace("_", "-"): value for key, value in headers.items()}}
                text = body if isinstance(body, bytes) else json.dumps(body)
                async with http.post(front.make_url(path), data=text, headers=sent) as response:
                    return response.status, response.headers, await response.text()

            yield send


def engines(prefilled: web.Response | None = None, decoded: web.Response | None = None) -> tuple[Engine, Engine]:
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    first = prefilled or answer(kv_transfer_params=RETURNED, usage=usage)
    return Engine(first), Engine(decoded or answer(text="x", usage={"prompt_tokens": 2}))


async def test_both_servers_get_what_llm_d_sends() -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        status, headers, text = await send(ASKED, x_of_client="kept")
    assert (status, headers["x-of-engine"], "content-length" in headers) == (200, "yes", False)
    assert json.loads(text)["usage"] == {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    ((first_headers, first),) = prefill.asked
    ((second_headers, second),) = decode.asked
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
    asked = {"model": "m", "prompt": [5, 6], "stream": False}
    assert first == {**asked, **limits, "kv_transfer_params": REMOTE_DECODE}
    assert second == {**ASKED, "kv_transfer_params": RETURNED}
    assert first_headers["x-request-id"] == second_headers["x-request-id"] != ""
    for got in (first_headers, second_headers):
        assert PREFILL_HEADER not in got
        assert (got["x-of-client"], got["x-forwarded-for"]) == ("kept", "127.0.0.1")


async def test_a_request_id_of_the_client_comes_first() -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        await send(ASKED, x_request_id="mine")
    for headers, _ in (*prefill.asked, *decode.asked):
        assert headers.getall("x-request-id")[0] == "mine"
        assert len(headers.getall("x-request-id")) == 2


@pytest.mark.parametrize(
    ("path", "fields", "limited"),
    [
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 1}),
        ("/inference/v1/generate", {}, {"sampling_params": {"max_tokens": 1, "min_tokens": 1}}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"seed": 3, "max_tokens": 9}},
            {"sampling_params": {"seed": 3, "max_tokens": 1, "min_tokens": 1}},
        ),
    ],
)
async def test_the_limits_of_other_paths(path: str, fields: dict[str, Any], limited: dict[str, Any]) -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        await send({"model": "m", **fields}, path)
    ((_, first),) = prefill.asked
    ((_, second),) = decode.asked
    assert first == {"model": "m", "stream": False, **limited, "kv_transfer_params": REMOTE_DECODE}
    assert second == {"model": "m", **fields, "kv_transfer_params": RETURNED}


async def test_a_stream_says_the_prefill_servers_cached_tokens() -> None:
    decoded = web.Response(text=STREAM, content_type="text/event-stream")
    prefill, decode = engines(decoded=decoded)
    async with through(prefill, decode) as send:
        _, _, text = await send(ASKED)
    first, *rest = text.split("\n\n")
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert json.loads(first.removeprefix("data: ")) == {"usage": usage}
    # What has no usage keeps its bytes.
    assert rest == ['data: {"choices":[1.0]}', "data: [DONE]", ""]


async def test_what_the_prefill_server_refuses_is_the_answer() -> None:
    prefill, decode = engines(prefilled=answer(429, error="busy"))
    async with through(prefill, decode) as send:
        status, headers, text = await send(ASKED)
    assert (status, headers["x-of-engine"], json.loads(text)) == (429, "yes", {"error": "busy"})
    assert decode.asked == []


async def test_a_prefill_server_that_is_gone_is_502_and_nothing_is_decoded() -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        assert (await send(ASKED, prefill="127.0.0.1:1"))[::2] == (502, "")
    assert decode.asked == []


@pytest.mark.parametrize("named", [" ", " , 127.0.0.1:1"])
async def test_without_a_prefill_server_the_request_passes_as_it_is(named: str) -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        status, headers, _ = await send(ASKED, prefill=named)
    assert (status, "content-length" in headers) == (200, True)
    ((got, body),) = decode.asked
    assert body == ASKED
    assert "x-request-id" not in got
    assert prefill.asked == []


async def test_parameters_that_did_not_come_are_null() -> None:
    prefill, decode = engines(prefilled=answer(text="x"))
    async with through(prefill, decode) as send:
        await send(ASKED)
    ((_, second),) = decode.asked
    assert second == {**ASKED, "kv_transfer_params": None}


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"temperature": NaN}'])
async def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    prefill, decode = engines()
    async with through(prefill, decode) as send:
        status, _, text = await send(body)
    assert (status, json.loads(text)["type"]) == (400, "BadRequestError")
    assert prefill.asked == decode.asked == []


def test_numbers_are_doubles() -> None:
    text = json_of_go.dumps(json_of_go.loads(b'{"b": 9007199254740993, "a": 1.0, "c": 0.5}'))
    assert text == b'{"a":1,"b":9007199254740992,"c":0.5}'
