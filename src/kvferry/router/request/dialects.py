"""What the router reads, and writes, in the requests of each API that generates: one row for each, pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec

from kvferry.http.disaggregation import DECISIVE
from kvferry.http.request_fields import Endpoint, dropped, dropped_before_first_token

Count = Annotated[int, msgspec.Meta(ge=0)]
OBJECTS = list[dict[str, msgspec.Raw]]
PROMPTS = str | list[str | int | list[int]] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A field, the decoder of its value, and the words for the type that it must have."""

    field: str
    decoder: msgspec.json.Decoder[Any]
    expected: str


def _rule(name: str, type_: Any, expected: str) -> Rule:
    return Rule(name, msgspec.json.Decoder(type_), expected)


@dataclass(frozen=True)
class Dialect:
    """One API.

    `content` is the field of the prompt, which may come in that of `or_else` instead; `before` comes before it in the
    prompt. `rules` are for other fields that are read here. Of `lengths`, which say how long an answer may be, the
    first one is in every prefill request, another one where the client has it. `unkept` keeps an engine from keeping
    the answer of a prefill request. `can_be_early`: a stream can begin with a reference to what is going to be
    computed.
    """

    endpoint: Endpoint
    content: Rule
    rules: tuple[Rule, ...]
    lengths: tuple[str, ...]
    or_else: str = ""
    before: str = ""
    unkept: Mapping[str, Any] = field(default_factory=dict)
    can_be_early: bool = False

    @cached_property
    def decisive(self) -> tuple[Rule, ...]:
        """Fields whose values can forbid a prefill request. Their types do not matter: engines check them."""
        return tuple(_rule(name, Any, "JSON") for name in DECISIVE[self.endpoint])

    @cached_property
    def dropped(self) -> frozenset[str]:
        """What a prefill request leaves out."""
        return dropped(self.endpoint)

    @cached_property
    def dropped_before_first_token(self) -> frozenset[str]:
        """The fields that a prefill request leaves out whose token is the first of the answer."""
        return dropped_before_first_token(self.endpoint)


MODEL = _rule("model", str | None, "a string")
STREAM = _rule("stream", bool | None, "true or false")
MAX_TOKENS = _rule("max_tokens", Count | None, "a whole number, at least 0")
OF_OPENAI = (
    MODEL,
    STREAM,
    MAX_TOKENS,
    _rule("max_completion_tokens", Count | None, "a whole number, at least 0"),
    _rule("n", Count | None, "a whole number"),
    _rule("best_of", Count | None, "a whole number"),
)
OF_RESPONSES = (
    MODEL,
    STREAM,
    _rule("max_output_tokens", Count | None, "a whole number, at least 0"),
    _rule("background", bool | None, "true or false"),
)
MESSAGES = _rule("messages", OBJECTS, "a list of objects")

COMPLETIONS = Dialect(
    Endpoint.COMPLETIONS,
    _rule("prompt", PROMPTS, "a string, a list of token ids, or a list of either"),
    OF_OPENAI,
    lengths=("max_tokens", "max_completion_tokens"),
    or_else="prompt_embeds",
    can_be_early=True,
)
CHAT = Dialect(Endpoint.CHAT, MESSAGES, OF_OPENAI, lengths=("max_tokens", "max_completion_tokens"), can_be_early=True)
RESPONSES = Dialect(
    Endpoint.RESPONSES,
    _rule("input", str | OBJECTS | None, "a string, or a list of objects"),
    OF_RESPONSES,
    lengths=("max_output_tokens",),
    before="instructions",
    unkept={"store": False},
)
ANTHROPIC = Dialect(Endpoint.MESSAGES, MESSAGES, (MODEL, STREAM, MAX_TOKENS), lengths=("max_tokens",), before="system")
DIALECTS = {one.endpoint: one for one in (COMPLETIONS, CHAT, RESPONSES, ANTHROPIC)}
