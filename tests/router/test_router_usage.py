"""`cached_tokens` that clients see is what prefill had cached, and not what was transferred to decode."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from router_harness import (
    DONE,
    ONE,
    TRANSFER,
    answer,
    chat_chunk,
    cluster,
    decode_engine,
    frame,
    prefill_engine,
    streaming,
)

from kvferry.router.answers.answer_format import CHAT, MAX_EVENT_BYTES, MESSAGES, RESPONSES, WholeEvents


def usage_of(cached, **extra) -> dict:
    details = (
        {} if cached is ... else {"prompt_tokens_details": cached if cached is None else {"cached_tokens": cached}}
    )
    return {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, **details, **extra}


def prefill(cached):
    async def behave(request, seen):
        params = {**TRANSFER, "remote_engine_id": "p0"}
        return web.json_response(answer("x", kv_transfer_params=params, usage=usage_of(cached)))

    return prefill_engine("p0", behave)


def decode(cached, headers=()):
    """Streams its usage where it is asked to, in pieces that cut events."""

    async def behave(request, seen):
        if not seen.body.get("stream"):
            return web.json_response(answer("one", usage=usage_of(cached)), headers=dict(headers))
        whole = ONE + frame(chat_chunk("", usage=usage_of(cached))) + DONE
        pieces = (whole[start : start + 50] for start in range(0, len(whole), 50))
        return await streaming(*pieces, **dict(headers))(request, seen)

    return decode_engine("d0", behave)


async def told(c, stream: bool):
    """The usage in the router's answer."""
    reply = await c.complete({"prompt": "a", "stream": stream})
    assert reply.status == 200
    if not stream:
        assert int(reply.headers["content-length"]) == len(reply.raw)
        return json.loads(reply.raw)["usage"]
    assert reply.raw.endswith(DONE)
    events = [json.loads(event.removeprefix(b"data: ")) for event in reply.raw.split(b"\n\n")[:-2]]
    assert [event["choices"][0]["delta"]["content"] for event in events] == ["one", ""]
    return events[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "expected"),
    [(4, 8, 4), (0, 8, 0), (4, ..., 4), (..., 8, None), (None, 8, None), (..., ..., ...)],
)
async def test_the_figure_is_that_of_prefill(of_prefill, of_decode, expected, stream):
    async with cluster([prefill(of_prefill)], [decode(of_decode)]) as c:
        assert await told(c, stream) == usage_of(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_decode_has_computed_itself_it_knows_best(stream):
    async with cluster([], [decode(8)]) as c:
        assert await told(c, stream) == usage_of(8)
    recomputed = decode(8, {"x-kvferry-cache": "recomputed"})
    async with cluster([prefill(4)], [recomputed]) as c:
        assert await told(c, stream) == usage_of(8)


async def test_a_compressed_answer_is_left_alone():
    raw = b"\x1f\x8b nobody looks into this"

    async def behave(request, seen):
        return web.Response(body=raw, headers={"content-type": "application/json", "content-encoding": "br"})

    async with cluster([prefill(4)], [decode_engine("d0", behave)]) as c:
        request = c.session.post(c.url + "/v1/completions", json={"prompt": "a"}, auto_decompress=False)
        async with request as response:
            assert await response.read() == raw


def test_all_other_bytes_of_an_answer_stay_as_they_are():
    body = b'{"a": 1.10, "text": "\\"usage\\": {\\"prompt_tokens\\": 1}", "usage": {"prompt_tokens": 3} , "z":[ ] }'
    changed = CHAT.with_cached_tokens(body, 2)
    usage = b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}'
    assert changed == body.replace(b'{"prompt_tokens": 3}', usage)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"usage": 5, "prompt_tokens": 1}', b'["prompt_tokens"]', b'{"usage": {"prompt_tokens": 1}}']
)
def test_what_tells_nothing_stays_as_it_is(body):
    assert CHAT.with_cached_tokens(body, None) == body
    assert CHAT.cached_tokens_of(body) is None


@pytest.mark.parametrize("details", ["null", "5", "{}", '{"cached_tokens": true}', '{"cached_tokens": -1}'])
def test_a_figure_that_makes_no_sense_is_none(details):
    assert CHAT.cached_tokens_of(b'{"usage": {"prompt_tokens_details": %s}}' % details.encode()) is None


def test_the_figure_of_a_stream_is_in_one_of_its_events():
    events = frame(chat_chunk("x")) + frame(chat_chunk("", usage=usage_of(7))) + DONE
    assert CHAT.cached_tokens_of_stream(events) == 7
    assert CHAT.cached_tokens_of_stream(frame(chat_chunk("x"))) is None


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_whole_however_they_come(size):
    whole = frame(chat_chunk("one", usage=None)) + frame(chat_chunk("", usage=usage_of(8))) + b"data: [DONE]\n\n: tail"
    events, passed = WholeEvents(), b""
    for start in range(0, len(whole), size):
        passed += CHAT.with_cached_tokens_in_events(events.feed(whole[start : start + size]), 4)
    passed += events.rest()
    first, last, done, tail = passed.split(b"\n\n")
    assert first + b"\n\n" == frame(chat_chunk("one", usage=None))
    assert json.loads(last.removeprefix(b"data:"))["usage"] == usage_of(4)
    assert (done, tail, events.rest()) == (b"data: [DONE]", b": tail", b"")


def test_an_event_without_an_end_is_not_kept_for_ever():
    events = WholeEvents()
    passed = sum(len(events.feed(b"x" * 1000)) for _ in range(100))
    assert passed >= MAX_EVENT_BYTES


@pytest.mark.parametrize(
    ("num_before", "last"),
    [
        (2, {"choices": [], "usage": usage_of(8)}),
        (2, {"choices": None, "usage": usage_of(8)}),
        (2, {"usage": usage_of(8)}),
        (3, chat_chunk("three", usage=usage_of(8))),
        (3, {"choices": []}),
    ],
)
def test_a_usage_that_comes_with_a_token_is_not_the_final_one(num_before, last):
    events = [frame(chat_chunk("one", usage=usage_of(8))), frame(chat_chunk("two")), frame(last)]
    assert CHAT.before_final_usage(b"".join(events)) == len(b"".join(events[:num_before]))


def event(kind: str, **fields) -> bytes:
    """As both of these APIs name it twice."""
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **fields}).encode() + b"\n\n"


def of_response(cached) -> dict:
    return {"input_tokens": 9, "input_tokens_details": cached and {"cached_tokens": cached}, "output_tokens": 2}


def of_messages(counted, **more) -> dict:
    return {"input_tokens": counted, "output_tokens": 2, **more}


@pytest.mark.parametrize(
    ("usage", "cached", "expected"),
    [
        (of_messages(1, cache_read_input_tokens=8), 4, of_messages(5, cache_read_input_tokens=4)),
        (of_messages(1, cache_read_input_tokens=8), 0, of_messages(9, cache_read_input_tokens=0)),
        (of_messages(1, cache_read_input_tokens=8), None, of_messages(9)),
        (of_messages(9), 4, of_messages(5, cache_read_input_tokens=4)),
        (of_messages(9), None, of_messages(9)),
        (of_messages(3), 5, of_messages(0, cache_read_input_tokens=3)),
        (of_messages(None, cache_read_input_tokens=8), 4, of_messages(None, cache_read_input_tokens=8)),
        (of_messages(1, cache_read_input_tokens="8"), 4, of_messages(1, cache_read_input_tokens="8")),
    ],
)
def test_what_was_cached_of_a_message_is_not_counted_twice(usage, cached, expected):
    body = json.dumps({"type": "message", "usage": usage}).encode()
    assert json.loads(MESSAGES.with_cached_tokens(body, cached))["usage"] == expected


def test_the_figure_of_a_message_is_in_the_events_that_have_a_usage():
    start = event("message_start", message={"id": "m", "usage": of_messages(1, cache_read_input_tokens=8)})
    text = event("content_block_delta", delta={"type": "text_delta", "text": '{"input_tokens": 1}'})
    delta = event("message_delta", delta={}, usage=of_messages(1, cache_read_input_tokens=8))
    changed = MESSAGES.with_cached_tokens_in_events(start + text + delta, 4).split(b"\n\n")
    head, data = changed[0].split(b"\ndata: ")
    assert head == b"event: message_start"
    assert json.loads(data)["message"]["usage"] == of_messages(5, cache_read_input_tokens=4)
    assert changed[1] + b"\n\n" == text
    assert json.loads(changed[2].split(b"data: ")[1])["usage"] == of_messages(5, cache_read_input_tokens=4)
    assert MESSAGES.before_final_usage(start + text + delta) == len(start + text)
    assert MESSAGES.cached_tokens_of_stream(start + text) == 8
    assert MESSAGES.cached_tokens_of(json.dumps({"usage": of_messages(9)}).encode()) is None


def test_the_figure_of_a_response_is_in_its_last_event():
    created = event("response.created", response={"usage": None})
    done = event("response.completed", response={"output": [], "usage": of_response(8)})
    changed = RESPONSES.with_cached_tokens_in_events(created + done, 4)
    assert changed.startswith(created)
    assert json.loads(changed.split(b"data: ")[2])["response"]["usage"] == of_response(4)
    assert RESPONSES.before_final_usage(created + done) == len(created)
    whole = json.dumps({"object": "response", "usage": of_response(8)}).encode()
    assert RESPONSES.cached_tokens_of(whole) == 8
    unknown = json.loads(RESPONSES.with_cached_tokens(whole, None))["usage"]
    assert unknown["input_tokens_details"] == {"cached_tokens": 0}


async def test_only_streams_have_a_time_between_tokens():
    async with cluster([prefill(0)], [decode(0)]) as c:
        await told(c, stream=False)
        before = await c.metrics()
        await told(c, stream=True)
        after = await c.metrics()
    assert ["kvferry_router_inter_token_seconds_count{" in text for text in (before, after)] == [False, True]
