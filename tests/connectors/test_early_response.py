"""When an early prefill's caller hears of its promise: when vLLM computes for it, and before anything else it says."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvferry.connectors.vllm_middleware.responses import EarlyResponse
from kvferry.connectors.vllm_middleware.worker_reports import PrefillStarts

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
HEAD = {"type": "http.response.start", "status": 200, "headers": STREAM}
PROMISE = {"type": "http.response.body", "body": b"data: promise\n\n", "more_body": True}
DEADLINE_S = 20.0


def body(text, more=True):
    return {"type": "http.response.body", "body": text, "more_body": more}


class Caller:
    """What the caller got; `got` is set at each message."""

    def __init__(self):
        self.messages = []
        self.got = asyncio.Event()

    async def send(self, message):
        # Whoever sends meanwhile must wait.
        await asyncio.sleep(0)
        # What is said of its cache is tested with the middleware.
        kept = [pair for pair in message.get("headers", ()) if pair[0] != b"x-kvferry-cache"]
        self.messages.append({**message, "headers": kept} if kept else message)
        self.got.set()

    async def until(self, num):
        async with asyncio.timeout(DEADLINE_S):
            while len(self.messages) < num:
                self.got.clear()
                await self.got.wait()


@contextlib.asynccontextmanager
async def response_between():
    """A response between vLLM and a caller."""
    caller, starts = Caller(), PrefillStarts()
    response = EarlyResponse(starts, "early-1", PROMISE, caller.send)
    with contextlib.closing(response):
        yield response, caller, starts
    assert not starts._waiting


async def test_the_promise_is_told_when_the_prompt_is_begun():
    async with response_between() as (response, caller, starts):
        await response.send(HEAD)
        for _ in range(5):
            await asyncio.sleep(0)
        assert caller.messages == [HEAD]
        starts.note("early-2")
        await asyncio.to_thread(starts.note, "early-1")
        await caller.until(2)
        starts.note("early-1")
        await response.send(body(b"data: token\n\n"))
        await response.send(body(b"", more=False))
        assert caller.messages == [HEAD, PROMISE, body(b"data: token\n\n"), body(b"", more=False)]


async def test_a_prompt_may_be_begun_before_its_stream_is():
    async with response_between() as (response, caller, starts):
        starts.note("early-1")
        await response.send(HEAD)
        await caller.until(2)
        assert caller.messages == [HEAD, PROMISE]


async def test_without_news_the_promise_comes_before_the_first_token():
    async with response_between() as (response, caller, _starts):
        await response.send(HEAD)
        await response.send(body(b"data: token\n\n"))
        assert caller.messages == [HEAD, PROMISE, body(b"data: token\n\n")]


async def test_news_and_the_first_token_at_once_are_told_in_order_and_once():
    async with response_between() as (response, caller, starts):
        await response.send(HEAD)
        starts.note("early-1")
        await asyncio.gather(response.send(body(b"1")), asyncio.sleep(0))
        await response.send(body(b"2"))
        assert caller.messages == [HEAD, PROMISE, body(b"1"), body(b"2")]


@pytest.mark.parametrize(
    "head", [{**HEAD, "status": 400}, {**HEAD, "headers": [(b"content-type", b"application/json")]}]
)
async def test_any_other_answer_passes_as_it_is(head):
    async with response_between() as (response, caller, starts):
        await response.send(head)
        starts.note("early-1")
        await response.send(body(b"{}", more=False))
        assert caller.messages == [head, body(b"{}", more=False)]


async def test_a_caller_that_has_left_is_told_nothing():
    async with response_between() as (response, caller, starts):
        await response.send(HEAD)
        response.close()
        starts.note("early-1")
        for _ in range(5):
            await asyncio.sleep(0)
        assert caller.messages == [HEAD]
