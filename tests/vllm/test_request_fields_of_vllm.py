"""The table of request fields has the fields of the installed vLLM, so that a new one is noticed."""

import importlib
import warnings

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from kvferry.http.disaggregation import decode_only_reason, needs_prompt_logits
from kvferry.http.request_fields import FIELDS, Api, Endpoint

CLASSES = {
    Api.VLLM_COMPLETIONS: CompletionRequest,
    Api.VLLM_CHAT: ChatCompletionRequest,
    Api.VLLM_RESPONSES: ResponsesRequest,
    Api.VLLM_MESSAGES: AnthropicMessagesRequest,
}
PROMPTS = {
    Endpoint.COMPLETIONS: (CompletionRequest, {"prompt": "a"}),
    Endpoint.CHAT: (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
}


@pytest.mark.parametrize("api", CLASSES, ids=lambda api: api.name.lower())
def test_every_field_has_a_row_and_every_row_a_field(api):
    assert {field.name for field in FIELDS if field.apis & api} == set(CLASSES[api].model_fields)


@pytest.mark.parametrize("endpoint", PROMPTS)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 0},
        {"echo": False, "logprobs": 1},
        {"logprobs": 1},
    ],
)
def test_the_fields_and_vllms_own_parameter_agree_on_who_needs_logits_of_the_prompt(endpoint, asked):
    of_vllm, prompt = PROMPTS[endpoint]
    parameters = of_vllm(**prompt, **asked).to_sampling_params(5, {})
    reason = decode_only_reason(endpoint, prompt | asked)
    assert (reason == "prompt_logprobs") == needs_prompt_logits(parameters.prompt_logprobs)
