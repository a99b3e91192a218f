"""The table of request fields: what a prefill request keeps, changes and drops, row by row, and what forbids one."""

from __future__ import annotations

import json

import pytest
from anthropic.types import message_create_params as messages
from engine_server import is_installed
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from kvferry.http.disaggregation import DECISIVE, decode_only_reason, needs_prompt_logits
from kvferry.http.request_fields import FIELDS, OF_ENDPOINT, Api, Endpoint, InPrefill, dropped, fields_of
from kvferry.router.request.client_request import REMOTE_DECODE, parse_request, prefill_body

ROWS = [(endpoint, field) for endpoint in Endpoint for field in fields_of(endpoint).values()]
PLAIN = {
    Endpoint.COMPLETIONS: {"prompt": "a"},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "a"}]},
    Endpoint.RESPONSES: {"input": "a"},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
}
OLDER = (Endpoint.COMPLETIONS, Endpoint.CHAT)
# Values that the router reads have a type; of all others it passes on what came.
VALUES = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "b"}],
    "model": "m",
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "n": 1,
    "best_of": 1,
    "stream": True,
    "input": [{"role": "user", "content": "b"}],
    "max_output_tokens": 7,
    "background": False,
}
FORBIDDEN = {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
CHANGED = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
CHANGED |= {"max_output_tokens": 1, "store": False}


def prefilled(endpoint: Endpoint, **extra: object) -> dict:
    return json.loads(prefill_body(parse_request(json.dumps(PLAIN[endpoint] | extra).encode(), endpoint)))


@pytest.mark.parametrize(
    ("endpoint", "field"), ROWS, ids=[f"{endpoint.name.lower()}-{field.name}" for endpoint, field in ROWS]
)
def test_a_prefill_request_does_with_each_field_what_its_row_says(endpoint, field):
    value = VALUES.get(field.name, {"anything": [1, None]})
    sent = prefilled(endpoint, **({} if field.name in FORBIDDEN else {field.name: value}))
    match field.in_prefill:
        case InPrefill.KEPT:
            assert sent[field.name] == value
        case InPrefill.DROPPED:
            assert field.name not in sent
        case InPrefill.CHANGED:
            assert sent[field.name] == CHANGED[field.name]
    assert field.reason


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_field_of_no_row_is_kept(endpoint):
    assert prefilled(endpoint, of_tomorrow={"a": 1})["of_tomorrow"] == {"a": 1}


@pytest.mark.parametrize("endpoint", Endpoint)
def test_no_endpoint_has_two_rows_for_a_field(endpoint):
    names = [field.name for field in FIELDS if field.apis & OF_ENDPOINT[endpoint]]
    assert len(names) == len(set(names))


# Written out, so that a slip in the table is not a slip here, too.
@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        *((endpoint, name) for endpoint in OLDER for name in ("min_tokens", "stop", "stream_options", "logprobs")),
        *((endpoint, name) for endpoint in OLDER for name in ("structured_outputs", "guided_json", "ignore_eos")),
        *((Endpoint.RESPONSES, name) for name in ("stop", "structured_outputs", "include", "ignore_eos")),
        (Endpoint.MESSAGES, "stop_sequences"),
        (Endpoint.COMPLETIONS, "response_format"),
        (Endpoint.COMPLETIONS, "echo"),
        (Endpoint.CHAT, "top_logprobs"),
    ],
)
def test_what_one_token_cannot_fulfil_is_not_asked_of_prefill(endpoint, name):
    assert name in dropped(endpoint)


OF_THE_PROMPT = (
    "tools tool_choice response_format chat_template chat_template_kwargs add_generation_prompt continue_final_message"
    " documents mm_processor_kwargs reasoning_effort cache_salt priority"
)


@pytest.mark.parametrize("name", OF_THE_PROMPT.split())
def test_what_may_change_the_prompt_of_a_chat_or_its_turn_is_asked_of_prefill(name):
    assert name not in dropped(Endpoint.CHAT)


@pytest.mark.parametrize("name", ["instructions", "tools", "text", "reasoning", "chat_template_kwargs", "cache_salt"])
def test_what_may_change_the_prompt_of_a_response_is_asked_of_prefill(name):
    assert name not in dropped(Endpoint.RESPONSES)


@pytest.mark.parametrize("name", ["system", "tools", "tool_choice", "thinking", "output_config", "cache_salt"])
def test_what_may_change_the_prompt_of_a_message_is_asked_of_prefill(name):
    assert name not in dropped(Endpoint.MESSAGES)


# Written out, too: vLLM and SGLang run these by themselves.
OF_ENGINES = ("code_interpreter", "container", "mcp", "web_search_preview")
COMPLETION, CHAT, RESPONSE = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES


@pytest.mark.parametrize(
    ("endpoint", "extra", "label"),
    [
        (COMPLETION, {"prompt": ["a", "b"]}, "several_sequences"),
        (COMPLETION, {"prompt_embeds": ["a", "b"], "prompt": None}, "several_sequences"),
        (COMPLETION, {"prompt_embeds": "a"}, "several_sequences"),
        (CHAT, {"n": 2}, "several_sequences"),
        (COMPLETION, {"best_of": 2}, "several_sequences"),
        (CHAT, {"use_beam_search": True}, "several_sequences"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETION, {"prompt_logprobs": 3}, "prompt_logprobs"),
        (COMPLETION, {"echo": True, "logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "prompt_logprobs"),
        (CHAT, {"return_hidden_states": True}, "prompt_outputs"),
        (COMPLETION, {"return_routed_experts": True}, "prompt_outputs"),
        (CHAT, {"routed_experts_prompt_start": 0}, "prompt_outputs"),
        (CHAT, {"truncate_prompt_tokens": -1}, "truncated_prompt"),
        (CHAT, {"session_params": {"id": "s"}}, "engine_session"),
        (COMPLETION, {"prompt": ["a"]}, ""),
        (COMPLETION, {"prompt": [1, 2]}, ""),
        (COMPLETION, {"prompt": None, "prompt_embeds": ["a"]}, ""),
        (COMPLETION, {"n": 1, "best_of": None, "use_beam_search": False}, ""),
        (COMPLETION, {"echo": True}, ""),
        (COMPLETION, {"echo": True, "logprobs": None}, ""),
        (COMPLETION, {"logprobs": 5}, ""),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, ""),
        (CHAT, {"echo": False, "prompt_logprobs": None}, ""),
        (CHAT, {"truncate_prompt_tokens": 9}, ""),
        (CHAT, {"session_params": None, "return_hidden_states": False}, ""),
        (RESPONSE, {"previous_response_id": "resp_1"}, "engine_session"),
        (RESPONSE, {"conversation": "c"}, "engine_session"),
        (RESPONSE, {"truncation": "auto"}, "truncated_prompt"),
        (RESPONSE, {"tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}, "engine_tools"),
        *((RESPONSE, {"tools": [{"type": name}]}, "engine_tools") for name in OF_ENGINES),
        (RESPONSE, {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}, "odd"]}, ""),
        # vLLM cuts unless it is told not to.
        (RESPONSE, {"truncation": None}, "truncated_prompt"),
        (RESPONSE, {"tools": None, "truncation": "disabled", "previous_response_id": None}, ""),
        (Endpoint.MESSAGES, {"tools": [{"name": "f"}, {"type": "mcp"}]}, ""),
    ],
)
def test_what_one_prefill_cannot_stand_for(endpoint, extra, label):
    request = parse_request(json.dumps(PLAIN[endpoint] | extra).encode(), endpoint)
    assert request.undivided_reason == label


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_label_of_the_table_can_be_reached(endpoint):
    asking = {"truncation": "auto", "tools": [{"type": "mcp"}]}
    asking |= {"n": 2, "best_of": 2, "prompt": ["a", "b"], "prompt_embeds": ["a", "b"], "truncate_prompt_tokens": -1}
    for name, label in DECISIVE[endpoint].items():
        asked = {name: asking.get(name, True)} | ({"echo": True, "logprobs": 1} if name in ("echo", "logprobs") else {})
        assert decode_only_reason(endpoint, asked) == label


@pytest.mark.parametrize(("prompt_logprobs", "needs"), [(None, False), (0, True), (5, True), (-1, True)])
def test_a_connector_asks_the_same_of_vllms_parameter(prompt_logprobs, needs):
    assert needs_prompt_logits(prompt_logprobs) is needs


def of_api(api: Api) -> set[str]:
    return {field.name for field in FIELDS if field.apis & api}


def test_the_columns_of_openai_are_its_clients():
    assert of_api(Api.OPENAI_COMPLETIONS) == {*completions.CompletionCreateParamsBase.__annotations__, "stream"}
    assert of_api(Api.OPENAI_CHAT) == {*chat.CompletionCreateParamsBase.__annotations__, "stream"}
    assert of_api(Api.OPENAI_RESPONSES) == {*responses.ResponseCreateParamsBase.__annotations__, "stream"}


def test_the_column_of_anthropic_is_its_clients():
    assert of_api(Api.ANTHROPIC_MESSAGES) == {*messages.MessageCreateParamsBase.__annotations__, "stream"}


@pytest.mark.skipif(not is_installed("sglang"), reason="sglang is not installed")
def test_the_columns_of_sglang_are_its_request_classes():
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

    assert of_api(Api.SGLANG_COMPLETIONS) == set(CompletionRequest.model_fields)
    assert of_api(Api.SGLANG_CHAT) == set(ChatCompletionRequest.model_fields)
    assert of_api(Api.SGLANG_RESPONSES) == set(ResponsesRequest.model_fields)
    assert of_api(Api.SGLANG_MESSAGES) == set(AnthropicMessagesRequest.model_fields)
