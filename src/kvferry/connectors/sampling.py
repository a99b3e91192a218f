"""How the tokens of one answer are chosen: plain values, checked where clients send them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

GREEDY_BELOW = 1e-5  # as in vLLM: what is colder would overflow


@dataclass(frozen=True, slots=True)
class Sampling:
    """The names are those of vLLM's sampling parameters; every default changes nothing, and a `temperature` of 0 takes
    the likeliest token. `allowed_token_ids` that are empty allow every token, a `top_k` of 0 keeps every token.

    The same `seed` draws the same tokens, whatever else the engine computes. With `logprobs` each token tells its
    log-probability, and those of the `num_top_logprobs` likeliest tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: bool = False
    num_top_logprobs: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token and changes nothing: what only says how to draw has no effect then."""
        plain = replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
        return self.temperature < GREEDY_BELOW and plain == GREEDY

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token that is named, by the field that names it."""
        return {
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "bad_words": tuple(token_id for word in self.bad_words_ids for token_id in word),
        }


GREEDY = Sampling()
"""The likeliest token, always."""


class SamplingFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """What both a request and a model's generation_config.json may say, as in vLLM; null leaves it to the other."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
