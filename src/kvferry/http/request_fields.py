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
    """Whose request has the field. `OLDER` are vLLM's fields before 0.12, and what vLLM's proxies still send."""

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
    """`decode_only` is the label of the reason that the field can give against a prefill request, if there is one."""

    name: str
    apis: Api
    in_prefill: InPrefill
    reason: str
    decode_only: DecodeOnlyReason | None = None


VC, VT = Api.VLLM_COMPLETIONS, Api.VLLM_CHAT
SC, ST = Api.SGLANG_COMPLETIONS, Api.SGLANG_CHAT
OC, OT = Api.OPENAI_COMPLETIONS, Api.OPENAI_CHAT
VLLM, SGLANG, OPENAI = VC | VT, SC | ST, OC | OT
ENGINES, CHAT = VLLM | SGLANG, VT | ST | OT
EVERY = ENGINES | OPENAI
VR, SR, OR = Api.VLLM_RESPONSES, Api.SGLANG_RESPONSES, Api.OPENAI_RESPONSES
VM, SM, AM = Api.VLLM_MESSAGES, Api.SGLANG_MESSAGES, Api.ANTHROPIC_MESSAGES
RESPONSES, MESSAGES = VR | SR | OR, VM | SM | AM
OF_ENDPOINT = {
    Endpoint.COMPLETIONS: VC | SC | OC | Api.OLDER,
    Endpoint.CHAT: CHAT | Api.OLDER,
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
    RequestField("prompt", VC | SC | OC, KEPT, PROMPT, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("prompt_embeds", VC, KEPT, PROMPT, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("messages", CHAT, KEPT, PROMPT),
    RequestField("suffix", VC | SC | OC, KEPT, "SGLang's prompt to fill in the middle has it"),
    RequestField("input_ids", ST, KEPT, PROMPT),
    RequestField("tools", CHAT, KEPT, TEMPLATE),
    RequestField(
        "tool_choice", CHAT, KEPT, "a named tool, or none, leaves other tools out of SGLang's or vLLM's prompt"
    ),
    RequestField("response_format", CHAT, KEPT, "templates such as Kimi K3's see it"),
    RequestField("truncate_prompt_tokens", VLLM, KEPT, PROMPT, DecodeOnlyReason.TRUNCATED_PROMPT),
    *_rows(VLLM, KEPT, PROMPT, "truncation_side add_special_tokens"),
    *_rows(OT, KEPT, TEMPLATE, "functions function_call"),
    *_rows(CHAT, KEPT, TEMPLATE, "reasoning_effort parallel_tool_calls"),
    *_rows(VT, KEPT, TEMPLATE, "add_generation_prompt documents chat_template include_reasoning"),
    *_rows(VT | ST, KEPT, TEMPLATE, "continue_final_message chat_template_kwargs"),
    *_rows(ST, KEPT, TEMPLATE, "thinking task separate_reasoning"),
    *_rows(Api.OLDER, KEPT, TEMPLATE, "reasoning"),
    RequestField("mm_processor_kwargs", VT | SGLANG, KEPT, MEDIA),
    RequestField("media_io_kwargs", VT, KEPT, MEDIA),
    *_rows(SGLANG, KEPT, MEDIA, "images_config"),
    *_rows(ST, KEPT, MEDIA, "max_dynamic_patch min_dynamic_patch use_audio_in_video video_config"),
    RequestField("ec_transfer_params", VLLM, KEPT, "refers to encoded images, which prefill reads"),
    RequestField("cache_salt", ENGINES, KEPT, CACHE),
    RequestField("extra_key", SGLANG, KEPT, CACHE),
    RequestField("lora_path", SGLANG, KEPT, "names the adapter"),
    *_rows(OT, KEPT, CACHE, "prompt_cache_key prompt_cache_options prompt_cache_retention"),
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
    *_rows(ST, DROPPED, STREAM, "stream_reasoning"),
    RequestField("n", EVERY, KEPT, ONE_SEQUENCE, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("best_of", SC | OC | Api.OLDER, KEPT, ONE_SEQUENCE, DecodeOnlyReason.SEVERAL_SEQUENCES),
    RequestField("use_beam_search", VLLM, KEPT, ONE_SEQUENCE, DecodeOnlyReason.SEVERAL_SEQUENCES),
    *_rows(VLLM, KEPT, "applies to beam search only", "length_penalty"),
    *_rows(Api.OLDER, KEPT, "applies to beam search only", "early_stopping"),
    # What is computed with the prompt, and told in the answer.
    RequestField("prompt_logprobs", VLLM, DROPPED, WHERE_COMPUTED, DecodeOnlyReason.PROMPT_LOGPROBS),
    RequestField("echo", VC | SC | OC, DROPPED, ANSWER, DecodeOnlyReason.PROMPT_LOGPROBS),
    RequestField("echo", VT, KEPT, "vLLM computes logits of the prompt for it", DecodeOnlyReason.PROMPT_LOGPROBS),
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
    *_rows(VC | SC, DROPPED, GRAMMAR, "response_format"),
    *_rows(SGLANG, DROPPED, GRAMMAR, "regex ebnf"),
    *_rows(SC, DROPPED, GRAMMAR, "json_schema"),
    *_rows(Api.OLDER, DROPPED, GRAMMAR, "guided_json guided_regex guided_choice guided_grammar guided_json_object"),
    *_rows(Api.OLDER, DROPPED, GRAMMAR, "guided_decoding_backend guided_whitespace_pattern structural_tag"),
    # What only shapes the answer.
    *_rows(EVERY, DROPPED, ANSWER, "logprobs"),
    *_rows(CHAT, DROPPED, ANSWER, "top_logprobs"),
    *_rows(VLLM, DROPPED, ANSWER, "logprob_token_ids return_tokens_as_token_ids return_token_offsets"),
    *_rows(ENGINES, DROPPED, ANSWER, "return_token_ids skip_special_tokens"),
    *_rows(VLLM, DROPPED, ANSWER, "spaces_between_special_tokens mm_payload return_mm_kwargs"),
    *_rows(VT, DROPPED, ANSWER, "return_prompt_text"),
    *_rows(SGLANG, DROPPED, ANSWER, "return_spec_tokens_details"),
    *_rows(ST, DROPPED, ANSWER, "return_prompt_token_ids return_meta_info return_input_ids_in_sglext"),
    *_rows(ST, DROPPED, ANSWER, "return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode"),
    *_rows(ST, DROPPED, ANSWER, "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64"),
    # How a token is drawn.
    *_rows(EVERY, KEPT, SAMPLING, "temperature top_p seed frequency_penalty presence_penalty logit_bias"),
    *_rows(ENGINES, KEPT, SAMPLING, "top_k min_p repetition_penalty"),
    *_rows(VLLM, KEPT, SAMPLING, "allowed_token_ids bad_words watermarking vllm_xargs"),
    *_rows(SGLANG, KEPT, SAMPLING, "custom_params custom_logit_processor watermark"),
    *_rows(Api.OLDER, KEPT, SAMPLING, "logits_processors"),
    # What engines do not look at.
    *_rows(EVERY, KEPT, UNUSED, "user"),
    *_rows(SC, KEPT, "labels the engine's counters", "custom_labels"),
    *_rows(OT, KEPT, UNUSED, "metadata safety_identifier service_tier store moderation"),
    *_rows(OT, KEPT, UNUSED, "audio modalities prediction verbosity web_search_options"),
)
"""Chats and completions."""

OF_RESPONSES: tuple[RequestField, ...] = (
    RequestField("model", RESPONSES, KEPT, "names the model, or the adapter"),
    *_rows(RESPONSES, KEPT, PROMPT, "input instructions"),
    *_rows(VR | OR, KEPT, PROMPT, "prompt"),
    *_rows(VR, KEPT, PROMPT, "previous_input_messages"),
    RequestField("tools", RESPONSES, KEPT, TEMPLATE, DecodeOnlyReason.ENGINE_TOOLS),
    *_rows(RESPONSES, KEPT, TEMPLATE, "tool_choice parallel_tool_calls reasoning text"),
    *_rows(VR, KEPT, TEMPLATE, "include_reasoning"),
    *_rows(VR | SR, KEPT, TEMPLATE, "chat_template_kwargs"),
    RequestField("truncation", RESPONSES, KEPT, PROMPT, DecodeOnlyReason.TRUNCATED_PROMPT),
    *_rows(VR, KEPT, MEDIA, "media_io_kwargs mm_processor_kwargs"),
    *_rows(VR, KEPT, "refers to encoded images, which prefill reads", "ec_transfer_params"),
    *_rows(VR | SR, KEPT, CACHE, "cache_salt"),
    *_rows(SR, KEPT, CACHE, "extra_key"),
    *_rows(VR | OR, KEPT, CACHE, "prompt_cache_key"),
    *_rows(OR, KEPT, CACHE, "prompt_cache_options prompt_cache_retention"),
    *_rows(VR | SR, KEPT, ROUTING, "priority session_id"),
    *_rows(VR | SR, KEPT, IN_LOGS, "request_id"),
    RequestField("previous_response_id", RESPONSES, KEPT, "is kept by one engine", DecodeOnlyReason.ENGINE_SESSION),
    RequestField("conversation", OR, KEPT, "is kept by one engine", DecodeOnlyReason.ENGINE_SESSION),
    RequestField("store", RESPONSES, CHANGED, "nobody asks for the answer of a prefill request again"),
    *_rows(RESPONSES, KEPT, "the router refuses it if it is true", "background"),
    *_rows(SR, DROPPED, RANK, "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"),
    *_rows(SR, DROPPED, PAIRING, "bootstrap_host bootstrap_port bootstrap_room"),
    RequestField("kv_transfer_params", VR, CHANGED, ASKS),
    RequestField("max_output_tokens", RESPONSES, CHANGED, LENGTH),
    RequestField("stream", RESPONSES, CHANGED, STREAM),
    *_rows(OR, DROPPED, STREAM, "stream_options"),
    *_rows(RESPONSES, DROPPED, ENDING, "max_tool_calls"),
    *_rows(VR | SR, DROPPED, ENDING, "stop"),
    *_rows(VR, DROPPED, ENDING, "stop_token_ids ignore_eos include_stop_str_in_output"),
    *_rows(VR, DROPPED, GRAMMAR, "structured_outputs"),
    *_rows(RESPONSES, DROPPED, ANSWER, "include top_logprobs"),
    *_rows(VR, DROPPED, ANSWER, "skip_special_tokens enable_response_messages mm_payload return_mm_kwargs"),
    *_rows(RESPONSES, KEPT, SAMPLING, "temperature top_p"),
    *_rows(VR | SR, KEPT, SAMPLING, "top_k min_p frequency_penalty presence_penalty repetition_penalty"),
    *_rows(VR, KEPT, SAMPLING, "logit_bias seed watermarking vllm_xargs"),
    *_rows(RESPONSES, KEPT, UNUSED, "metadata service_tier user"),
    *_rows(OR, KEPT, UNUSED, "access_programs background_options context_management image moderation"),
    *_rows(OR, KEPT, UNUSED, "safety_identifier"),
)
"""OpenAI's Responses API."""

OF_MESSAGES: tuple[RequestField, ...] = (
    RequestField("model", MESSAGES, KEPT, "names the model, or the adapter"),
    *_rows(MESSAGES, KEPT, PROMPT, "messages system"),
    *_rows(MESSAGES, KEPT, TEMPLATE, "tools tool_choice thinking output_config"),
    *_rows(VM, KEPT, TEMPLATE, "chat_template_kwargs"),
    *_rows(VM, KEPT, "refers to encoded images, which prefill reads", "ec_transfer_params"),
    *_rows(VM, KEPT, CACHE, "cache_salt"),
    *_rows(AM, KEPT, CACHE, "cache_control"),
    *_rows(SM, DROPPED, RANK, "routed_dp_rank disagg_prefill_dp_rank"),
    *_rows(SM, DROPPED, PAIRING, "bootstrap_host bootstrap_port bootstrap_room"),
    RequestField("kv_transfer_params", VM, CHANGED, ASKS),
    RequestField("max_tokens", MESSAGES, CHANGED, LENGTH),
    RequestField("stream", MESSAGES, CHANGED, STREAM),
    *_rows(MESSAGES, DROPPED, ENDING, "stop_sequences"),
    *_rows(VM, DROPPED, ANSWER, "mm_payload return_mm_kwargs"),
    *_rows(VM | SM, KEPT, SAMPLING, "temperature top_k top_p"),
    *_rows(VM, KEPT, SAMPLING, "watermarking vllm_xargs"),
    *_rows(MESSAGES, KEPT, UNUSED, "metadata"),
    *_rows(SM, KEPT, UNUSED, "betas"),
    *_rows(AM, KEPT, UNUSED, "container diagnostics inference_geo service_tier speed user_profile_id workspace_id"),
)
"""Anthropic's Messages API."""

FIELDS = (*OF_BOTH, *OF_RESPONSES, *OF_MESSAGES)


# By the field's name: made once, because every request is looked up in it.
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
