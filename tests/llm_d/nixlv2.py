"""`connector_nixlv2.go`: one request after the other, and what the prefill server returns goes to the decode server.

The prefill request is the client's, with one token and not as a stream. A client that leaves ends whichever is under
way. A prefill server that refuses ends the request with its own answer, and one that cannot be reached with 502 and no
body: the sidecar has the decode server compute no prompt. The number of cached tokens in the decode server's answer is
replaced by the prefill server's.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from llm_d import json_of_go
from llm_d.proxy import Forwarding, error, kept_headers

REQUEST_ID_HEADER = "x-request-id"
PARAMS = "kv_transfer_params"
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
GENERATE = "/inference/v1/generate"
LIMITS = {"/v1/responses": ("max_output_tokens",), GENERATE: ("max_tokens", "min_tokens")}
OTHER_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
EVENT = b"data: "


async def nixlv2(forwarding: Forwarding, body: bytes, prefill: str) -> web.StreamResponse:
    """The connector `nixlv2`, which is the sidecar's default."""
    try:
        asked = json_of_go.loads(body)
    except ValueError as invalid:
        return error(400, "BadRequestError", f"invalid JSON: {invalid}")
    # A client's own id comes first, and is the one that servers read.
    both = dataclasses.replace(forwarding, added=((REQUEST_ID_HEADER, str(uuid.uuid1())),))
    try:
        async with both.to_prefill(prefill, _prefill_body(asked, forwarding.request.path)) as upstream:
            text = await upstream.read()
            if not upstream.ok:
                return web.Response(status=upstream.status, headers=kept_headers(upstream), body=text)
    except aiohttp.InvalidURL as invalid:
        return error(502, "BadGateway", str(invalid))
    except aiohttp.ClientError:
        return web.Response(status=502)
    try:
        prefilled = json_of_go.loads(text)
    except ValueError as invalid:
        return error(400, "BadRequestError", str(invalid))
    cached = _cached_tokens(prefilled)
    decode_body = json_of_go.dumps({**asked, PARAMS: prefilled.get(PARAMS)})
    return await both.to_decode(decode_body, lambda upstream: _with_cached_tokens(upstream, cached))


def _prefill_body(asked: dict[str, Any], path: str) -> bytes:
    whole = {key: value for key, value in asked.items() if key != "stream_options"}
    limits: dict[str, Any] = dict.fromkeys(LIMITS.get(path, OTHER_LIMITS), 1)
    if path == GENERATE:
        sampling = asked.get("sampling_params")
        limits = {"sampling_params": {**(sampling if isinstance(sampling, dict) else {}), **limits}}
    return json_of_go.dumps({**whole, PARAMS: REMOTE_DECODE, "stream": False, **limits})


def _cached_tokens(prefilled: dict[str, Any]) -> int:
    """vLLM says nothing of cached tokens when there are none."""
    usage = prefilled.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return int(cached) if isinstance(cached, int | float) else 0


async def _with_cached_tokens(upstream: aiohttp.ClientResponse, cached: int) -> AsyncIterator[bytes]:
    """Of a stream every whole line, of another answer every piece that is a whole document."""
    if "text/event-stream" not in upstream.headers.get("content-type", ""):
        async for piece in upstream.content.iter_any():
            yield _replaced(piece, cached)
        return
    rest = b""
    async for piece in upstream.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield _replaced_line(line, cached) + b"\n"
    if rest:
        yield _replaced_line(rest, cached)


def _replaced_line(line: bytes, cached: int) -> bytes:
    data = line.removeprefix(EVENT)
    return line if data == line else EVENT + _replaced(data, cached)


def _replaced(text: bytes, cached: int) -> bytes:
    """What has no usage, or the number already, stays as it is."""
    try:
        document = json_of_go.loads(text)
    except ValueError:
        return text
    usage = document.get("usage")
    if not isinstance(usage, dict) or _says(usage, cached):
        return text
    details = usage.get("prompt_tokens_details")
    usage["prompt_tokens_details"] = {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}
    return json_of_go.dumps(document)


def _says(usage: dict[str, Any], cached: int) -> bool:
    details = usage.get("prompt_tokens_details")
    return isinstance(details, dict) and details.get("cached_tokens") == cached
