"""Request bodies of the OpenAI dialect: decoded, checked, and told in one record what the engine can do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from kvferry.connectors.params import wants_early
from kvferry.embedded.engine.detokenizer import TextOptions
from kvferry.embedded.request.chat_fields import chat_prompt
from kvferry.embedded.request.fields import Support, Verdict, refuse_unsupported, support_of
from kvferry.embedded.request.prompts import PromptInput, TextPrompt
from kvferry.embedded.request.sampling_fields import SamplingBody, SamplingFields, sampling_fields
from kvferry.errors import RequestError
from kvferry.http.request_fields import Endpoint

Body = TypeVar("Body")

MAX_CHOICES = 2048  # of one request, over all its prompts
MAX_STOPS = 16  # OpenAI takes 4, vLLM any number; each is looked for after each token
MAX_TOP_LOGPROBS = 20  # as OpenAI and vLLM
MAX_STOP_CHARACTERS = 1000
MAX_TOKENS_COMPLETION = 16
UNLIMITED = 2**62  # a chat may take what the context leaves
PROMPT_KINDS = {int: "token ids", str: "strings", list: "lists"}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: Literal[False] | None = False
    include_obfuscation: Literal[False] | None = False


class _Common(SamplingBody, frozen=True, kw_only=True):
    """The fields that both endpoints know and honour; `kvferry.embedded.request.fields` has the others."""

    model: str | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    n: int | None = None
    best_of: int | None = None


class CompletionBody(_Common, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool | None = True
    logprobs: int | None = None
    echo: bool | None = False


class ChatBody(_Common, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = False
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class ReleaseBody(msgspec.Struct, frozen=True):
    """`POST /kvferry/release`: a prefill's `kv_transfer_params` that will not be used."""

    kv_transfer_params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leg:
    """Which part of a disaggregated request this is: `prefill`, `decode`, or `whole`; `params` is untrusted.

    A prefill leg that `is_early` gives its reference before it has computed anything.
    """

    kind: str
    params: dict[str, Any]
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """Where an answer ends, and how much of its end is shown."""

    stop_token_ids: frozenset[int]
    ignore_eos: bool
    text: TextOptions


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants: `num_choices` answers to each of `prompts`. `max_new_tokens` is -1 when the caller left it
    to us. Only a leg with the same `cache_salt` may use the cache. With `echoes` the prompt's text goes before answers.
    """

    prompts: tuple[PromptInput, ...]
    num_choices: int
    max_new_tokens: int
    default_new_tokens: int
    ending: Ending
    sampling: SamplingFields
    stream: bool
    include_usage: bool
    return_token_ids: bool
    leg: Leg
    cache_salt: str = ""
    echoes: bool = False


def decode_completion(body: bytes) -> tuple[CompletionBody, Ask]:
    """The body, and what it asks for. Raises RequestError naming the field, what was found and what to do."""
    completion = decode_fields(support_of(Endpoint.COMPLETIONS), body, CompletionBody)
    if completion.echo and completion.logprobs is not None:
        raise RequestError(
            "echo is not supported together with logprobs: the engine has no logits of the prompt",
            found=f"echo and logprobs {completion.logprobs}",
            expected="one of them",
            hint="leave echo out",
            param="echo",
        )
    with_special = completion.add_special_tokens is not False
    ask = _ask(completion, tuple(_as_text(prompt, with_special) for prompt in _prompts(completion.prompt)))
    return completion, replace(ask, echoes=bool(completion.echo))


def decode_chat(body: bytes) -> tuple[ChatBody, Ask]:
    """The body, and what it asks for. Raises RequestError naming the field, what was found and what to do."""
    chat = decode_fields(support_of(Endpoint.CHAT), body, ChatBody)
    return chat, _ask(chat, (chat_prompt(chat),))


def decode_release(body: bytes) -> dict[str, Any]:
    """The reference that a release names. Raises RequestError."""
    return _decode(body, ReleaseBody).kv_transfer_params


def field_values(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a body, as it came. Raises RequestError."""
    return _decode(body, dict[str, msgspec.Raw])


def _ask(body: CompletionBody | ChatBody, prompts: tuple[PromptInput, ...]) -> Ask:
    leg = _leg(body.kv_transfer_params or {})
    if leg.kind == "prefill" and body.stream and not leg.is_early:
        raise RequestError("a prefill request cannot be streamed", found="stream", hint="set stream to false")
    if leg.is_early and not body.stream:
        raise RequestError("an early prefill request must be streamed", found="no stream", hint="set stream to true")
    num_choices = _num_choices(body, len(prompts), leg)
    return Ask(
        prompts=prompts,
        num_choices=num_choices,
        max_new_tokens=_max_new_tokens(body),
        default_new_tokens=UNLIMITED if isinstance(body, ChatBody) else MAX_TOKENS_COMPLETION,
        ending=_ending(body),
        sampling=sampling_fields(body).scored(_num_top_logprobs(body)),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        leg=leg,
        cache_salt=body.cache_salt or "",
    )


def decode_fields(rows: Mapping[str, Support], body: bytes, kind: type[Body]) -> Body:
    """Typed, once every field is known to be honoured or without effect. No honoured value is built twice.

    Raises RequestError naming the field, what was found and what to do.
    """
    raw = field_values(body)
    others = {name: value for name, value in raw.items() if name not in rows or rows[name].verdict is Verdict.REFUSED}
    refuse_unsupported(rows, {name: msgspec.json.decode(value) for name, value in others.items()})
    return _decode(body, kind)


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "invalid request body",
            found=str(error),
            expected="a JSON object as the OpenAI API defines it",
            param=_field_of(error),
        ) from None


def _field_of(error: Exception) -> str:
    """msgspec tells the place in words only: ` - at `$.stop[0]``, or the name of what is missing."""
    found = re.search(r" - at `\$\.(\w+)|^Object missing required field `(\w+)`$", str(error))
    return (found[1] or found[2]) if found else ""


def _as_text(prompt: str | tuple[int, ...], with_special: bool) -> PromptInput:
    """Token ids stay what they are."""
    return prompt if with_special or isinstance(prompt, tuple) else TextPrompt(prompt, with_special)


def _prompts(prompt: str | list[int | str | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if len(kinds) == 1 and int not in kinds:
        return tuple(item if isinstance(item, str) else _token_ids(item) for item in prompt)
    if kinds == {int}:
        return (_token_ids(prompt),)
    expected = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
    if not prompt:
        raise RequestError("prompt is empty", found="a list of 0 items", expected=expected, param="prompt")
    found = " and ".join(word for kind, word in PROMPT_KINDS.items() if kind in kinds)
    what = "the items of prompt are of different types"
    raise RequestError(what, found=f"a list of {found}", expected=expected, param="prompt")


def _token_ids(items: object) -> tuple[int, ...]:
    return tuple(item for item in items if isinstance(item, int)) if isinstance(items, list) else ()


def _num_choices(body: CompletionBody | ChatBody, num_prompts: int, leg: Leg) -> int:
    num_choices = 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES // num_prompts:
        raise RequestError(
            "n cannot be used",
            found=f"{num_choices} answers to {num_prompts} prompts",
            expected=f"at least 1 answer to each, and at most {MAX_CHOICES} together",
            param="n",
        )
    if body.best_of not in (None, num_choices):
        raise RequestError(
            "best_of is not supported by the embedded engine",
            found=str(body.best_of),
            expected=f"the value of n ({num_choices}), or none",
            hint="leave best_of out, and choose among n answers yourself",
            param="best_of",
        )
    if leg.kind != "whole" and num_choices * num_prompts > 1:
        raise RequestError(
            "a request with several answers cannot be divided into prefill and decode",
            found=f"{num_choices} answers to {num_prompts} prompts, and kv_transfer_params",
            expected="one answer to one prompt",
            hint="leave kv_transfer_params out, or send one request for each answer",
        )
    return num_choices


def _leg(params: dict[str, Any]) -> Leg:
    """vLLM's key names: the source is told to expect a remote decode, the target that a remote prefill took place."""
    ours = params.get("kvferry")
    marks = {key: params.get(key) for key in ("do_remote_decode", "do_remote_prefill")}
    early = {"kvferry.early": ours.get("early")} if isinstance(ours, dict) else {}
    for key, mark in (marks | early).items():
        if mark is not None and not isinstance(mark, bool):
            raise RequestError(f"invalid {key} in kv_transfer_params", found=_short(mark), expected="true or false")
    source, target = (mark is True for mark in marks.values())
    if source and target:
        raise RequestError(
            "kv_transfer_params asks for prefill and decode at once",
            found="do_remote_decode and do_remote_prefill",
            expected="one of them",
        )
    return Leg("prefill" if source else "decode" if target else "whole", params, source and wants_early(params))


def _max_new_tokens(body: CompletionBody | ChatBody) -> int:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    name, wanted = ("max_tokens", body.max_tokens) if newer is None else ("max_completion_tokens", newer)
    if wanted is not None and wanted < 1:
        raise RequestError(f"{name} must be positive", found=str(wanted), expected=">= 1", param=name)
    return -1 if wanted is None else wanted


def _num_top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens are told beside each token; None when not even its own is."""
    if isinstance(body, CompletionBody):
        name, number = "logprobs", body.logprobs
    else:
        name, number = "top_logprobs", body.top_logprobs or (0 if body.logprobs else None)
        if number and not body.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs", found="no logprobs", expected="logprobs: true", param=name
            )
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        expected = f"0 to {MAX_TOP_LOGPROBS}"
        raise RequestError(f"{name} is out of range", found=str(number), expected=expected, param=name)
    return number


def _ending(body: CompletionBody | ChatBody) -> Ending:
    text = TextOptions(
        stops=_stops(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )
    return Ending(frozenset(body.stop_token_ids or ()), bool(body.ignore_eos), text)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        raise RequestError(
            "stop cannot be used",
            found=_short(list(stops)),
            expected=f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
            param="stop",
        )
    return stops


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
