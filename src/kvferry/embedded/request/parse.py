"""From a request body to one record of what it asks for, once every field is known to be honoured or without effect."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from kvferry.connectors.sampling import Sampling
from kvferry.embedded.engine.detokenizer import TextOptions
from kvferry.embedded.request.bodies import (
    MAX_CHOICES,
    MAX_TOKEN_IDS,
    ChatBody,
    CompletionBody,
    TokenizeChatBody,
    TokenizeTextBody,
    check_counts,
    check_num_prompts,
    decode_body,
    decoded,
    fields_of_body,
    shown,
)
from kvferry.embedded.request.chat import ChatPrompt, chat_prompt
from kvferry.embedded.request.support import SUPPORT, Verdict, refuse_unsupported
from kvferry.errors import PromptTooLongError, RequestError
from kvferry.kv_transfer_params import room_of, wants_early

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_TOKENS_COMPLETION = 16
UNLIMITED = 2**62  # a chat may take what the context leaves
# Fields that are values of `Sampling` as they are.
AS_GIVEN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
NO_SEED = -1  # as in vLLM: a seed that nobody can guess
PROMPT_KINDS = {int: "token ids", str: "strings", list: "lists"}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text with or without the tokenizer's special tokens."""

    text: str
    add_special_tokens: bool = True


PromptInput = tuple[int, ...] | ChatPrompt | TextPrompt
"""A prompt as it comes: text, token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """What one request says; `given` are values of `Sampling` by name. `bad_words` are still text."""

    given: dict[str, Any]
    bad_words: tuple[str, ...]

    def over(self, defaults: Sampling, bad_words_ids: tuple[tuple[int, ...], ...]) -> Sampling:
        """How this request's tokens are chosen. One that names no seed gets one that nobody can guess."""
        seed = self.given.get("seed", secrets.randbits(63))
        return replace(defaults, **self.given | {"seed": seed, "bad_words_ids": bad_words_ids})


@dataclass(frozen=True, slots=True)
class RequestRole:
    """Which part of a disaggregated request this is: `prefill`, `decode`, or `whole`; `params` is untrusted.

    A prefill request that `is_early` gives its reference before it has computed anything; one in a `room` needs to give
    none.
    """

    kind: str
    params: dict[str, Any]
    is_early: bool = False
    room: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a request wants: `num_choices` answers to each of `prompts`, of `model` where it names one.

    `max_new_tokens` is -1 when the caller left it to us. An answer ends with one of `stop_token_ids`, with one of the
    model's own unless it `ignores_eos`, or as `text` says. Only a request with the same `cache_salt` may use the cache.
    With `echoes` the prompt's text goes before answers.
    """

    model: str | None
    prompts: tuple[PromptInput, ...]
    num_choices: int
    max_new_tokens: int
    default_new_tokens: int
    stop_token_ids: frozenset[int]
    ignores_eos: bool
    text: TextOptions
    sampling: SamplingOverrides
    stream: bool
    include_usage: bool
    return_token_ids: bool
    role: RequestRole
    cache_salt: str = ""
    echoes: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """The prompt whose tokens are asked for, and whether each is to be told as text as well."""

    model: str | None
    prompt: PromptInput
    return_token_strs: bool


def decode_completion(body: bytes, max_tokens: int = UNLIMITED) -> GenerationRequest:
    """What a body asks for. Raises RequestError naming the field, what was found and what to do, and PromptTooLongError
    for token ids of which the engine could not take so many."""
    completion = decode_supported(body, CompletionBody)
    if completion.echo and completion.logprobs is not None:
        raise RequestError(
            "echo is not supported together with logprobs: the engine has no logits of the prompt",
            found=f"echo and logprobs {completion.logprobs}",
            expected="one of them",
            hint="leave echo out",
            param="echo",
        )
    prompts = _prompts(completion.prompt, completion.add_special_tokens is not False, max_tokens)
    return replace(_ask(completion, prompts), echoes=bool(completion.echo))


def decode_chat(body: bytes) -> GenerationRequest:
    """What a body asks for. Raises RequestError naming the field, what was found and what to do."""
    chat = decode_supported(body, ChatBody)
    return _ask(chat, (chat_prompt(chat, len(body)),))


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Raises RequestError naming the field, what was found and what to do."""
    fields = fields_of_body(body)
    given = [name for name in ("prompt", "messages") if bytes(fields.get(name, b"null")) != b"null"]
    if len(given) != 1:
        raise RequestError(
            "a prompt or messages are needed, and not both",
            found=" and ".join(given) or "neither",
            expected="prompt: a string, or messages: a list of messages",
        )
    if given == ["prompt"]:
        text = decode_supported(body, TokenizeTextBody)
        special = text.add_special_tokens is not False
        return TokenizeRequest(text.model, TextPrompt(text.prompt, special), bool(text.return_token_strs))
    chat = decode_supported(body, TokenizeChatBody)
    return TokenizeRequest(chat.model, chat_prompt(chat, len(body)), bool(chat.return_token_strs))


def decode_supported(body: bytes, kind: type[Body]) -> Body:
    """Raises RequestError naming the field, what was found and what to do. No honoured value is built twice."""
    rows = SUPPORT[kind]
    raw = fields_of_body(body)
    others = {name: value for name, value in raw.items() if name not in rows or rows[name].verdict is Verdict.REFUSED}
    check_counts(raw)
    refuse_unsupported(rows, decoded(others))
    return decode_body(body, kind)


def _ask(body: CompletionBody | ChatBody, prompts: tuple[PromptInput, ...]) -> GenerationRequest:
    role = _role(body.kv_transfer_params or {})
    if role.kind == "prefill" and body.stream and not role.is_early:
        raise RequestError("a prefill request cannot be streamed", found="stream", hint="set stream to false")
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is only for answers that are streamed",
            found="stream_options without stream",
            hint="set stream to true, or leave stream_options out",
            param="stream_options",
        )
    if role.is_early and not body.stream:
        raise RequestError("an early prefill request must be streamed", found="no stream", hint="set stream to true")
    num_choices = _num_choices(body, len(prompts), role)
    _check_num_ids(body, num_choices * len(prompts))
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        num_choices=num_choices,
        max_new_tokens=_max_new_tokens(body),
        default_new_tokens=UNLIMITED if isinstance(body, ChatBody) else MAX_TOKENS_COMPLETION,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignores_eos=bool(body.ignore_eos),
        text=_text_options(body),
        sampling=_sampling(body),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        role=role,
        cache_salt=body.cache_salt or "",
    )


def _prompts(prompt: str | list[int | str | list[int]], with_special: bool, max_tokens: int) -> tuple[PromptInput, ...]:
    items: list[int | str | list[int]] = [prompt] if isinstance(prompt, str) else prompt
    _check_sizes(items, max_tokens)
    kinds = {type(item) for item in items}
    if kinds == {str}:
        return tuple(TextPrompt(str(item), with_special) for item in items)
    if kinds == {int}:
        return (_token_ids(items),)
    if kinds == {list}:
        return tuple(map(_token_ids, items))
    expected = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
    found = " and ".join(word for kind, word in PROMPT_KINDS.items() if kind in kinds)
    what = "the items of prompt are of different types"
    raise RequestError(what, found=f"a list of {found}", expected=expected, param="prompt")


def _check_sizes(items: list[int | str | list[int]], max_tokens: int) -> None:
    """Refuse what is too long before it is looked at item by item: others wait for their answers meanwhile."""
    if isinstance(items[0], int):
        check_room(len(items), max_tokens)
    else:
        check_num_prompts(len(items))
    for item in items:
        if isinstance(item, list):
            check_room(len(item), max_tokens)


def check_room(num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises PromptTooLongError for a prompt that leaves no room for a token."""
    if num_prompt_tokens >= max_tokens:
        raise PromptTooLongError(
            "the prompt is too long for an answer",
            found=f"{num_prompt_tokens} prompt tokens",
            expected=f"fewer than {max_tokens}",
            hint="shorten the prompt",
            param="prompt",
        )


def _token_ids(items: object) -> tuple[int, ...]:
    return tuple(item for item in items if isinstance(item, int)) if isinstance(items, list) else ()


def _num_choices(body: CompletionBody | ChatBody, num_prompts: int, role: RequestRole) -> int:
    num_choices = 1 if body.n is None else body.n
    if num_choices * num_prompts > MAX_CHOICES:
        raise RequestError(
            "too many answers",
            found=f"{num_choices} answers to {num_prompts} prompts",
            expected=f"at most {MAX_CHOICES} together",
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
    if role.kind != "whole" and num_choices * num_prompts > 1:
        raise RequestError(
            "a request with several answers cannot be divided into prefill and decode",
            found=f"{num_choices} answers to {num_prompts} prompts, and kv_transfer_params",
            expected="one answer to one prompt",
            hint="leave kv_transfer_params out, or send one request for each answer",
        )
    return num_choices


def _check_num_ids(body: CompletionBody | ChatBody, num_choices: int) -> None:
    """Refuse more names of tokens than can be looked at for each choice. Raises RequestError."""
    given = body.allowed_token_ids, body.logit_bias, body.stop_token_ids, body.bad_words
    num_ids = sum(len(ids) for ids in given if ids is not None)
    if num_choices * num_ids > MAX_TOKEN_IDS:
        raise RequestError(
            "too many tokens are named for so many answers",
            found=f"{num_choices} answers; {num_ids} in allowed_token_ids, logit_bias, stop_token_ids and bad_words",
            expected=f"at most {MAX_TOKEN_IDS}, counted once for each answer",
            param="n",
        )


def _role(params: dict[str, Any]) -> RequestRole:
    """vLLM's key names: the source is told to expect a remote decode, the target that a remote prefill took place."""
    ours = params.get("kvferry")
    marks = {key: params.get(key) for key in ("do_remote_decode", "do_remote_prefill")}
    early = {"kvferry.early": ours.get("early")} if isinstance(ours, dict) else {}
    for key, mark in (marks | early).items():
        if mark is not None and not isinstance(mark, bool):
            raise RequestError(f"invalid {key} in kv_transfer_params", found=shown(mark), expected="true or false")
    source, target = (mark is True for mark in marks.values())
    if source and target:
        raise RequestError(
            "kv_transfer_params asks for prefill and decode at once",
            found="do_remote_decode and do_remote_prefill",
            expected="one of them",
        )
    room, is_early = room_of(params) if source else None, source and wants_early(params)
    if room is not None and is_early:
        what = "a prefill in a room needs no early reference"
        raise RequestError(what, found="kvferry.room and kvferry.early", expected="one of them")
    return RequestRole("prefill" if source else "decode" if target else "whole", params, is_early, room)


def _max_new_tokens(body: CompletionBody | ChatBody) -> int:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    wanted = body.max_tokens if newer is None else newer
    return -1 if wanted is None else wanted


def _sampling(body: CompletionBody | ChatBody) -> SamplingOverrides:
    given = {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("seed") == NO_SEED:
        del given["seed"]
    if body.logit_bias:
        given["logit_bias"] = tuple(body.logit_bias.items())
    if body.allowed_token_ids is not None:
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    num_top_logprobs = _num_top_logprobs(body)
    if num_top_logprobs is not None:
        given |= {"logprobs": True, "num_top_logprobs": num_top_logprobs}
    return SamplingOverrides(given, tuple(body.bad_words or ()))


def _num_top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens are told beside each token; None when not even its own is."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        expected = "logprobs: true"
        raise RequestError("top_logprobs needs logprobs", found="no logprobs", expected=expected, param="top_logprobs")
    return body.top_logprobs or (0 if body.logprobs else None)


def _text_options(body: CompletionBody | ChatBody) -> TextOptions:
    stop = body.stop or ()
    return TextOptions(
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )
