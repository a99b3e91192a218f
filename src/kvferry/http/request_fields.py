"""What a prefill request does with each field of a request that generates: one table, pure.

A prefill request asks an engine for the cache of a prompt and for one token, which nobody reads: the decode engine
computes the prompt's last token again and writes the whole answer. So it keeps what decides the prompt, the choice of
the cache, or the place in a queue; it drops what a single token cannot fulfil and what only shapes an answer that is
thrown away. A field that is in no row is kept: an engine may use it for the prompt, and a prompt that differs costs
more than a field too many. `kvferry.http.disaggregation` says when a field with a label forbids a prefill request.
The value of a field that is changed is set where the request is made: `kvferry.router.request.client_request`.

The columns are the request classes of vLLM 0.32, of SGLang 0.5.23, and of OpenAI's and Anthropic's clients; tests
compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, StrEnum, auto


class Endpoint(StrEnum):
    """The paths that generate text."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class Api(Flag):
    """The APIs whose requests have a field. `OLDER`: vLLM's fields before 0.12, and what its proxies still send."""

    VLLM_COMPLETIONS = auto()
    VLLM_CHAT = auto()
    SGLANG_COMPLETIONS = auto()
    SGLANG_CHAT = auto()
    OPENAI_COMPLETIONS = auto()
    OPENAI_CHAT = auto()
    OLDER = auto()
    VLLM_RESPONSES = auto()
    SGLANG_RESPONSES = auto()
    OPENAI_RESPONSES = auto()
    VLLM_MESSAGES = auto()
    SGLANG_MESSAGES = auto()
    ANTHROPIC_MESSAGES = auto()


class InPrefill(StrEnum):
    """What becomes of a field in the prefill request."""

    KEPT = "kept"
    CHANGED = "changed"
    DROPPED = "dropped"


class DecodeOnlyReason(StrEnum):
    """Why one prefill cannot stand for a whole request; the labels of the router's `reason`."""

    SEVERAL_SEQUENCES = "several_sequences"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PROMPT_OUTPUTS = "prompt_outputs"
    TRUNCATED_PROMPT = "truncated_prompt"
    ENGINE_SESSION = "engine_session"
    ENGINE_TOOLS = "engine_tools"


@dataclass(frozen=True, slots=True)
class RequestField:
    """One row. `decode_only` is the label of the reason that the field can give against a prefill request, if any."""

    name: str
    apis: Api
    in_prefill: InPrefill
    reason: str
    decode_only: DecodeOnlyReason | None = None


VLLM_COMPLETIONS, VLLM_CHAT = Api.VLLM_COMPLETIONS, Api.VLLM_CHAT
SGLANG_COMPLETIONS, SGLANG_CHAT = Api.SGLANG_COMPLETIONS, Api.SGLANG_CHAT
OPENAI_COMPLETIONS, OPENAI_CHAT = Api.OPENAI_COMPLETIONS, Api.OPENAI_CHAT
VLLM_RESPONSES, SGLANG_RESPONSES, OPENAI_RESPONSES = Api.VLLM_RESPONSES, Api.SGLANG_RESPONSES, Api.OPENAI_RESPONSES
VLLM_MESSAGES, SGLANG_MESSAGES, ANTHROPIC_MESSAGES = Api.VLLM_MESSAGES, Api.SGLANG_MESSAGES, Api.ANTHROPIC_MESSAGES
OLDER = Api.OLDER
# The APIs of completions and chats, unless a name says otherwise.
VLLM, SGLANG, OPENAI = VLLM_COMPLETIONS | VLLM_CHAT, SGLANG_COMPLETIONS | SGLANG_CHAT, OPENAI_COMPLETIONS | OPENAI_CHAT
ENGINES, CHAT = VLLM | SGLANG, VLLM_CHAT | SGLANG_CHAT | OPENAI_CHAT
EVERY = ENGINES | OPENAI
COMPLETIONS = VLLM_COMPLETIONS | SGLANG_COMPLETIONS | OPENAI_COMPLETIONS
RESPONSES, MESSAGES = (
    VLLM_RESPONSES | SGLANG_RESPONSES | OPENAI_RESPONSES,
    VLLM_MESSAGES | SGLANG_MESSAGES | ANTHROPIC_MESSAGES,
)
OF_ENDPOINT = {
    Endpoint.COMPLETIONS: COMPLETIONS | OLDER,
    Endpoint.CHAT: CHAT | OLDER,
    Endpoint.RESPONSES: RESPONSES,
    Endpoint.MESSAGES: MESSAGES,
}

KEPT, CHANGED, DROPPED = InPrefill.KEPT, InPrefill.CHANGED, InPrefill.DROPPED

PROMPT = "decides the tokens of the prompt"
TEMPLATE = "chat templates see it"
MEDIA = "decides how images, audio or video become a part of the prompt"
CACHE = "decides which cached prompts the request may use"
ROUTING = "decides where or when the engine works on it"
SAMPLING = "decides how a token is drawn, which one token can fulfil"
UNUSED = "says something about the client or the account; engines ignore it"
LENGTH = "a prefill request asks for one token"
ENDING = "says where an answer ends, and a single token has no such place"
GRAMMAR = "a single token cannot fulfil a grammar, and compiling one takes time"
ANSWER = "shapes an answer that is not read"
STREAM = "its answer is no stream, or a stream of one token"
RANK = "names a rank of one engine; prefill and decode run on two"
ONE_SEQUENCE = "a prefill request answers with the cache of one sequence"
WHERE_COMPUTED = "exists only where the prompt is computed"
PAIRING = "pairs SGLang's prefill and decode requests"
IN_LOGS = "names the request in logs"
ASKS = "asks for a cache that another engine will read"


def _rows(apis: Api, in_prefill: InPrefill, reason: str, names: str) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, apis, in_prefill, reason) for name in names.split())


OF_BOTH: tuple[RequestField, ...] = (
    # What decides the prompt and its cache.
    RequestField("model", EVERY, KEPT, "names the model, or the adapter"),
    RequestField("prompt", COMPLETIONS, KEPT, PROMPT, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("prompt_embeds", VLLM_COMPLETIONS, KEPT, PROMPT, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("messages", CHAT, KEPT, PROMPT),
    RequestField("suffix", COMPLETIONS, KEPT, "SGLang's prompt to fill in the middle has it"),
    RequestField("input_ids", SGLANG_CHAT, KEPT, PROMPT),
    RequestField("tools", CHAT, KEPT, TEMPLATE),
    RequestField(
        "tool_choice", CHAT, KEPT, "a named tool, or none, leaves other tools out of SGLang's or vLLM's prompt"
    ),
    RequestField("response_format", CHAT, KEPT, "templates such as Kimi K3's see it"),
    RequestField("truncate_prompt_tokens", VLLM, KEPT, PROMPT, DecodeOnlyReason.TRUNCATED_PROMPT),
    *_rows(VLLM, KEPT, PROMPT, "truncation_side add_special_tokens"),
    *_rows(OPENAI_CHAT, KEPT, TEMPLATE, "functions function_call"),
    *_rows(CHAT, KEPT, TEMPLATE, "reasoning_effort parallel_tool_calls"),
    *_rows(VLLM_CHAT, KEPT, TEMPLATE, "add_generation_prompt documents chat_template include_reasoning"),
    *_rows(VLLM_CHAT | SGLANG_CHAT, KEPT, TEMPLATE, "continue_final_message chat_template_kwargs"),
    *_rows(SGLANG_CHAT, KEPT, TEMPLATE, "thinking task separate_reasoning"),
    *_rows(OLDER, KEPT, TEMPLATE, "reasoning"),
    RequestField("mm_processor_kwargs", VLLM_CHAT | SGLANG, KEPT, MEDIA),
    RequestField("media_io_kwargs", VLLM_CHAT, KEPT, MEDIA),
    *_rows(SGLANG, KEPT, MEDIA, "images_config"),
    *_rows(SGLANG_CHAT, KEPT, MEDIA, "max_dynamic_patch min_dynamic_patch use_audio_in_video video_config"),
    RequestField("ec_transfer_params", VLLM, KEPT, "refers to encoded images, which prefill reads"),
    RequestField("cache_salt", ENGINES, KEPT, CACHE),
    RequestField("extra_key", SGLANG, KEPT, CACHE),
    RequestField("lora_path", SGLANG, KEPT, "names the adapter"),
    *_rows(OPENAI_CHAT, KEPT, CACHE, "prompt_cache_key prompt_cache_options prompt_cache_retention"),
    # What decides where and when.
    *_rows(ENGINES, KEPT, ROUTING, "priority session_id"),
    *_rows(VLLM, KEPT, IN_LOGS, "request_id"),
    *_rows(SGLANG, KEPT, IN_LOGS, "rid"),
    RequestField("session_params", SGLANG, KEPT, "continues a session of one engine", DecodeOnlyReason.ENGINE_SESSION),
    *_rows(SGLANG, DROPPED, RANK, "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"),
    *_rows(SGLANG, DROPPED, PAIRING, "bootstrap_host bootstrap_port bootstrap_room"),
    RequestField("kv_transfer_params", VLLM, CHANGED, ASKS),
    # How much is computed, and how it is answered.
    RequestField("max_tokens", EVERY, CHANGED, LENGTH),
    RequestField("max_completion_tokens", CHAT, CHANGED, LENGTH),
    RequestField("stream", EVERY, CHANGED, "true only where it refers to its cache before it is computed"),
    RequestField("stream_options", EVERY, DROPPED, STREAM),
    *_rows(VLLM, DROPPED, STREAM, "stream_interval"),
    *_rows(SGLANG_CHAT, DROPPED, STREAM, "stream_reasoning"),
    RequestField("n", EVERY, KEPT, ONE_SEQUENCE, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField(
        "best_of",
        SGLANG_COMPLETIONS | OPENAI_COMPLETIONS | OLDER,
        KEPT,
        ONE_SEQUENCE,
        DecodeOnlyReason.SEVERAL_SEQUENCES,
    ),
    RequestField("use_beam_search", VLLM, KEPT, ONE_SEQUENCE, DecodeOnlyReason.SEVERAL_SEQUENCES),
    *_rows(VLLM, KEPT, "applies to beam search only", "length_penalty"),
    *_rows(OLDER, KEPT, "applies to beam search only", "early_stopping"),
    # What is computed with the prompt, and told in the answer.
    RequestField("prompt_logprobs", VLLM, DROPPED, WHERE_COMPUTED, DecodeOnlyReason.PROMPT_LOGPROBS),
    RequestField("echo", COMPLETIONS, DROPPED, ANSWER, DecodeOnlyReason.PROMPT_LOGPROBS),
    RequestField(
        "echo", VLLM_CHAT, KEPT, "vLLM computes logits of the prompt for it", DecodeOnlyReason.PROMPT_LOGPROBS
    ),
    RequestField("return_hidden_states", SGLANG, DROPPED, WHERE_COMPUTED, DecodeOnlyReason.PROMPT_OUTPUTS),
    RequestField("return_routed_experts", SGLANG, DROPPED, WHERE_COMPUTED, DecodeOnlyReason.PROMPT_OUTPUTS),
    RequestField("routed_experts_prompt_start", VLLM, DROPPED, WHERE_COMPUTED, DecodeOnlyReason.PROMPT_OUTPUTS),
    *_rows(SGLANG, DROPPED, "goes with return_routed_experts", "routed_experts_start_len"),
    RequestField("return_cached_tokens_details", SGLANG, KEPT, "what prefill found cached is told to the client"),
    # What one token cannot finish.
    *_rows(ENGINES, DROPPED, "more than the one token would be refused", "min_tokens"),
    *_rows(EVERY, DROPPED, ENDING, "stop"),
    *_rows(ENGINES, DROPPED, ENDING, "stop_token_ids ignore_eos"),
    *_rows(VLLM, DROPPED, ENDING, "include_stop_str_in_output repetition_detection thinking_token_budget"),
    *_rows(SGLANG, DROPPED, ENDING, "stop_regex no_stop_trim"),
    *_rows(VLLM, DROPPED, GRAMMAR, "structured_outputs"),
    *_rows(VLLM_COMPLETIONS | SGLANG_COMPLETIONS, DROPPED, GRAMMAR, "response_format"),
    *_rows(SGLANG, DROPPED, GRAMMAR, "regex ebnf"),
    *_rows(SGLANG_COMPLETIONS, DROPPED, GRAMMAR, "json_schema"),
    *_rows(OLDER, DROPPED, GRAMMAR, "guided_json guided_regex guided_choice guided_grammar guided_json_object"),
    *_rows(OLDER, DROPPED, GRAMMAR, "guided_decoding_backend guided_whitespace_pattern structural_tag"),
    # What only shapes the answer.
    *_rows(EVERY, DROPPED, ANSWER, "logprobs"),
    *_rows(CHAT, DROPPED, ANSWER, "top_logprobs"),
    *_rows(VLLM, DROPPED, ANSWER, "logprob_token_ids return_tokens_as_token_ids return_token_offsets"),
    *_rows(ENGINES, DROPPED, ANSWER, "return_token_ids skip_special_tokens"),
    *_rows(VLLM, DROPPED, ANSWER, "spaces_between_special_tokens mm_payload return_mm_kwargs"),
    *_rows(VLLM_CHAT, DROPPED, ANSWER, "return_prompt_text"),
    *_rows(SGLANG, DROPPED, ANSWER, "return_spec_tokens_details"),
    *_rows(SGLANG_CHAT, DROPPED, ANSWER, "return_prompt_token_ids return_meta_info return_input_ids_in_sglext"),
    *_rows(SGLANG_CHAT, DROPPED, ANSWER, "return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode"),
    *_rows(SGLANG_CHAT, DROPPED, ANSWER, "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64"),
    # How a token is drawn.
    *_rows(EVERY, KEPT, SAMPLING, "temperature top_p seed frequency_penalty presence_penalty logit_bias"),
    *_rows(ENGINES, KEPT, SAMPLING, "top_k min_p repetition_penalty"),
    *_rows(VLLM, KEPT, SAMPLING, "allowed_token_ids bad_words watermarking vllm_xargs"),
    *_rows(SGLANG, KEPT, SAMPLING, "custom_params custom_logit_processor watermark"),
    *_rows(OLDER, KEPT, SAMPLING, "logits_processors"),
    # What engines do not look at.
    *_rows(EVERY, KEPT, UNUSED, "user"),
    *_rows(SGLANG_COMPLETIONS, KEPT, "labels the engine's counters", "custom_labels"),
    *_rows(OPENAI_CHAT, KEPT, UNUSED, "metadata safety_identifier service_tier store moderation"),
    *_rows(OPENAI_CHAT, KEPT, UNUSED, "audio modalities prediction verbosity web_search_options"),
)
"""Chats and completions."""

OF_RESPONSES: tuple[RequestField, ...] = (
    RequestField("model", RESPONSES, KEPT, "names the model, or the adapter"),
    *_rows(RESPONSES, KEPT, PROMPT, "input instructions"),
    *_rows(VLLM_RESPONSES | OPENAI_RESPONSES, KEPT, PROMPT, "prompt"),
    *_rows(VLLM_RESPONSES, KEPT, PROMPT, "previous_input_messages"),
    RequestField("tools", RESPONSES, KEPT, TEMPLATE, DecodeOnlyReason.ENGINE_TOOLS),
    *_rows(RESPONSES, KEPT, TEMPLATE, "tool_choice parallel_tool_calls reasoning text"),
    *_rows(VLLM_RESPONSES, KEPT, TEMPLATE, "include_reasoning"),
    *_rows(VLLM_RESPONSES | SGLANG_RESPONSES, KEPT, TEMPLATE, "chat_template_kwargs"),
    RequestField("truncation", RESPONSES, KEPT, PROMPT, DecodeOnlyReason.TRUNCATED_PROMPT),
    *_rows(VLLM_RESPONSES, KEPT, MEDIA, "media_io_kwargs mm_processor_kwargs"),
    *_rows(VLLM_RESPONSES, KEPT, "refers to encoded images, which prefill reads", "ec_transfer_params"),
    *_rows(VLLM_RESPONSES | SGLANG_RESPONSES, KEPT, CACHE, "cache_salt"),
    *_rows(SGLANG_RESPONSES, KEPT, CACHE, "extra_key"),
    *_rows(VLLM_RESPONSES | OPENAI_RESPONSES, KEPT, CACHE, "prompt_cache_key"),
    *_rows(OPENAI_RESPONSES, KEPT, CACHE, "prompt_cache_options prompt_cache_retention"),
    *_rows(VLLM_RESPONSES | SGLANG_RESPONSES, KEPT, ROUTING, "priority session_id"),
    *_rows(VLLM_RESPONSES | SGLANG_RESPONSES, KEPT, IN_LOGS, "request_id"),
    RequestField("previous_response_id", RESPONSES, KEPT, "is kept by one engine", DecodeOnlyReason.ENGINE_SESSION),
    RequestField("conversation", OPENAI_RESPONSES, KEPT, "is kept by one engine", DecodeOnlyReason.ENGINE_SESSION),
    RequestField("store", RESPONSES, CHANGED, "nobody asks for the answer of a prefill request again"),
    *_rows(RESPONSES, KEPT, "the router refuses it if it is true", "background"),
    *_rows(SGLANG_RESPONSES, DROPPED, RANK, "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"),
    *_rows(SGLANG_RESPONSES, DROPPED, PAIRING, "bootstrap_host bootstrap_port bootstrap_room"),
    RequestField("kv_transfer_params", VLLM_RESPONSES, CHANGED, ASKS),
    RequestField("max_output_tokens", RESPONSES, CHANGED, LENGTH),
    RequestField("stream", RESPONSES, CHANGED, STREAM),
    *_rows(OPENAI_RESPONSES, DROPPED, STREAM, "stream_options"),
    *_rows(RESPONSES, DROPPED, ENDING, "max_tool_calls"),
    *_rows(VLLM_RESPONSES | SGLANG_RESPONSES, DROPPED, ENDING, "stop"),
    *_rows(VLLM_RESPONSES, DROPPED, ENDING, "stop_token_ids ignore_eos include_stop_str_in_output"),
    *_rows(VLLM_RESPONSES, DROPPED, GRAMMAR, "structured_outputs"),
    *_rows(RESPONSES, DROPPED, ANSWER, "include top_logprobs"),
    *_rows(VLLM_RESPONSES, DROPPED, ANSWER, "skip_special_tokens enable_response_messages mm_payload return_mm_kwargs"),
    *_rows(RESPONSES, KEPT, SAMPLING, "temperature top_p"),
    *_rows(
        VLLM_RESPONSES | SGLANG_RESPONSES,
        KEPT,
        SAMPLING,
        "top_k min_p frequency_penalty presence_penalty repetition_penalty",
    ),
    *_rows(VLLM_RESPONSES, KEPT, SAMPLING, "logit_bias seed watermarking vllm_xargs"),
    *_rows(RESPONSES, KEPT, UNUSED, "metadata service_tier user"),
    *_rows(OPENAI_RESPONSES, KEPT, UNUSED, "access_programs background_options context_management image moderation"),
    *_rows(OPENAI_RESPONSES, KEPT, UNUSED, "safety_identifier"),
)
"""OpenAI's Responses API."""

OF_MESSAGES: tuple[RequestField, ...] = (
    RequestField("model", MESSAGES, KEPT, "names the model, or the adapter"),
    *_rows(MESSAGES, KEPT, PROMPT, "messages system"),
    *_rows(MESSAGES, KEPT, TEMPLATE, "tools tool_choice thinking output_config"),
    *_rows(VLLM_MESSAGES, KEPT, TEMPLATE, "chat_template_kwargs"),
    *_rows(VLLM_MESSAGES, KEPT, "refers to encoded images, which prefill reads", "ec_transfer_params"),
    *_rows(VLLM_MESSAGES, KEPT, CACHE, "cache_salt"),
    *_rows(ANTHROPIC_MESSAGES, KEPT, CACHE, "cache_control"),
    *_rows(SGLANG_MESSAGES, DROPPED, RANK, "routed_dp_rank disagg_prefill_dp_rank"),
    *_rows(SGLANG_MESSAGES, DROPPED, PAIRING, "bootstrap_host bootstrap_port bootstrap_room"),
    RequestField("kv_transfer_params", VLLM_MESSAGES, CHANGED, ASKS),
    RequestField("max_tokens", MESSAGES, CHANGED, LENGTH),
    RequestField("stream", MESSAGES, CHANGED, STREAM),
    *_rows(MESSAGES, DROPPED, ENDING, "stop_sequences"),
    *_rows(VLLM_MESSAGES, DROPPED, ANSWER, "mm_payload return_mm_kwargs"),
    *_rows(VLLM_MESSAGES | SGLANG_MESSAGES, KEPT, SAMPLING, "temperature top_k top_p"),
    *_rows(VLLM_MESSAGES, KEPT, SAMPLING, "watermarking vllm_xargs"),
    *_rows(MESSAGES, KEPT, UNUSED, "metadata"),
    *_rows(SGLANG_MESSAGES, KEPT, UNUSED, "betas"),
    *_rows(
        ANTHROPIC_MESSAGES,
        KEPT,
        UNUSED,
        "container diagnostics inference_geo service_tier speed user_profile_id workspace_id",
    ),
)
"""Anthropic's Messages API."""

FIELDS = (*OF_BOTH, *OF_RESPONSES, *OF_MESSAGES)


# The rows by field name, made once because every request is looked up in them.
FIELDS_OF: dict[Endpoint, dict[str, RequestField]] = {
    endpoint: {field.name: field for field in FIELDS if field.apis & apis} for endpoint, apis in OF_ENDPOINT.items()
}


def fields_of(endpoint: Endpoint) -> Mapping[str, RequestField]:
    """The rows of one endpoint, by the field's name."""
    return FIELDS_OF[endpoint]


def dropped(endpoint: Endpoint) -> frozenset[str]:
    """The fields that a prefill request leaves out."""
    return frozenset(name for name, field in fields_of(endpoint).items() if field.in_prefill is DROPPED)


def dropped_before_first_token(endpoint: Endpoint) -> frozenset[str]:
    """The fields that a prefill request leaves out where its one token is the first of the answer, as in rooms: what
    decides how that token is drawn, and what is told of it, stays."""
    return frozenset(name for name in dropped(endpoint) if fields_of(endpoint)[name].reason in (STREAM, RANK))
