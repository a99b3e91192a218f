"""Every field of a chat or completion request, and what the embedded engine does with it: one table, pure.

A field that would change the answer is honoured or refused, never ignored. What is not in the table is refused as well,
as OpenAI's API does it: nobody knows what an unknown field would change, and a misspelled one changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.errors import RequestError
from kvferry.http.request_fields import Endpoint


class Verdict(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class Support:
    """One field at some endpoints. A refused one passes with null, or with one of the `harmless` values, which ask for
    what the engine does anyway."""

    name: str
    endpoints: tuple[str, ...]
    verdict: Verdict
    reason: str
    harmless: tuple[Any, ...] = ()


BOTH, COMPLETIONS, CHAT = tuple(Endpoint), (Endpoint.COMPLETIONS,), (Endpoint.CHAT,)
NO_GRAMMAR = "the engine cannot constrain an answer to a grammar"
NO_LOGPROBS = "the engine returns those of the likeliest tokens, as text"
NO_TOOLS = "the engine does not recognise tool calls in an answer"
NO_PROMPT_LOGITS = "the engine has no logits of the prompt"
NO_BEAMS = "the engine has no beam search"
NO_MEDIA = "the engine answers text to text"
TEMPLATE = "the engine renders messages with the model's chat template as it is"
WHOLE_PROMPT = "the engine takes prompts whole"
ONLY_BEAMS = "only beam search reads it, which is refused"
ONLY_MEDIA = "only images, audio and video need it, which are refused"
ONLY_RENDER = "vLLM reads it in requests of other kinds only"
ACCOUNT = "says something about the client or the account"
NO_PREFIX_CACHE = "the engine has no prefix cache"


def _honoured(endpoints: tuple[Endpoint, ...], names: str) -> tuple[Support, ...]:
    return tuple(Support(name, endpoints, Verdict.HONOURED, "") for name in names.split())


def _idle(endpoints: tuple[Endpoint, ...], reason: str, names: str) -> tuple[Support, ...]:
    return tuple(Support(name, endpoints, Verdict.NO_EFFECT, reason) for name in names.split())


def _refused(endpoints: tuple[Endpoint, ...], reason: str, names: str, *harmless: Any) -> tuple[Support, ...]:
    return tuple(Support(name, endpoints, Verdict.REFUSED, reason, harmless) for name in names.split())


SUPPORT: tuple[Support, ...] = (
    *_honoured(BOTH, "model max_tokens n stop stream stream_options kv_transfer_params cache_salt return_token_ids"),
    *_honoured(BOTH, "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty"),
    *_honoured(BOTH, "logit_bias allowed_token_ids bad_words min_tokens stop_token_ids ignore_eos"),
    *_honoured(BOTH, "logprobs"),
    *_honoured(CHAT, "top_logprobs"),
    *_honoured(BOTH, "include_stop_str_in_output skip_special_tokens"),
    Support("best_of", BOTH, Verdict.HONOURED, "when it equals n"),
    *_honoured(COMPLETIONS, "prompt"),
    Support("echo", COMPLETIONS, Verdict.HONOURED, "without logprobs"),
    *_honoured(CHAT, "messages max_completion_tokens add_generation_prompt continue_final_message"),
    *_honoured(BOTH, "add_special_tokens"),
    Support("chat_template_kwargs", CHAT, Verdict.HONOURED, "names that the chat template has"),
    # Refused, unless they ask for what is done anyway.
    *_refused(BOTH, NO_GRAMMAR, "response_format", {"type": "text"}),
    *_refused(BOTH, NO_GRAMMAR, "structured_outputs guided_json guided_regex guided_choice guided_grammar"),
    *_refused(BOTH, NO_GRAMMAR, "guided_json_object guided_decoding_backend guided_whitespace_pattern structural_tag"),
    *_refused(BOTH, NO_LOGPROBS, "logprob_token_ids", []),
    *_refused(BOTH, NO_LOGPROBS, "return_tokens_as_token_ids", False),
    *_refused(BOTH, NO_PROMPT_LOGITS, "prompt_logprobs"),
    *_refused(CHAT, "the engine does not repeat the messages in the answer", "echo", False),
    *_refused(BOTH, "the text of a prompt is told by echo only", "return_prompt_text", False),
    *_refused(COMPLETIONS, "the engine does not fill in the middle", "suffix", ""),
    *_refused(COMPLETIONS, "the engine takes text and token ids", "prompt_embeds"),
    *_refused(BOTH, NO_BEAMS, "use_beam_search", False),
    *_refused(BOTH, "the engine adds no watermark", "watermarking", False),
    *_refused(BOTH, "the engine writes special tokens with spaces between", "spaces_between_special_tokens", True),
    *_refused(BOTH, WHOLE_PROMPT, "truncate_prompt_tokens"),
    *_refused(BOTH, "the engine answers in the order of arrival", "priority", 0),
    *_refused(BOTH, NO_MEDIA, "ec_transfer_params", {}),
    *_refused(BOTH, "the engine has no extensions that read it", "vllm_xargs", {}),
    *_refused(BOTH, "the engine takes no processors by name", "logits_processors", []),
    *_refused(BOTH, "the engine does not look for repetitions", "repetition_detection"),
    *_refused(BOTH, "the engine does not tell reasoning from answers", "thinking_token_budget"),
    *_refused(CHAT, "the engine does not tell reasoning from answers", "include_reasoning", True),
    *_refused(BOTH, TEMPLATE, "reasoning"),
    *_refused(CHAT, TEMPLATE, "reasoning_effort chat_template"),
    *_refused(CHAT, TEMPLATE, "documents", []),
    *_refused(CHAT, NO_TOOLS, "tools functions", []),
    *_refused(CHAT, NO_TOOLS, "tool_choice function_call", "none", "auto"),
    *_refused(CHAT, NO_MEDIA, "modalities", ["text"]),
    *_refused(CHAT, NO_MEDIA, "audio"),
    *_refused(CHAT, "the engine does not search the web", "web_search_options"),
    *_refused(CHAT, "the engine does not moderate", "moderation"),
    *_refused(CHAT, "chat templates do not read it", "verbosity", "medium"),
    # No influence on the answer.
    *_idle(BOTH, ACCOUNT, "user"),
    *_idle(CHAT, ACCOUNT, "metadata safety_identifier service_tier store"),
    *_idle(CHAT, NO_PREFIX_CACHE, "prompt_cache_key prompt_cache_options prompt_cache_retention"),
    *_idle(CHAT, "it is a hint that would only make answers faster", "prediction"),
    *_idle(CHAT, "no answer has tool calls", "parallel_tool_calls"),
    *_idle(BOTH, ONLY_BEAMS, "length_penalty early_stopping"),
    *_idle(BOTH, ONLY_RENDER, "return_token_offsets mm_payload return_mm_kwargs"),
    *_idle(BOTH, ONLY_MEDIA, "mm_processor_kwargs media_io_kwargs"),
    *_idle(BOTH, "no answer has routed experts", "routed_experts_prompt_start"),
    *_idle(BOTH, "only truncate_prompt_tokens needs it, which is refused", "truncation_side"),
    *_idle(BOTH, "the header x-request-id names a request", "request_id"),
    *_idle(BOTH, "an engine alone has nowhere else to send a request", "session_id"),
    *_idle(BOTH, "every token is sent as it comes, and the text is the same", "stream_interval"),
)


def support_of(endpoint: Endpoint) -> dict[str, Support]:
    """The rows of one endpoint, by the field's name."""
    return ROWS[endpoint]


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
                found=_short(value),
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
        found=_short(where + name),
        expected="a field of the OpenAI or vLLM API",
        hint=hint,
        param=where + name,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


ROWS = {endpoint: {row.name: row for row in SUPPORT if endpoint in row.endpoints} for endpoint in Endpoint}
