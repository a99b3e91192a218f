"""The OpenAI dialect over a real socket."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from embedded_server import Served
from embedded_support import DEADLINE_S, Loop, ids_of, request
from starlette.requests import ClientDisconnect, Request

from kvferry import __version__
from kvferry.embedded.http import app
from kvferry.embedded.http.responder import Responder
from kvferry.embedded.request.bodies import shown
from kvferry.embedded.request.parse import GenerationRequest, decode_chat
from kvferry.embedded.request.prompts import SHORT_TEXT, Prompts

PROMPT = "The ferry crosses the river when"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE = "/tokenize"
MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]


ANNOTATED = b'{"messages":[{"role":"user","content":[{"type":"text","text":"a","annotations":%b}]}]}'
DEEP = [{"function": {"name": "f", "arguments": '{"a":' * 500 + "1" + "}" * 500}}]


@pytest.fixture
def client(decoder: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=decoder.url, api_key="none", max_retries=0, timeout=DEADLINE_S)


def test_completion_with_the_openai_client(client: openai.OpenAI, decoder: Served) -> None:
    with client:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
        pieces = list(
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True}
            )
        )
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    num_prompt_tokens = len(decoder.engine.tokenizer(PROMPT)["input_ids"])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt_tokens, 20)
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == answer.choices[0].text
    assert pieces[-1].usage == answer.usage
    assert not pieces[-1].choices
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == "length"


def test_answers_say_when_they_were_made(decoder: Served) -> None:
    before = int(time.time())
    _, answer = decoder.ask(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2})
    assert before <= answer["created"] <= int(time.time())


def test_others_are_answered_while_a_very_long_text_is_tokenised(
    decoder: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def tokenise(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return {"input_ids": [5] * len(text)}

    # It has more characters than this engine could take.
    monkeypatch.setattr(Prompts, "_check_length", lambda *_: None)
    monkeypatch.setattr(decoder.engine, "tokenizer", tokenise)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(decoder.ask, COMPLETIONS, {"prompt": "x" * (SHORT_TEXT + 1)})
        assert begun.wait(DEADLINE_S)
        assert decoder.ask("/health")[0] == 200
        may_end.set()
        status, answer = asked.result(DEADLINE_S)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("num_calls", "is_elsewhere"), [(1, False), (5000, True)])
def test_others_are_answered_while_a_long_body_is_read(
    decoder: Served, monkeypatch: pytest.MonkeyPatch, num_calls: int, is_elsewhere: bool
) -> None:
    threads: list[str] = []

    def watched(body: bytes) -> GenerationRequest:
        threads.append(threading.current_thread().name)
        return decode_chat(body)

    monkeypatch.setattr(app, "decode_chat", watched)
    calls = [{"function": {"name": "a"}}] * num_calls
    messages = [{"role": "assistant", "content": "a", "tool_calls": calls}]
    assert decoder.ask(CHAT, {"messages": messages, "max_tokens": 1})[0] == 400
    assert ["tokenising" in name for name in threads] == [is_elsewhere]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
@pytest.mark.parametrize("is_decoded", [False, True])
def test_nobody_waits_for_the_text_of_a_client_that_has_left(
    decoder: Served, monkeypatch: pytest.MonkeyPatch, path: str, is_decoded: bool
) -> None:
    async def decoded_at_once(_self: object, request: Request, decode: Callable[[bytes], Any]) -> Any:
        return decode(await app._body(request))

    # Else its body waits for the same thread.
    if is_decoded:
        monkeypatch.setattr(app.Endpoints, "_decoded", decoded_at_once)
    # It has more characters than this engine could take.
    monkeypatch.setattr(Prompts, "_check_length", lambda *_: None)
    begun, may_end, texts = threading.Event(), threading.Event(), []

    def tokenise(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        begun.set()
        texts.append(text[0])
        assert may_end.wait(DEADLINE_S)
        return {"input_ids": [5]}

    monkeypatch.setattr(decoder.engine, "tokenizer", tokenise)
    left = 'kvferry_engine_requests_total{role="refused",status="499"}'
    before = decoder.metric(left)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(decoder.ask, TOKENIZE, {"prompt": "a" * (SHORT_TEXT + 1)})
        assert begun.wait(DEADLINE_S)
        body = json.dumps({"prompt": "b" * (SHORT_TEXT + 1)}).encode()
        with socket.create_connection(("127.0.0.1", decoder.port)) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
        while decoder.metric(left) == before:
            assert not first.done()
        third = pool.submit(decoder.ask, TOKENIZE, {"prompt": "c" * (SHORT_TEXT + 1)})
        may_end.set()
        assert [asked.result(DEADLINE_S)[0] for asked in (first, third)] == [200, 200]
    assert texts == ["a", "c"]


def test_a_client_that_stops_amid_its_body_is_told_so(decoder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALL_S", 0.1)
    with socket.create_connection(("127.0.0.1", decoder.port), DEADLINE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n" + b'{"prompt"')
        assert client.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "huge"}, 404),
        (COMPLETIONS, b"a" * (33 << 20), 413),
        ("/v1/embeddings", {}, 404),
        ("/health", {}, 405),
        (COMPLETIONS, {"prompt": None}, 400),
    ],
)
def test_what_is_refused_is_counted(decoder: Served, path: str, body: Any, status: int) -> None:
    name = f'kvferry_engine_requests_total{{role="refused",status="{status}"}}'
    before = decoder.metric(name)
    assert decoder.raw(path, body)[0] == status
    assert decoder.metric(name) == before + 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_defect_is_counted_once(decoder: Served, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    async def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", lambda _record: None)
    monkeypatch.setattr(Responder, "_respond", crash) if is_known else monkeypatch.setattr(app, "_body", crash)
    before = counted(decoder)
    assert decoder.raw(COMPLETIONS, {"prompt": "a"})[0] == 500
    assert counted(decoder) == before + 1


def counted(decoder: Served) -> float:
    names = [f'kvferry_engine_requests_total{{role="{role}",status="500"}}' for role in ("whole", "refused")]
    return sum(map(decoder.metric, names))


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    with client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=16)
        pieces = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=16, stream=True))
    assert answer.choices[0].message.role == pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"


def test_models_health_and_metrics(decoder: Served) -> None:
    assert decoder.ask("/v1/models")[1]["data"][0]["id"] == "tiny"
    assert decoder.ask("/version") == (200, {"version": __version__})
    assert decoder.ask("/health") == (200, {"status": "ok", "engine_id": "e", "reason": ""})
    before = decoder.metric("kvferry_engine_tokens_computed_total")
    decoder.ask(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2})
    assert decoder.metric("kvferry_engine_tokens_computed_total") == before + 3
    assert decoder.metric('kvferry_engine_blocks{state="granted"}') == 0
    assert decoder.metric('kvferry_engine_blocks{state="capacity"}') == 200
    assert decoder.metric('kvferry_engine_requests_total{role="whole",status="200"}') >= 1


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], "IDS", ["IDS"]])
def test_prompts_may_be_text_or_ids_or_a_list_of_one(decoder: Served, prompt: Any) -> None:
    ids = decoder.engine.tokenizer(PROMPT)["input_ids"]
    prompt = ids if prompt == "IDS" else [ids] if prompt == ["IDS"] else prompt
    _, expected = decoder.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4})
    _, answer = decoder.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
    assert answer["choices"] == expected["choices"]


@pytest.mark.parametrize("prompts", [["Who rings the bell?", PROMPT], [[5, 6, 7], [8, 9]]])
def test_several_prompts_are_answered_in_their_order(decoder: Served, prompts: list[Any]) -> None:
    body = {"max_tokens": 5, "return_token_ids": True}
    alone = [decoder.ask(COMPLETIONS, body | {"prompt": prompt})[1] for prompt in prompts]
    _, answer = decoder.ask(COMPLETIONS, body | {"prompt": prompts, "n": 2})
    expected = [one["choices"][0] | {"index": 2 * i + j} for i, one in enumerate(alone) for j in range(2)]
    assert answer["choices"] == expected
    num_prompt_tokens = sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 20,
        "total_tokens": num_prompt_tokens + 20,
    }
    assert answer["kvferry"]["tokens_computed"] == 2 * num_prompt_tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_several_choices_are_streamed_side_by_side(decoder: Served, path: str) -> None:
    body = {"n": 3, "max_tokens": 6, "stream_options": {"include_usage": True}}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    *events, last = decoder.events(path, body)
    texts, ends = {0: "", 1: "", 2: ""}, []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 18)
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts.values())) == 1
    assert texts[0]


def test_choices_that_do_not_fit_at_once_take_turns(decoder: Served) -> None:
    _, answer = decoder.ask(COMPLETIONS, {"prompt": [5] * 2500, "n": 3, "max_tokens": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_token_ids_are_the_engine_s(loop: Loop, decoder: Served) -> None:
    ask = request("direct", 40, 10)
    direct = loop.run(ids_of(decoder.engine.generate(ask)))
    body = {"prompt": list(ask.prompt), "max_tokens": 10, "return_token_ids": True, "ignore_eos": True}
    _, answer = decoder.ask(COMPLETIONS, body)
    assert answer["choices"][0]["token_ids"] == direct
    events = decoder.events(COMPLETIONS, body)
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == direct


def test_every_answer_says_what_was_computed(decoder: Served) -> None:
    ids = list(request("", 40).prompt)
    _, answer = decoder.ask(COMPLETIONS, {"prompt": ids, "max_tokens": 3})
    assert answer["kvferry"]["tokens_computed"] == 40
    assert answer["kvferry"]["tokens_received"] == 0
    events = decoder.events(COMPLETIONS, {"prompt": ids, "max_tokens": 3})
    assert [event["kvferry"] for event in events if "kvferry" in event] == [answer["kvferry"]]
    assert "kvferry" in events[-1]


def test_stop_strings_end_the_answer(decoder: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30}
    _, whole = decoder.ask(COMPLETIONS, body)
    text = whole["choices"][0]["text"]
    stop = text[10:14]
    _, answer = decoder.ask(COMPLETIONS, body | {"stop": ["neverthere!", stop]})
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 30
    events = decoder.events(COMPLETIONS, body | {"stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == text[: text.index(stop)]


def test_an_echo_is_the_prompt_before_each_answer(decoder: Served) -> None:
    ids = [7, 8, 9]
    for prompt, text in ((PROMPT, PROMPT), (ids, decoder.engine.tokenizer.decode(ids))):
        # What the prompt has is no reason to stop.
        body = {"prompt": [prompt], "max_tokens": 6, "n": 2, "temperature": 0, "stop": text[:3]}
        plain = decoder.ask(COMPLETIONS, body)[1]
        echoed = decoder.ask(COMPLETIONS, body | {"echo": True})[1]
        expected = [text + choice["text"] for choice in plain["choices"]]
        assert [choice["text"] for choice in echoed["choices"]] == expected
        assert echoed["usage"] == plain["usage"]
        streamed = ["", ""]
        for event in decoder.events(COMPLETIONS, body | {"echo": True}):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == expected


def test_an_echo_does_not_hide_an_error(decoder: Served) -> None:
    nothing = {"allowed_token_ids": [70], "logit_bias": {"70": -100}, "stop_token_ids": [70], "min_tokens": 3}
    assert decoder.ask(COMPLETIONS, {"prompt": "a", "echo": True, "stream": True} | nothing)[0] == 400


def test_token_ids_of_prompts_come_once_where_vllm_has_them(decoder: Served) -> None:
    body = {"prompt": [[5, 6], [7]], "max_tokens": 3, "n": 2, "return_token_ids": True}
    prompts = [[5, 6], [5, 6], [7], [7]]
    assert [choice["prompt_token_ids"] for choice in decoder.ask(COMPLETIONS, body)[1]["choices"]] == prompts
    events = decoder.events(COMPLETIONS, body)
    told = [
        (choice["index"], choice["prompt_token_ids"])
        for event in events
        for choice in event["choices"]
        if "prompt_token_ids" in choice
    ]
    assert sorted(told) == list(enumerate(prompts))

    chat = {"messages": MESSAGES, "max_tokens": 3, "return_token_ids": True}
    answer = decoder.ask(CHAT, chat)[1]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    told = [event["prompt_token_ids"] for event in decoder.events(CHAT, chat) if "prompt_token_ids" in event]
    assert told == [answer["prompt_token_ids"]]
    assert "prompt_token_ids" not in decoder.ask(CHAT, chat | {"return_token_ids": False})[1]


def test_the_caller_s_id_comes_back_and_may_be_used_twice(decoder: Served) -> None:
    headers = {"x-request-id": "trip-7"}
    for _ in range(2):
        status, answer = decoder.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers)
        assert (status, answer["id"]) == (200, "cmpl-trip-7")
    assert decoder.ask(COMPLETIONS, {"prompt": "a"}, {"x-request-id": "a,b"})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(COMPLETIONS, {"foo": 1}, 400), (COMPLETIONS, {"prompt": "a", "model": "other"}, 404), ("/nowhere", {}, 404)],
)
def test_a_refusal_is_found_by_the_caller_s_id(decoder: Served, path: str, body: dict[str, Any], status: int) -> None:
    answer = decoder.response(path, body, {"x-request-id": "trip-7"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "trip-7")


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(loop: Loop, decoder: Served, stream: bool, num_choices: int) -> None:
    """`expect_empty` of the fixture waits until nothing is left, long before 4000 tokens could be answered."""
    fields = {"prompt": "a", "max_tokens": 4000, "stream": stream, "n": num_choices}
    path, body = COMPLETIONS, json.dumps(fields)
    left = 'kvferry_engine_requests_total{role="whole",status="499"}'
    before = decoder.metric(left)
    with socket.create_connection(("127.0.0.1", decoder.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        connection.sendall(head.encode())
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            while not any(decoder.engine.block_usage().granted):
                decoder.raw("/health")
    loop.run(decoder.engine.idle())
    assert decoder.metric(left) == before + 1


BAD_BODIES: list[tuple[str, Any, int, str]] = [
    (COMPLETIONS, b"", 400, "invalid request body"),
    (COMPLETIONS, b"{", 400, "invalid request body"),
    (COMPLETIONS, b"\xff\xfe", 400, "invalid request body"),
    (COMPLETIONS, b"[" * 100_000, 400, "invalid request body"),
    (COMPLETIONS, [], 400, "object"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt is invalid; found: []; expected: `array` of length >= 1"),
    (CHAT, {"messages": [{"role": "usr", "content": "a"}]}, 400, "found: role 'usr'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "a message has no content"),
    (COMPLETIONS, {"prompt": ""}, 400, "needs a prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "needs a prompt"),
    (COMPLETIONS, {"prompt": [1, "b"]}, 400, "a list of token ids and strings"),
    (COMPLETIONS, {"prompt": ["b", [1]]}, 400, "a list of strings and lists"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "needs a prompt"),
    (COMPLETIONS, {"prompt": [1] + [[]] * 3000}, 400, "too many prompts"),
    (COMPLETIONS, {"prompt": ["a"] * 3000}, 400, "too many prompts in one request; found: 3000"),
    (COMPLETIONS, {"prompt": ['"\\'] * 8 + ["[" * 3000], "foo": 1}, 400, "unknown request field"),
    (COMPLETIONS, {"prompt": "a", "n": 5, "allowed_token_ids": [5] * (1 << 18)}, 400, "named for so many answers"),
    (COMPLETIONS, b'{"prompt":"a","foo":1e999}', 400, "foo cannot be read; found: Number out of range"),
    (COMPLETIONS, b'{"prompt":"a","priority":1e999}', 400, "priority cannot be read"),
    ("/detokenize", b'{"tokens":[1],"foo":1e999}', 400, "foo cannot be read"),
    (COMPLETIONS, b'{"prompt":"a","foo":' + b"[" * 970 + b"]" * 970 + b"}", 400, "unknown request field"),
    (CHAT, ANNOTATED % (b"[" * 970 + b"]" * 970), 400, "annotations is not supported"),
    (TOKENIZE, {"messages": [{"role": "assistant", "content": "a", "tool_calls": DEEP}]}, 400, "chat template"),
    (COMPLETIONS, {"prompt": [1, 1024]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": [2**62]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": [2**80]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 5000}, 400, "too long for an answer"),
    (COMPLETIONS, {"prompt": [5] * 4790, "max_tokens": 11}, 400, "at most 4800"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**62}, 400, "at most 4800"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "8"}, 400, "max_tokens"),
    (
        COMPLETIONS,
        {"prompt": "a", "temperature": -0.1},
        400,
        "temperature is invalid; found: -0.1; expected: `float` >= 0.0",
    ),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p is invalid; found: 0; expected: `float` > 0.0"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k is invalid"),
    (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, 400, "min_p is invalid; found: 1.5"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty is invalid"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty is invalid"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, 400, "seed"),
    (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"x": 1}},
        400,
        'logit_bias is invalid; found: {"x": 1}; expected: `int`',
    ),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias[...] is invalid"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1024": 1}}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids is invalid"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}, 400, "bad_words[0] is invalid"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens is more than the answer may have"),
    (
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": [70], "logit_bias": {"70": -100}, "stop_token_ids": [70], "min_tokens": 3},
        400,
        "the engine has no token to go on with",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "temprature": 1},
        400,
        "found: 'temprature'; expected: a field of the OpenAI or vLLM API",
    ),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "did you mean temperature?"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_everything": True}}, 400, "include_everything"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n is invalid; found: 0; expected: `int` >= 1"),
    (COMPLETIONS, {"prompt": ["a"] * 2, "n": 1025}, 400, "too many answers; found: 1025 answers to 2 prompts"),
    (COMPLETIONS, {"prompt": "a", "n": True}, 400, "n is invalid; found: true"),
    (
        COMPLETIONS,
        {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}},
        400,
        "a request with several answers cannot be divided",
    ),
    (COMPLETIONS, {"prompt": "a", "n": 2, "kv_transfer_params": {"do_remote_prefill": True}}, 400, "cannot be divided"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of is not supported"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, 400, "echo is not supported together with logprobs"),
    (CHAT, {"messages": MESSAGES, "echo": True}, 400, "echo is not supported"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, 400, "suffix is not supported"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs is invalid; found: 21; expected: `int` <= 20"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": 7}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "kv_transfer_params": 7}, 400, "kv_transfer_params"),
    (
        COMPLETIONS,
        {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}},
        400,
        "prefill and decode at once",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "kv_transfer_params": {"do_remote_decode": True}},
        400,
        "set stream to false",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "kv_transfer_params": {"do_remote_decode": "yes"}},
        400,
        "invalid do_remote_decode",
    ),
    (COMPLETIONS, {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": 1}}, 400, "invalid do_remote_prefill"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "kv_transfer_params": {"do_remote_decode": True, "kvferry": {"early": "yes"}}},
        400,
        "invalid kvferry.early",
    ),
    (COMPLETIONS, {"prompt": "a", "model": "huge"}, 404, "does not exist"),
    (CHAT, {"messages": []}, 400, "messages is invalid; found: []"),
    (CHAT, {"messages": [{}]}, 400, "role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
    ("/v1/embeddings", {"input": "a"}, 404, "found: POST /v1/embeddings; hint: POST to /v1/completions"),
    ("/health", {}, 405, "found: POST /health; expected: "),
    (COMPLETIONS, {"prompt": ""}, 400, "found: 0 prompt tokens, 16 new ones; expected: at least one"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD_BODIES)
def test_bad_requests_are_told_why(decoder: Served, path: str, body: Any, status: int, words: str) -> None:
    found_status, answer = decoder.ask(path, body)
    assert (found_status, set(answer["error"])) == (status, {"message", "type", "param", "code"})
    assert words in answer["error"]["message"]


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [1024]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "8"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"foo": 1}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1024": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [5, 1024]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop": [5]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    (COMPLETIONS, {"prompt": [1024], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": "a", "name": "b"}]}, "messages[1].name"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_FIELDS)
def test_a_refusal_names_the_field(decoder: Served, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = decoder.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert param.split("[")[0] in answer["error"]["message"]


@pytest.mark.parametrize(("path", "code"), [("/v1/embeddings", "not_found"), ("/health", "method_not_allowed")])
def test_what_is_not_there_has_a_code_of_its_own(decoder: Served, path: str, code: str) -> None:
    assert decoder.ask(path, {})[1]["error"]["code"] == code


def test_a_body_without_end_is_refused(decoder: Served) -> None:
    status, answer = decoder.ask(COMPLETIONS, b'{"prompt": "' + b"a" * (33 << 20) + b'"}')
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert "too large" in answer["error"]["message"]


def test_a_client_that_leaves_before_it_has_sent_its_request_is_no_defect(
    decoder: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    noticed = threading.Event()
    receive = app._body

    async def watched(request: Request) -> bytes:
        try:
            return await receive(request)
        except BaseException as error:
            seen.append(error)
            raise
        finally:
            noticed.set()

    monkeypatch.setattr(app, "_body", watched)
    errors = logging.getLogger("uvicorn.error")
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(errors, "handle", told.append)
    with socket.create_connection(("127.0.0.1", decoder.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n" + b'{"prompt"')
    assert noticed.wait(DEADLINE_S)
    # Its answer is made by then.
    assert decoder.ask("/health")[0] == 200
    assert [type(error) for error in seen] == [ClientDisconnect]
    assert [record.getMessage() for record in told] == []


def test_chat_content_may_come_in_parts(decoder: Served) -> None:
    parts = [{"type": "text", "text": "Where does "}, {"type": "text", "text": "the ferry go?"}]
    lines = [{"role": "user", "content": "Where does \nthe ferry go?"}]
    _, expected = decoder.ask(CHAT, {"messages": lines, "max_tokens": 4})
    _, answer = decoder.ask(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 4})
    assert answer["choices"] == expected["choices"]


def test_a_stream_that_breaks_off_is_not_counted_as_a_good_one(decoder: Served) -> None:
    """Its second token is forbidden, and there is no other one."""
    tokenizer = decoder.engine.tokenizer
    words = (letter for letter in "qzxjkvw" if len(tokenizer(letter * 2, add_special_tokens=False)["input_ids"]) == 2)
    letter = next(words)
    (token_id,) = set(tokenizer(letter * 2, add_special_tokens=False)["input_ids"])
    names = [f'kvferry_engine_requests_total{{role="whole",status="{status}"}}' for status in (200, 400)]
    before = [decoder.metric(name) for name in names]
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}
    status, text = decoder.raw(COMPLETIONS, body | {"allowed_token_ids": [token_id], "bad_words": [letter * 2]})
    assert (status, "no token to go on with" in text, "[DONE]" in text) == (200, True, False)
    assert [decoder.metric(name) for name in names] == [before[0], before[1] + 1]


def test_what_is_nested_too_deeply_to_be_shown_is_told_in_words() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a list with others inside one another"
    assert shown([[1]]) == "[[1]]"
    # Else Python takes it apart one inside the other.
    while value:
        (value,) = value
