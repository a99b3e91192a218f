"""What the embedded engine does with each field that a request may have: one table, pure.

Fields that it honours are those of the records in `bodies`; here are the reasons for all others.

A field that would change the answer is honoured or refused, never ignored. What is not in the table is refused as well,
as OpenAI's API does it: nobody knows what an unknown field would change, and a misspelled one changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvferry.embedded.request.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    cut,
    shown,
)
from kvferry.errors import RequestError


class Verdict(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class Support:
    """One field. A refused one passes with null, or with one of the `harmless` values, which ask for what the engine
    does anyway."""

    name: str
    verdict: Verdict
    reason: str
    harmless: tuple[Any, ...] = ()


NO_GRAMMAR = "the engine cannot constrain an answer to a grammar"
NO_LOGPROBS = "the engine returns those of the likeliest tokens, as text"
NO_TOOLS = "the engine does not recognise tool calls in an answer"
NO_PROMPT_LOGITS = "the engine has no logits of the prompt"
NO_BEAMS = "the engine has no beam search"
NO_SEARCH = "the engine does not search the web"
NO_MEDIA = "the engine answers text to text"
TEMPLATE = "the engine renders messages with the model's chat template as it is"
WHOLE_PROMPT = "the engine takes prompts whole"
ONLY_BEAMS = "only beam search reads it, which is refused"
ONLY_MEDIA = "only images, audio and video need it, which are refused"
ONLY_RENDER = "vLLM reads it in requests of other kinds only"
ACCOUNT = "says something about the client or the account"
NO_PREFIX_CACHE = "the engine has no prefix cache"


# Told in the documentation beside the name of a field that is honoured.
NOTES = {
    "best_of": "when it equals n",
    "echo": "without logprobs",
    "chat_template_kwargs": "names that the chat template has",
    # Of a message.
    **dict.fromkeys(
        ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"), "when the chat template reads it"
    ),
}


def honoured(body: type[msgspec.Struct]) -> tuple[Support, ...]:
    """The fields that a body has."""
    return tuple(Support(name, Verdict.HONOURED, NOTES.get(name, "")) for name in body.__struct_fields__)


def refused(reason: str, names: str, *harmless: Any) -> tuple[Support, ...]:
    return tuple(Support(name, Verdict.REFUSED, reason, harmless) for name in names.split())


def no_effect(reason: str, names: str) -> tuple[Support, ...]:
    return tuple(Support(name, Verdict.NO_EFFECT, reason) for name in names.split())


BOTH = (
    *refused(NO_GRAMMAR, "response_format", {"type": "text"}),
    *refused(NO_GRAMMAR, "structured_outputs guided_json guided_regex guided_choice guided_grammar"),
    *refused(NO_GRAMMAR, "guided_json_object guided_decoding_backend guided_whitespace_pattern structural_tag"),
    *refused(NO_LOGPROBS, "logprob_token_ids", []),
    *refused(NO_LOGPROBS, "return_tokens_as_token_ids", False),
    *refused(NO_PROMPT_LOGITS, "prompt_logprobs"),
    *refused("the text of a prompt is told by echo only", "return_prompt_text", False),
    *refused(NO_BEAMS, "use_beam_search", False),
    *refused("the engine adds no watermark", "watermarking", False),
    *refused("the engine writes special tokens with spaces between", "spaces_between_special_tokens", True),
    *refused(WHOLE_PROMPT, "truncate_prompt_tokens"),
    *refused("the engine answers in the order of arrival", "priority", 0),
    *refused(NO_MEDIA, "ec_transfer_params", {}),
    *refused("the engine has no extensions that read it", "vllm_xargs", {}),
    *refused("the engine takes no processors by name", "logits_processors", []),
    *refused("the engine does not look for repetitions", "repetition_detection"),
    *refused("the engine does not tell reasoning from answers", "thinking_token_budget"),
    *refused(TEMPLATE, "reasoning"),
    *no_effect(ACCOUNT, "user"),
    *no_effect(ONLY_BEAMS, "length_penalty early_stopping"),
    *no_effect(ONLY_RENDER, "return_token_offsets mm_payload return_mm_kwargs"),
    *no_effect(ONLY_MEDIA, "mm_processor_kwargs media_io_kwargs"),
    *no_effect("no answer has routed experts", "routed_experts_prompt_start"),
    *no_effect("only truncate_prompt_tokens needs it, which is refused", "truncation_side"),
    *no_effect("the header x-request-id names a request", "request_id"),
    *no_effect("an engine alone has nowhere else to send a request", "session_id"),
    *no_effect("every token is sent as it comes, and the text is the same", "stream_interval"),
)
ONLY_COMPLETIONS = (
    *refused("the engine does not fill in the middle", "suffix", ""),
    *refused("the engine takes text and token ids", "prompt_embeds"),
)
ONLY_CHAT = (
    *refused("the engine does not repeat the messages in the answer", "echo", False),
    *refused("the engine does not tell reasoning from answers", "include_reasoning", True),
    *refused(TEMPLATE, "reasoning_effort chat_template"),
    *refused(TEMPLATE, "documents", []),
    *refused(NO_TOOLS, "tools functions", []),
    *refused(NO_TOOLS, "tool_choice function_call", "none", "auto"),
    *refused(NO_MEDIA, "modalities", ["text"]),
    *refused(NO_MEDIA, "audio"),
    *refused(NO_SEARCH, "web_search_options"),
    *refused("the engine does not moderate", "moderation"),
    *refused("chat templates do not read it", "verbosity", "medium"),
    *no_effect(ACCOUNT, "metadata safety_identifier service_tier store"),
    *no_effect(NO_PREFIX_CACHE, "prompt_cache_key prompt_cache_options prompt_cache_retention"),
    *no_effect("it is a hint that would only make answers faster", "prediction"),
    *no_effect("no answer has tool calls", "parallel_tool_calls"),
)
# A chat refuses the same: its tokens would not be those that are told here.
ONLY_TOKENIZE_CHAT = (
    *refused(TEMPLATE, "chat_template"),
    *refused(NO_TOOLS, "tools", []),
    *no_effect(ONLY_MEDIA, "media_io_kwargs mm_processor_kwargs"),
)
IN_MESSAGE = (
    *refused("send it as tool_calls", "function_call"),
    *refused("send it as content", "refusal"),
    *refused(NO_SEARCH, "annotations", []),
    *refused(NO_MEDIA, "audio"),
)
IN_PART = (
    *refused(NO_MEDIA, "image_url input_audio audio_url video_url file"),
    *refused(NO_SEARCH, "annotations", []),
    *no_effect(NO_PREFIX_CACHE, "cache_control"),
)

SUPPORT: Mapping[type[msgspec.Struct], Mapping[str, Support]] = {
    body: {row.name: row for row in (*honoured(body), *others)}
    for body, others in (
        (CompletionBody, BOTH + ONLY_COMPLETIONS),
        (ChatBody, BOTH + ONLY_CHAT),
        (ChatMessage, IN_MESSAGE),
        (ContentPart, IN_PART),
        (TokenizeTextBody, ()),
        (TokenizeChatBody, ONLY_TOKENIZE_CHAT),
        (DetokenizeBody, ()),
    )
}
"""Every field of each body, by its name."""


def refuse_unsupported(rows: Mapping[str, Support], fields: Mapping[str, Any], where: str = "") -> None:
    """Raises RequestError naming the first field that the engine can neither honour nor leave alone; `where` is put
    before its name."""
    for name, value in fields.items():
        if value is None:
            continue
        row = rows.get(name)
        if row is None:
            raise _unknown(name, rows, where)
        if row.verdict is Verdict.REFUSED and not _is_harmless(value, row.harmless):
            raise RequestError(
                f"{where}{name} is not supported by the embedded engine: {row.reason}",
                found=shown(value),
                expected=" or ".join(repr(one) for one in (None, *row.harmless)).replace("None", "null"),
                hint=f"leave {name} out",
                param=where + name,
            )


def _is_harmless(value: object, harmless: tuple[object, ...]) -> bool:
    """Types count: true is no 1."""
    return any(type(value) is type(one) and value == one for one in harmless)


def _unknown(name: str, rows: Mapping[str, Support], where: str) -> RequestError:
    similar = difflib.get_close_matches(name[:64], rows, 1)
    hint = f"did you mean {similar[0]}?" if similar else "leave the field out"
    return RequestError(
        "unknown request field",
        found=cut(repr(where + name)),
        expected="a field of the OpenAI or vLLM API",
        hint=hint,
        param=where + name,
    )
