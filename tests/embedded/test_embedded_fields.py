"""What becomes of every field of a request: one case per row, and no field of any known API without a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from embedded_server import Served

from kvferry.embedded.request.bodies import ChatBody, CompletionBody
from kvferry.embedded.request.parse import decode_chat, decode_completion
from kvferry.embedded.request.support import SUPPORT, Support, Verdict
from kvferry.errors import RequestError
from kvferry.http.request_fields import Api, Endpoint, fields_of

BODIES = {Endpoint.COMPLETIONS: CompletionBody, Endpoint.CHAT: ChatBody}
CASES = [(row, endpoint) for endpoint, body in BODIES.items() for row in SUPPORT[body].values()]
IDS = [f"{endpoint.value.split('/')[2]}-{row.name}" for row, endpoint in CASES]
KNOWN = Api.VLLM_COMPLETIONS | Api.VLLM_CHAT | Api.OPENAI_COMPLETIONS | Api.OPENAI_CHAT | Api.OLDER
SOMETHING = {"anything": [1]}
HONOURED: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "stop": "x",
    "stream_options": {"include_usage": True},
    "kv_transfer_params": {"do_remote_decode": True},
    "cache_salt": "salt",
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "stop_token_ids": [5],
    **dict.fromkeys(("stream", "return_token_ids", "ignore_eos", "include_stop_str_in_output", "echo"), True),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "best_of", "top_k", "seed", "min_tokens"), 1),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    "repetition_penalty": 1.1,
    "top_logprobs": 2,
    "skip_special_tokens": False,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
}


def decode(endpoint: Endpoint, fields: dict[str, Any]) -> object:
    fields = ({"stream": True} if "stream_options" in fields else {}) | fields
    if endpoint is Endpoint.CHAT:
        fields = ({"logprobs": True} if "top_logprobs" in fields else {}) | fields
        fields = ({"add_generation_prompt": False} if fields.get("continue_final_message") else {}) | fields
        return decode_chat(msgspec.json.encode({"messages": HONOURED["messages"]} | fields))
    return decode_completion(msgspec.json.encode({"prompt": "a"} | fields))


@pytest.mark.parametrize(("row", "endpoint"), CASES, ids=IDS)
def test_every_row_is_what_happens(row: Support, endpoint: Endpoint) -> None:
    nothing = decode(endpoint, {})
    match row.verdict:
        case Verdict.HONOURED:
            expects_same = HONOURED.get(row.name) in ("tiny", "a", 1) or row.name in ("messages", "prompt")
            by_endpoint = {"logprobs": endpoint is Endpoint.CHAT or 1, "add_special_tokens": endpoint is Endpoint.CHAT}
            value = (HONOURED | by_endpoint)[row.name]
            asked = decode(endpoint, {row.name: value})
            assert (asked == nothing) <= expects_same
        case Verdict.REFUSED:
            with pytest.raises(RequestError, match=f"^{row.name} is not supported by the embedded engine: ") as refused:
                decode(endpoint, {row.name: SOMETHING})
            assert refused.value.found.startswith("{'anything'")
            assert refused.value.hint == f"leave {row.name} out"
            for harmless in (None, *row.harmless):
                assert decode(endpoint, {row.name: harmless}) == nothing
        case Verdict.NO_EFFECT:
            assert row.reason
            assert decode(endpoint, {row.name: SOMETHING}) == nothing


@pytest.mark.parametrize("endpoint", list(BODIES))
def test_no_known_field_is_without_a_row(endpoint: Endpoint) -> None:
    """The shared table is compared with vLLM's and OpenAI's own classes; what only SGLang has is refused as unknown."""
    known = {name for name, field in fields_of(endpoint).items() if field.apis & KNOWN}
    assert known - SUPPORT[BODIES[endpoint]].keys() == set()


@pytest.mark.parametrize("endpoint", list(BODIES))
def test_what_nobody_knows_is_refused_unless_it_is_null(endpoint: Endpoint) -> None:
    with pytest.raises(RequestError, match="unknown request field; found: 'regex'"):
        decode(endpoint, {"regex": "a+"})
    assert decode(endpoint, {"regex": None}) == decode(endpoint, {})


@pytest.mark.parametrize("endpoint", list(BODIES))
def test_options_of_a_stream_are_refused_without_one(endpoint: Endpoint) -> None:
    with pytest.raises(RequestError, match="stream_options is only for answers"):
        decode(endpoint, {"stream_options": {"include_usage": True}, "stream": False})


@pytest.mark.parametrize("option", ["continuous_usage_stats", "include_obfuscation"])
def test_an_option_of_a_stream_that_is_not_honoured_may_be_false(option: str) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True, option: False}}
    assert decode(Endpoint.COMPLETIONS, body)
    with pytest.raises(RequestError, match="include_usage and no other option"):
        decode(Endpoint.COMPLETIONS, body | {"stream_options": {option: True}})


def test_types_count() -> None:
    for fields in ({"priority": False}, {"return_prompt_text": 0}, {"use_beam_search": 0}):
        with pytest.raises(RequestError, match="is not supported"):
            decode(Endpoint.COMPLETIONS, fields)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_documentation_names_every_field(verdict: Verdict) -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedded.md").read_text()
    section = page.split(f"## {verdict.value.capitalize()}\n")[1].split("\n## ")[0]
    assert [row.name for row, _ in CASES if row.verdict is verdict and f"`{row.name}`" not in section] == []


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DRAWN = {"prompt": "The ferry crosses", "max_tokens": 12, "temperature": 1.0, "seed": 11, "return_token_ids": True}


def test_a_seed_gives_the_same_answer_and_choices_differ(decoder: Served) -> None:
    _, once = decoder.ask(COMPLETIONS, DRAWN)
    _, again = decoder.ask(COMPLETIONS, DRAWN)
    _, other = decoder.ask(COMPLETIONS, DRAWN | {"seed": 12})
    _, several = decoder.ask(COMPLETIONS, DRAWN | {"n": 3})
    assert once["choices"] == again["choices"]
    ids = [choice["token_ids"] for choice in several["choices"]]
    assert ids[:2] == [once["choices"][0]["token_ids"], other["choices"][0]["token_ids"]]
    assert len({tuple(one) for one in ids}) == 3


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_answers_differ(decoder: Served, seed: int | None) -> None:
    """-1 is none, as in vLLM."""
    fields = DRAWN | {"seed": seed, "temperature": 2.0}
    answers = {tuple(decoder.ask(COMPLETIONS, fields)[1]["choices"][0]["token_ids"]) for _ in range(3)}
    assert len(answers) == 3


@pytest.mark.parametrize("sampling", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.5}])
def test_two_engines_draw_what_one_draws(prefiller: Served, decoder: Served, sampling: dict[str, Any]) -> None:
    fields = DRAWN | sampling
    _, plain = decoder.ask(COMPLETIONS, fields)
    _, prefill = prefiller.ask(COMPLETIONS, fields | {"kv_transfer_params": {"do_remote_decode": True}})
    decode = fields | {"kv_transfer_params": prefill["kv_transfer_params"]}
    _, answer = decoder.ask(COMPLETIONS, decode, {"x-kvferry-report": "true"})
    assert answer["choices"] == plain["choices"]
    assert answer["kvferry"]["tokens_computed"] == 1


def test_a_stop_token_is_hidden_unless_it_is_wanted(decoder: Served) -> None:
    body = {"prompt": "The ferry crosses", "max_tokens": 12, "return_token_ids": True}
    _, whole = decoder.ask(COMPLETIONS, body)
    ids = whole["choices"][0]["token_ids"]
    stop = next(token_id for token_id in ids[3:] if ids.index(token_id) > 2)
    end = ids.index(stop)
    decode_ids = decoder.engine.tokenizer.decode
    for include in (False, True):
        more = {"stop_token_ids": [stop], "include_stop_str_in_output": include}
        _, answer = decoder.ask(COMPLETIONS, body | more)
        (choice,) = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (ids[: end + 1], "stop")
        assert choice["text"] == decode_ids(ids[: end + include])
        events = decoder.events(COMPLETIONS, body | more)
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_a_stop_string_is_shown_when_it_is_wanted(decoder: Served) -> None:
    body = {"prompt": "The ferry crosses", "max_tokens": 20}
    text = decoder.ask(COMPLETIONS, body)[1]["choices"][0]["text"]
    stop = text[8:12]
    _, answer = decoder.ask(COMPLETIONS, body | {"stop": stop, "include_stop_str_in_output": True})
    assert answer["choices"][0]["text"] == text[: text.index(stop) + len(stop)]
    _, longer = decoder.ask(COMPLETIONS, body | {"stop": text[0], "min_tokens": 5, "return_token_ids": True})
    assert len(longer["choices"][0]["token_ids"]) >= 5


def test_bad_words_and_biases_come_from_the_request(decoder: Served) -> None:
    body = {"prompt": "The ferry crosses", "max_tokens": 8, "return_token_ids": True}
    ids = decoder.ask(COMPLETIONS, body)[1]["choices"][0]["token_ids"]
    word = decoder.engine.tokenizer.decode([ids[0]])
    _, without = decoder.ask(COMPLETIONS, body | {"bad_words": [word]})
    assert without["choices"][0]["token_ids"][0] != ids[0]
    _, forced = decoder.ask(COMPLETIONS, body | {"logit_bias": {"77": 100}})
    assert forced["choices"][0]["token_ids"] == [77] * 8


def test_a_chat_may_take_what_the_context_leaves(decoder: Served) -> None:
    num_spare = 40
    word = " ferry"
    tokens_of = decoder.engine.tokenizer
    per_word = len(tokens_of(word * 11)["input_ids"]) - len(tokens_of(word * 10)["input_ids"])
    content = word * ((decoder.engine.max_tokens - num_spare) // per_word)
    _, answer = decoder.ask(CHAT, {"messages": [{"role": "user", "content": content}], "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == decoder.engine.max_tokens
    assert 16 < answer["usage"]["completion_tokens"] <= num_spare


def test_completions_tell_log_probabilities(decoder: Served) -> None:
    body = {"prompt": "The ferry crosses", "max_tokens": 6, "logprobs": 2}
    (choice,) = decoder.ask(COMPLETIONS, body)[1]["choices"]
    told = choice["logprobs"]
    assert {len(value) for value in told.values()} == {6}
    assert "".join(told["tokens"]) == choice["text"]
    for token, logprob, top, offset in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], told["text_offset"], strict=True
    ):
        assert (max(top.values()), len(top)) == (top[token], 2)  # greedy
        assert logprob == top[token] <= 0
        assert choice["text"][offset:].startswith(token)
    events = decoder.events(COMPLETIONS, body)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [one for part in streamed for one in part[name]] for name in told} == told


def test_chats_tell_log_probabilities(decoder: Served) -> None:
    body = {"messages": HONOURED["messages"], "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    (choice,) = decoder.ask(CHAT, body)[1]["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    for one in content:
        assert [best["logprob"] for best in one["top_logprobs"]] == sorted(
            (best["logprob"] for best in one["top_logprobs"]), reverse=True
        )
        assert (len(one["top_logprobs"]), one["top_logprobs"][0]["token"]) == (3, one["token"])
        assert bytes(one["bytes"]).decode() == one["token"]
    streamed = [event["choices"][0]["logprobs"] for event in decoder.events(CHAT, body)]
    assert [one for part in streamed if part for one in part["content"]] == content
    assert [one["top_logprobs"] for one in content] != []
    (plain,) = decoder.ask(CHAT, body | {"top_logprobs": 0})[1]["choices"]
    assert {len(one["top_logprobs"]) for one in plain["logprobs"]["content"]} == {0}
