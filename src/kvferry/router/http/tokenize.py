"""Requests that any engine answers by itself, without a cache: `/tokenize`, and others that count tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from kvferry.http.anthropic import error_for
from kvferry.router.answers.refusals import refusal
from kvferry.router.commands import Count, Counted
from kvferry.router.events import INSTANCE_DOWN, TOO_LATE
from kvferry.router.flow.attempts import Attempts
from kvferry.router.policy.records import Instance
from kvferry.router.request.headers import response_headers, with_length
from kvferry.router.request.lenient_json import decoded
from kvferry.router.services import Services
from kvferry.router.upstream.failures import DEADLINE, FAILURES, GONE, MESSAGES, reason_of
from kvferry.router.upstream.http_client import HttpRequest, WholeResponse


class TokenizerPath(StrEnum):
    """Paths about tokens. Engines of kvferry and vLLM answer the first two alike, those of vLLM and SGLang the last."""

    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    COUNT = "/v1/messages/count_tokens"


class Named(msgspec.Struct):
    """The one field that says who can answer."""

    model: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A request that waits for its answer, and is ended when its instance is down."""

    instance: Instance
    limit: asyncio.Timeout

    def instance_is_down(self) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time())


async def ask(services: Services, request: HttpRequest, deadline_s: float) -> WholeResponse:
    """The first answer of an instance that has the model; `request` has no `base` yet.

    Any status is an answer. Another instance is asked where one cannot be reached or breaks off, as often as for an
    answer that is generated: what is wrong with this request would be so with all. The caller's
    `deadline_s` is on the clock of `time.monotonic`, and the whole takes no longer than a prefill may.
    """
    pool, reason, path, attempts = services.pool, "", request.target.partition("?")[0], Attempts()
    instances = pool.answering(_model(request.body))
    if not instances:
        return _refusal(
            path, 503, "no_instance", "no engine can be reached; hint: the router's log says why", "no_instance"
        )
    patience_s = services.config.prefill_timeout_s
    left_s = deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(min(patience_s, left_s)):
            for place, instance in enumerate(instances):
                if place:
                    services.metrics.count(Count(Counted.RETRY, instance.role, reason))
                found = await _tried(services, instance, replace(request, base=instance.url))
                if isinstance(found, WholeResponse):
                    return found
                reason = found
                if not attempts.may_try_again(instance.role, reason, instance):
                    break
    except TimeoutError:
        if left_s < patience_s:
            return _refusal(path, 504, "deadline_exceeded", f"there is no answer: {MESSAGES[TOO_LATE]}", TOO_LATE)
        _note(services, instance, DEADLINE)
        return _refusal(path, 504, "upstream_timeout", f"the instance did not answer: {MESSAGES[DEADLINE]}", DEADLINE)
    return _refusal(path, 502, "upstream_unavailable", f"the instance did not answer: {MESSAGES[reason]}", reason)


async def _tried(services: Services, instance: Instance, request: HttpRequest) -> WholeResponse | str:
    """The answer of one instance, or why there is none."""
    try:
        return await _asked(services, instance, request)
    except FAILURES as error:
        # Its own time is over only where a probe has found the instance down.
        reason = reason_of(error, INSTANCE_DOWN)
        _note(services, instance, reason)
        return reason


async def _asked(services: Services, instance: Instance, request: HttpRequest) -> WholeResponse:
    """Ask one instance. Raises FAILURES, and TimeoutError when the instance is found down meanwhile."""
    async with asyncio.timeout(None) as limit:
        question, open_requests = _Question(instance, limit), services.pool.open_requests
        open_requests.began(question)
        try:
            found = await services.http.fetch(request, services.config.max_answer_bytes)
        finally:
            open_requests.ended(question)
    return replace(found, headers=with_length(response_headers(found.headers, {}), len(found.body)))


def _note(services: Services, instance: Instance, reason: str) -> None:
    services.metrics.count(Count(Counted.UPSTREAM_ERROR, instance.role, reason))
    services.metrics.instance_error(instance, reason)
    if reason in GONE:
        services.pool.mark_down(instance, reason)
    else:
        services.pool.request_probe(instance)


def _model(body: bytes) -> str:
    """The model that a body names; empty if it names none or is not valid: an engine says what is wrong with it."""
    named = decoded(body, Named)
    return (named and named.model) or ""


def _refusal(path: str, status: int, code: str, message: str, reason: str) -> WholeResponse:
    body = msgspec.json.encode(error_for(path, refusal(status, code, message, reason).body))
    return WholeResponse(status, with_length([(b"content-type", b"application/json")], len(body)), body)
