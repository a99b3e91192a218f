"""`/v1/models` of all instances as one list."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvferry.http.openai import INVALID_REQUEST, SERVER_ERROR, error_body
from kvferry.router.policy.records import Role
from kvferry.router.request.headers import Headers
from kvferry.router.request.lenient_json import decoded
from kvferry.router.services import Services
from kvferry.router.upstream.failures import FAILURES
from kvferry.router.upstream.http_client import HttpRequest


class Model(msgspec.Struct):
    """The one field of a listed model that is looked at."""

    id: str


class ModelList(msgspec.Struct):
    """An upstream's answer, its entries as they came."""

    data: list[msgspec.Raw]


async def list_models(services: Services, target: str, headers: Headers) -> tuple[int, dict[str, Any]]:
    """Status and body: every model that a healthy instance lists, once, in the order of the instances.

    When none lists any, the first refusal is passed on, such as a 401; where no instance could be asked, 503.
    """
    pool = services.pool
    instances = [*pool.healthy(Role.PREFILL), *pool.healthy(Role.DECODE)]
    requests = [HttpRequest("GET", instance.url, target, headers, b"") for instance in instances]
    answers = await asyncio.gather(*(_ask(services, one) for one in requests))
    models = {model.id: raw for status, body in answers if status == 200 for model, raw in _entries(body)}
    if models:
        return 200, {"object": "list", "data": list(models.values())}
    if not any(status for status, _ in answers):
        message = "no engine can be reached that lists its models; hint: the router's log says why"
        return 503, error_body(message, SERVER_ERROR, "no_instance", None)
    refusals = [status for status, _ in answers if 400 <= status < 500]
    message = "no instance lists its models"
    return (refusals[0] if refusals else 502), error_body(message, SERVER_ERROR, "no_models", None)


async def find_model(services: Services, target: str, headers: Headers, name: str) -> tuple[int, dict[str, Any]]:
    """Status and body for one model; `target` is the path of the list."""
    status, body = await list_models(services, target, headers)
    if status != 200:
        return status, body
    models = {msgspec.json.decode(raw, type=Model).id: raw for raw in body["data"]}
    if name in models:
        return 200, models[name]
    message = f"the model {name!r} does not exist; expected: one of {', '.join(models)}"
    return 404, error_body(message, INVALID_REQUEST, "model_not_found", "model")


async def _ask(services: Services, request: HttpRequest) -> tuple[int, bytes]:
    """Status and body; a status of 0 when the instance could not be asked."""
    try:
        async with asyncio.timeout(services.config.probe_timeout_s):
            response = await services.http.fetch(request, services.config.max_answer_bytes)
            return response.status, response.body
    except FAILURES:
        return 0, b""


def _entries(body: bytes) -> list[tuple[Model, msgspec.Raw]]:
    """The models of a list, without entries that cannot be read."""
    listed = decoded(body, ModelList)
    entries = ((decoded(raw, Model), raw) for raw in listed.data) if listed is not None else ()
    return [(model, raw) for model, raw in entries if model is not None]
