"""Bodies of `/tokenize` and `/detokenize`, as vLLM defines them: what tokens a prompt has, and what text tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.embedded.request.chat_fields import chat_prompt
from kvferry.embedded.request.fields import NO_TOOLS, ONLY_MEDIA, TEMPLATE, Support, Verdict
from kvferry.embedded.request.prompts import PromptInput, TextPrompt
from kvferry.embedded.request.requests import decode_fields, field_values
from kvferry.errors import RequestError

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def _rows(path: str, honoured: str, *others: Support) -> dict[str, Support]:
    rows = (*(Support(name, (path,), Verdict.HONOURED, "") for name in honoured.split()), *others)
    return {row.name: row for row in rows}


# A chat refuses the same: its tokens would not be those that are told here.
TEXT_FIELDS = _rows(TOKENIZE, "model prompt add_special_tokens return_token_strs")
CHAT_FIELDS = _rows(
    TOKENIZE,
    "model messages add_special_tokens return_token_strs add_generation_prompt continue_final_message"
    " chat_template_kwargs",
    Support("chat_template", (TOKENIZE,), Verdict.REFUSED, TEMPLATE),
    Support("tools", (TOKENIZE,), Verdict.REFUSED, NO_TOOLS, ([],)),
    Support("media_io_kwargs", (TOKENIZE,), Verdict.NO_EFFECT, ONLY_MEDIA),
    Support("mm_processor_kwargs", (TOKENIZE,), Verdict.NO_EFFECT, ONLY_MEDIA),
)
DETOKENIZE_FIELDS = _rows(DETOKENIZE, "model tokens")


class TextBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize` with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize` with messages."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = False
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """The prompt whose tokens are asked for, and whether each is to be told as text as well."""

    model: str | None
    prompt: PromptInput
    return_token_strs: bool


def decode_tokenize(body: bytes) -> TokenizeAsk:
    """Raises RequestError naming the field, what was found and what to do."""
    fields = field_values(body)
    given = [name for name in ("prompt", "messages") if bytes(fields.get(name, b"null")) != b"null"]
    if len(given) != 1:
        raise RequestError(
            "a prompt or messages are needed, and not both",
            found=" and ".join(given) or "neither",
            expected="prompt: a string, or messages: a list of messages",
        )
    if given == ["prompt"]:
        text = decode_fields(TEXT_FIELDS, body, TextBody)
        special = text.add_special_tokens is not False
        return TokenizeAsk(text.model, TextPrompt(text.prompt, special), bool(text.return_token_strs))
    chat = decode_fields(CHAT_FIELDS, body, MessagesBody)
    return TokenizeAsk(chat.model, chat_prompt(chat), bool(chat.return_token_strs))


def decode_detokenize(body: bytes) -> DetokenizeBody:
    """Raises RequestError naming the field, what was found and what to do."""
    return decode_fields(DETOKENIZE_FIELDS, body, DetokenizeBody)
