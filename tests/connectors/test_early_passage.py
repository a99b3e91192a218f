"""When an early leg's caller hears of its promise: when vLLM computes for it, and before anything else it says."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.connectors.vllm_middleware.held_response import EarlyPassage
from kvferry.connectors.vllm_middleware.prefill_starts import Beginnings

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


def passing(test):
    """Run a test with a passage between vLLM and a caller."""

    async def main():
        caller, beginnings = Caller(), Beginnings()
        passage = EarlyPassage(beginnings, "early-1", PROMISE, caller.send)
        try:
            await test(passage, caller, beginnings)
        finally:
            passage.close()
        assert len(beginnings) == 0

    asyncio.run(main())


def test_the_promise_is_told_when_the_prompt_is_begun():
    async def test(passage, caller, beginnings):
        await passage.send(HEAD)
        for _ in range(5):
            await asyncio.sleep(0)
        assert caller.messages == [HEAD]
        beginnings.note("early-2")
        await asyncio.to_thread(beginnings.note, "early-1")
        await caller.until(2)
        beginnings.note("early-1")
        await passage.send(body(b"data: token\n\n"))
        await passage.send(body(b"", more=False))
        assert caller.messages == [HEAD, PROMISE, body(b"data: token\n\n"), body(b"", more=False)]

    passing(test)


def test_a_prompt_may_be_begun_before_its_stream_is():
    async def test(passage, caller, beginnings):
        beginnings.note("early-1")
        await passage.send(HEAD)
        await caller.until(2)
        assert caller.messages == [HEAD, PROMISE]

    passing(test)


def test_without_news_the_promise_comes_before_the_first_token():
    async def test(passage, caller, beginnings):
        await passage.send(HEAD)
        await passage.send(body(b"data: token\n\n"))
        assert caller.messages == [HEAD, PROMISE, body(b"data: token\n\n")]

    passing(test)


def test_news_and_the_first_token_at_once_are_told_in_order_and_once():
    async def test(passage, caller, beginnings):
        await passage.send(HEAD)
        beginnings.note("early-1")
        await asyncio.gather(passage.send(body(b"1")), asyncio.sleep(0))
        await passage.send(body(b"2"))
        assert caller.messages == [HEAD, PROMISE, body(b"1"), body(b"2")]

    passing(test)


@pytest.mark.parametrize(
    "head", [{**HEAD, "status": 400}, {**HEAD, "headers": [(b"content-type", b"application/json")]}]
)
def test_any_other_answer_passes_as_it_is(head):
    async def test(passage, caller, beginnings):
        await passage.send(head)
        beginnings.note("early-1")
        await passage.send(body(b"{}", more=False))
        assert caller.messages == [head, body(b"{}", more=False)]

    passing(test)


def test_a_caller_that_has_left_is_told_nothing():
    async def test(passage, caller, beginnings):
        await passage.send(HEAD)
        passage.close()
        beginnings.note("early-1")
        for _ in range(5):
            await asyncio.sleep(0)
        assert caller.messages == [HEAD]

    passing(test)
