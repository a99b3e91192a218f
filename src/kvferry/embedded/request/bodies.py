"""The bodies that the embedded engine reads: every honoured field with its type and its range.

The names and defaults are vLLM's; null is the default. `support` has the fields that are not honoured, `parse`
what a request asks for with those that are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvferry.connectors.sampling import SamplingFields
from kvferry.errors import RequestError
from kvferry.http.openai import least_prompts, least_texts

Body = TypeVar("Body")

MAX_CHOICES = 2048  # of one request, over all its prompts
MAX_STOPS = 16  # OpenAI takes 4, vLLM any number; each is looked for after each token
MAX_TOP_LOGPROBS = 20  # as OpenAI and vLLM
MAX_TOKEN_IDS = 1 << 20  # of a field that names tokens: more than any vocabulary has
MAX_BAD_WORDS = 4096  # each is tokenised twice

Positive = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
TokenId = Annotated[int, Meta(ge=0)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Word = Annotated[str, Meta(pattern=r"\S")]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False

    def __post_init__(self) -> None:
        # Not in the types: msgspec before 0.22 knows no literal that is a truth value.
        if self.continuous_usage_stats or self.include_obfuscation:
            raise ValueError("Expected include_usage and no other option that is true")


class GenerationBody(SamplingFields, frozen=True, kw_only=True):
    """What both endpoints honour. null leaves a value of sampling to the model."""

    model: str | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    add_special_tokens: bool | None = True
    logprobs: NumLogprobs | None = None
    echo: bool | None = False


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Messages
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = False
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: Positive | None = None


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: ToolFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One of `messages`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class TokenizeTextBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize` with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize` with messages."""

    messages: Messages
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = False
    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class ReleaseBody(msgspec.Struct, frozen=True):
    """`POST /kvferry/release`: a prefill's `kv_transfer_params` that will not be used."""

    kv_transfer_params: dict[str, Any]


def fields_of_body(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a body, each value as it came. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        expected = "a JSON object as the OpenAI API defines it"
        raise RequestError("invalid request body", found=str(error), expected=expected) from None


def check_counts(fields: Mapping[str, msgspec.Raw]) -> None:
    """Refuse lists that are far too long to be built at all: a million lists or words take seconds. RequestError."""
    check_num_prompts(least_prompts(bytes(fields.get("prompt", b""))))
    num_words = least_texts(bytes(fields.get("bad_words", b"")))
    if num_words > MAX_BAD_WORDS:
        found, expected = f"at least {num_words} words", f"at most {MAX_BAD_WORDS}"
        raise RequestError("bad_words is invalid", found=found, expected=expected, param="bad_words")


def check_num_prompts(num_prompts: int) -> None:
    """Raises RequestError for more prompts than one request may have answers."""
    if num_prompts > MAX_CHOICES:
        found, expected = f"{num_prompts} prompts", f"at most {MAX_CHOICES}"
        raise RequestError("too many prompts in one request", found=found, expected=expected, param="prompt")


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Raises RequestError naming the field, what was found in it and what was expected."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        values = {name: bytes(value).decode(errors="replace") for name, value in fields_of_body(body).items()}
        raise invalid_value(error, values) from None


def invalid_value(error: Exception, values: Mapping[str, str], where: str = "") -> RequestError:
    """What msgspec says of a value, told as one of our errors. `where` goes before the name of the field; `values` are
    shown as they are."""
    problem, _, place = str(error).partition(" - at ")
    path = re.sub(r"`key` in |`|\$\.?", "", place)
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{where}{path} is missing", param=where + _field(path))
    what = f"{where}{path} is invalid" if path else "invalid request body"
    found, expected = cut(values.get(_field(path), problem)), problem.removeprefix("Expected ")
    return RequestError(what, found=found, expected=expected, param=where + _field(path))


def _field(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def decoded(values: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The values of fields, whatever they are. Raises RequestError naming the first that cannot be read."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            found[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"{cut(name)} cannot be read", found=str(error), expected="JSON", param=name) from None
    return found


def shown(value: object) -> str:
    """A value, short enough for a message."""
    try:
        return cut(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} with others inside one another"


def cut(text: str) -> str:
    """What was found, short enough for a message."""
    return text if len(text) <= 80 else text[:77] + "..."
