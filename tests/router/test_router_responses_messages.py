"""OpenAI's Responses API and Anthropic's Messages API through the router, as their own clients see them."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest
from aiohttp import web
from router_harness import (
    TRANSFER,
    Engine,
    breaking,
    cluster,
    decode_engine,
    failing,
    open_stream,
    prefill_engine,
    prefilling,
    resetting,
)

from kvferry.http.request_fields import Endpoint
from kvferry.router.answers.answer_format import MESSAGES as ANSWER_OF_MESSAGES
from kvferry.router.answers.answer_format import RESPONSES as ANSWER
from kvferry.router.answers.answer_format import WholeEvents
from kvferry.router.request.client_request import (
    first_token_body,
    parse_request,
    room_decode_body,
    room_prefill_body,
)
from kvferry.router.request.prompt_cost import cost_of
from kvferry.router.request.request_kind import kind_of

ASKED = [{"role": "user", "content": "hello"}]
MESSAGES, RESPONSES = Endpoint.MESSAGES, Endpoint.RESPONSES


def event(kind: str, **fields) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **fields}).encode() + b"\n\n"


def message(text: str = "", **extra) -> dict:
    content = [{"type": "text", "text": text}] if text else []
    usage = {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 2}
    whole = {"id": "m", "type": "message", "role": "assistant", "model": "tiny", "content": content}
    return {**whole, "stop_reason": None, "stop_sequence": None, "usage": usage, **extra}


def text_events(*texts: str) -> list[bytes]:
    block = {"type": "text", "text": ""}
    deltas = [event("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) for text in texts]
    return [
        event("message_start", message=message()),
        event("content_block_start", index=0, content_block=block),
        *deltas,
    ]


ENDING = [
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=message()["usage"]),
    event("message_stop"),
]


def response(text: str, **extra) -> dict:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "id": "o", "role": "assistant", "status": "completed", "content": content}]
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 2, "total_tokens": 11}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": "tiny", "output": output, "usage": usage}
    return {**whole, "status": "completed", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], **extra}


async def generating(request, seen):
    """Prefill and decode of both APIs, whose figure of cached tokens is 4 where the prompt is computed."""
    is_messages = seen.path == MESSAGES
    params = {**TRANSFER, "remote_engine_id": "p0"}
    if "kv_transfer_params" in seen.body and seen.body["kv_transfer_params"].get("do_remote_decode"):
        usage = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}
        if not is_messages:
            usage = {**response("")["usage"], "input_tokens_details": {"cached_tokens": 4}}
        whole = message("x", usage=usage) if is_messages else response("x", usage=usage)
        return web.json_response({**whole, "kv_transfer_params": params})
    if not seen.body.get("stream"):
        return web.json_response(message("one two") if is_messages else response("one two"))
    stream = await open_stream(request)
    pieces = [*text_events("one", " two"), *ENDING]
    if not is_messages:
        delta = {"item_id": "o", "output_index": 0, "content_index": 0, "logprobs": []}
        pieces = [
            event("response.created", sequence_number=0, response=response("", usage=None, status="in_progress")),
            event("response.output_text.delta", sequence_number=1, delta="one", **delta),
            event("response.output_text.delta", sequence_number=2, delta=" two", **delta),
            event("response.completed", sequence_number=3, response=response("one two")),
        ]
    for piece in pieces:
        await stream.write(piece)
    return stream


def engines():
    return [prefill_engine("p0", generating)], [decode_engine("d0", generating)]


def of_anthropic(c, **options):
    return anthropic.AsyncAnthropic(base_url=c.url, api_key="secret", max_retries=0, **options)


def of_openai(c):
    return openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="secret", max_retries=0)


async def test_anthropics_client_gets_a_message():
    async with cluster(*engines()) as c, of_anthropic(c) as client:
        system = "be short"
        found = await client.messages.create(
            model="tiny", max_tokens=9, messages=ASKED, system=system, stop_sequences=["!"]
        )
        assert found.content[0].text == "one two"
        # What was transferred to decode was not cached: prefill had four of nine tokens.
        assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (5, 4)
        [prefill], [decode] = c.prefill[0].seen, c.decode[0].seen
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert prefill.body["system"] == decode.body["system"] == system
        assert "stop_sequences" not in prefill.body
        assert decode.body["max_tokens"] == 9
        assert decode.body["kv_transfer_params"] == {**TRANSFER, "remote_engine_id": "p0"}
        line = f'kvferry_router_requests_total{{endpoint="{MESSAGES}",path="disaggregated",status="200"}}'
        assert await c.metric(line) == 1


async def test_anthropics_client_streams_a_message():
    async with cluster(*engines()) as c, of_anthropic(c) as client:
        async with client.messages.stream(model="tiny", max_tokens=9, messages=ASKED) as stream:
            texts = [text async for text in stream.text_stream]
            found = await stream.get_final_message()
        assert texts == ["one", " two"]
        assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (5, 4)
        assert c.decode[0].seen[0].body["stream"] is True
        assert await c.metric('kvferry_router_time_to_first_token_seconds_count{path="disaggregated"}') == 1


async def test_openais_client_gets_a_response():
    async with cluster(*engines()) as c, of_openai(c) as client:
        found = await client.responses.create(model="tiny", input="hello", instructions="be short", max_output_tokens=9)
        assert found.output_text == "one two"
        assert found.usage.input_tokens_details.cached_tokens == 4
        [prefill], [decode] = c.prefill[0].seen, c.decode[0].seen
        assert (prefill.body["max_output_tokens"], prefill.body["stream"], prefill.body["store"]) == (1, False, False)
        assert "max_tokens" not in prefill.body
        assert prefill.body["instructions"] == decode.body["instructions"]
        assert decode.body["max_output_tokens"] == 9
        assert "store" not in decode.body
        assert decode.body["kv_transfer_params"] == {**TRANSFER, "remote_engine_id": "p0"}


async def test_openais_client_streams_a_response():
    async with cluster(*engines()) as c, of_openai(c) as client:
        stream = await client.responses.create(model="tiny", input=ASKED, stream=True)
        events = [one async for one in stream]
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "one two"
        assert events[-1].response.usage.input_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES])
async def test_no_reference_is_asked_for_before_the_prompt_is_computed(endpoint):
    """Neither stream could begin with one."""
    info = {"engine": "kvferry", "epoch": "p0-1", "early": True}
    prefill = Engine("p0", generating, info=info)
    asked = {"input": ASKED} if endpoint is RESPONSES else {"messages": ASKED, "max_tokens": 9}
    async with cluster([prefill], [decode_engine("d0", generating)], early_from_tokens=1) as c:
        async with c.session.post(c.url + endpoint, json={"model": "tiny", **asked, "stream": True}) as reply:
            assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "disaggregated")
        assert prefill.seen[0].body["stream"] is False


async def test_tokens_of_a_message_are_counted_by_one_engine():
    async def counting(request, seen):
        return web.json_response({"input_tokens": 9})

    async with (
        cluster([prefill_engine("p0", counting)], [decode_engine("d0", counting)]) as c,
        of_anthropic(c) as client,
    ):
        assert (await client.messages.count_tokens(model="tiny", messages=ASKED)).input_tokens == 9
        assert len(c.prefill[0].seen) + len(c.decode[0].seen) == 1


async def test_anthropics_client_reads_refusals():
    async with cluster(*engines()) as c, of_anthropic(c) as client:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens cannot be used") as refused:
            await client.messages.create(model="tiny", max_tokens=-1, messages=ASKED)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert refused.value.body["error"]["param"] == "max_tokens"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.post(f"{MESSAGES}/batches", cast_to=object)
        assert unknown.value.body["error"]["type"] == "not_found_error"
    async with cluster([prefill_engine("p0", prefilling("p0"))], [decode_engine("d0", resetting)]) as c:
        async with of_anthropic(c) as client:
            with pytest.raises(anthropic.InternalServerError, match="did not answer") as failed:
                await client.messages.create(model="tiny", max_tokens=9, messages=ASKED)
        assert failed.value.body["error"]["type"] == "api_error"


async def test_what_an_engine_refuses_is_told_as_it_told_it():
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": "no such tool"}}

    async def refusing(request, seen):
        return web.json_response(error, status=400)

    async with (
        cluster([prefill_engine("p0", refusing)], [decode_engine("d0", refusing)]) as c,
        of_anthropic(c) as client,
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="tiny", max_tokens=9, messages=ASKED)
        assert refused.value.body == error


async def test_anthropics_client_sees_a_broken_stream_as_an_error():
    decode = decode_engine("d0", breaking(b"".join(text_events("one"))))
    async with cluster([prefill_engine("p0", generating)], [decode]) as c, of_anthropic(c) as client:
        stream = await client.messages.create(model="tiny", max_tokens=9, messages=ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="was interrupted"):
            await anext(one async for one in stream if one.type == "message_stop")


async def test_a_stream_of_messages_that_begins_with_an_error_is_tried_again():
    """As vLLM does where its engine fails before the first token."""
    failed = event("error", error={"type": "internal_error", "message": "EngineDeadError"})
    decode = [decode_engine("d0", breaking(failed)), decode_engine("d1", generating)]
    async with cluster([prefill_engine("p0", generating)], decode) as c, of_anthropic(c) as client:
        for _ in range(2):
            found = await client.messages.create(model="tiny", max_tokens=9, messages=ASKED, stream=True)
            kinds = [one.type async for one in found]
            assert kinds[0] == "message_start"
            assert "error" not in kinds


def opening_events():
    begun = response("", usage=None, status="in_progress")
    return b"".join(
        event(f"response.{word}", sequence_number=number, response=begun)
        for number, word in enumerate(("created", "queued", "in_progress"))
    )


@pytest.mark.parametrize("failed", [b"", event("error", message="x"), event("response.failed", response={"id": "r"})])
async def test_a_response_that_has_only_begun_is_tried_again(failed):
    """Engines say so before they know how it will go."""
    decode = [decode_engine("d0", breaking(opening_events() + failed)), decode_engine("d1", generating)]
    async with cluster([prefill_engine("p0", generating)], decode) as c, of_openai(c) as client:
        for _ in range(2):
            stream = await client.responses.create(model="tiny", input=ASKED, stream=True)
            kinds = [one.type async for one in stream]
            assert kinds.count("response.created") == 1
            assert kinds[-1] == "response.completed"


async def test_an_engine_may_say_that_a_response_has_begun_long_before_it_does():
    """Until its first token the limit of a whole request counts, not that of a silence amid an answer."""
    has_begun, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(request, seen):
        stream = await open_stream(request)
        await stream.write(opening_events())
        has_begun.set()
        await may_answer.wait()
        await stream.write(event("response.completed", sequence_number=3, response=response("one two")))
        return stream

    async with cluster([], [decode_engine("d0", slow)], stall_timeout_s=0.05) as c, of_openai(c) as client:
        asking = asyncio.create_task(client.responses.create(model="tiny", input=ASKED, stream=True))
        await has_begun.wait()
        # Longer than a silence may be.
        await asyncio.wait({asking}, timeout=0.2)
        assert await c.metric('kvferry_router_time_to_first_token_seconds_count{path="decode-only"}') == 0
        may_answer.set()
        events = [one.type async for one in await asking]
        assert events == ["response.created", "response.queued", "response.in_progress", "response.completed"]
        assert await c.metric('kvferry_router_time_to_first_token_seconds_count{path="decode-only"}') == 1


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_the_events_that_begin_a_response_are_found_however_they_come(size):
    whole = opening_events() + event("response.output_text.delta", delta="one")
    seen = next(end for end in range(size, len(whole) + size, size) if ANSWER.opening_bytes(whole[:end]) < end)
    assert len(opening_events()) < seen <= len(opening_events()) + len(b"event: response.o") + size
    assert ANSWER.opening_bytes(whole) == len(opening_events())
    assert ANSWER_OF_MESSAGES.opening_bytes(whole) == 0


def test_a_response_that_repeats_a_long_prompt_has_the_figure_of_prefill():
    last = event("response.completed", response=response("x" * 1_000_000))
    events, passed = WholeEvents(ANSWER.max_event_bytes), b""
    for start in range(0, len(last), 1 << 16):
        passed += ANSWER.with_cached_tokens_in_events(events.feed(last[start : start + (1 << 16)]), 4)
    (data,) = (line for line in passed.splitlines() if line.startswith(b"data: "))
    assert json.loads(data.removeprefix(b"data: "))["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert events.rest() == b""


def test_a_usage_without_a_figure_has_the_details_that_openais_client_reads():
    body = json.dumps(response("a")).encode()
    usage = json.loads(ANSWER.with_cached_tokens(body, None))["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}


def test_what_claude_code_sends_for_its_bill_changes_no_home():
    def prefixes(number):
        header = {"type": "text", "text": f'x-anthropic-billing-header: cch="{number}";'}
        system = [header, {"type": "text", "text": "b" * 4000}]
        return cost_of(request_of(MESSAGES, messages=ASKED, system=system)).prefixes

    assert prefixes(1) == prefixes(2234)
    assert prefixes(1)


def test_a_name_that_a_client_gives_a_response_is_another_one_in_each_room():
    asked = request_of(RESPONSES, input="a", request_id="resp_mine")
    bodies = [
        json.loads(made(asked, b'{"bootstrap_room": %d}' % number))
        for number in (5, 6)
        for made in (room_prefill_body, room_decode_body, first_token_body)
    ]
    names = [body["request_id"] for body in bodies]
    # A prefill engine of others answers to the client's own.
    assert names[2] == names[5] == "resp_mine"
    assert names[0] == names[1] != names[3] == names[4]
    assert all(name.startswith("resp_") for name in names)
    plain = json.loads(room_decode_body(request_of(RESPONSES, input="a"), b'{"bootstrap_room": 5}'))
    assert "request_id" not in plain


async def test_what_one_engine_keeps_is_asked_of_decode_alone():
    async with cluster(*engines()) as c, of_openai(c) as client:
        await client.responses.create(model="tiny", input="more", previous_response_id="resp_1")
        await client.responses.create(
            model="tiny", input="more", tools=[{"type": "code_interpreter", "container": "c"}]
        )
        assert not c.prefill[0].seen
        assert [one.body.get("kv_transfer_params") for one in c.decode[0].seen] == [None, None]
        for reason in ("engine_session", "engine_tools"):
            assert await c.metric(f'kvferry_router_fallbacks_total{{reason="{reason}"}}') == 1


async def test_responses_are_not_kept_here():
    async with cluster(*engines()) as c, of_openai(c) as client:
        with pytest.raises(openai.BadRequestError, match="background cannot be asked for"):
            await client.responses.create(model="tiny", input="a", background=True)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            await client.responses.retrieve("resp_1")


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        (RESPONSES, {}, "input is missing"),
        (RESPONSES, {"input": 5}, "input cannot be used"),
        (RESPONSES, {"input": "a", "max_output_tokens": "9"}, "max_output_tokens cannot be used"),
        (MESSAGES, {"max_tokens": 9}, "messages is missing"),
        (MESSAGES, {"messages": "a"}, "messages cannot be used"),
        (MESSAGES, {"messages": ASKED, "bootstrap_room": 1}, "bootstrap_room must not be sent"),
    ],
)
async def test_a_malformed_body_is_refused_in_words(endpoint, body, words):
    async with cluster(*engines()) as c, c.session.post(c.url + endpoint, json=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["message"].startswith(words)


def request_of(endpoint: Endpoint, **fields):
    return parse_request(json.dumps(fields).encode(), endpoint)


def test_the_first_token_of_a_room_is_one_in_every_dialect():
    asked = request_of(RESPONSES, input="a", max_output_tokens=9, stop=["!"], stream=True)
    first = json.loads(first_token_body(asked, b'{"bootstrap_room": 5}'))
    assert first == {
        "input": "a",
        "max_output_tokens": 1,
        "stop": ["!"],
        "stream": False,
        "store": False,
        "bootstrap_room": 5,
    }
    of_sglang = json.loads(room_prefill_body(asked, b'{"bootstrap_room": 5}'))
    assert (of_sglang["max_output_tokens"], of_sglang["store"], of_sglang["stream"]) == (9, False, False)
    said = request_of(MESSAGES, messages=ASKED, max_tokens=9)
    assert json.loads(first_token_body(said, b'{"bootstrap_room": 5}'))["max_tokens"] == 1


def test_what_comes_before_the_messages_is_a_part_of_the_prompt():
    plain, instructed = (request_of(RESPONSES, input="a" * 2000, **more) for more in ({}, {"instructions": "b" * 2000}))
    assert cost_of(instructed).prompt_tokens == cost_of(plain).prompt_tokens + 501
    assert cost_of(instructed).prefixes[0] != cost_of(plain).prefixes[0]
    other = request_of(RESPONSES, input="c" * 2000, instructions="b" * 2000)
    assert cost_of(other).prefixes[0] == cost_of(instructed).prefixes[0]
    assert cost_of(request_of(RESPONSES, input="a", max_output_tokens=7)).new_tokens == 7
    image = {"type": "image", "source": {"type": "base64", "data": "x" * 4000}}
    shown = request_of(MESSAGES, messages=[{"role": "user", "content": [image]}], system="s")
    assert 1024 <= cost_of(shown).prompt_tokens < 1100
    assert kind_of(shown, cost_of(shown)) != kind_of(plain, cost_of(plain))


async def test_an_engine_that_does_not_know_the_api_says_so():
    engines = [prefill_engine("p0", failing(404, "unknown path"))], [decode_engine("d0", failing(404, "unknown path"))]
    async with cluster(*engines) as c, of_anthropic(c) as client:
        with pytest.raises(anthropic.NotFoundError, match="unknown path"):
            await client.messages.create(model="tiny", max_tokens=9, messages=ASKED)
