"""The fields of a request that say how tokens are chosen: checked, and laid over the model's defaults."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry.connectors.sampling import Sampling
from kvferry.errors import RequestError

MAX_SEED = 2**63 - 1


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints know about sampling, with vLLM's names. null leaves a value to the model."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None


# Both ends are allowed, but for those that must be more than 0.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e6),
    "min_tokens": (0, 2**31),
}
ABOVE_ZERO = ("top_p", "repetition_penalty")
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """What one request says; `given` are values of `Sampling` by name. `bad_words` are still text."""

    given: dict[str, Any]
    bad_words: tuple[str, ...]

    def scored(self, num_top_logprobs: int | None) -> SamplingFields:
        """The same with log-probabilities, unless the number is None."""
        if num_top_logprobs is None:
            return self
        return replace(self, given=self.given | {"logprobs": True, "num_top_logprobs": num_top_logprobs})

    def over(self, defaults: Sampling, bad_words_ids: tuple[tuple[int, ...], ...]) -> Sampling:
        """How this request's tokens are chosen. One that names no seed gets one that nobody can guess."""
        seed = self.given.get("seed", secrets.randbits(63))
        return replace(defaults, **self.given | {"seed": seed, "bad_words_ids": bad_words_ids})


def sampling_fields(body: SamplingBody) -> SamplingFields:
    """Raises RequestError naming the field, what was found and what to send instead."""
    given = {name: value for name in RANGES if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        _check_range(name, value)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if body.logit_bias:
        given["logit_bias"] = tuple(_bias(key, bias) for key, bias in body.logit_bias.items())
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids allows no token",
                found="[]",
                expected="at least one token id",
                param="allowed_token_ids",
            )
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    words = tuple(body.bad_words or ())
    if not all(word.strip() for word in words):
        what, found = "bad_words has an empty word", repr(words)[:80]
        raise RequestError(what, found=found, expected="words with letters", param="bad_words")
    return SamplingFields(given, words)


def _check_range(name: str, value: float) -> None:
    low, high = RANGES[name]
    if not low <= value <= high or (name in ABOVE_ZERO and value == 0):
        at_least = "more than 0" if name in ABOVE_ZERO else f"at least {low:g}"
        found, expected = f"{value:g}", f"{at_least}, at most {high:g}"
        raise RequestError(f"{name} is out of range", found=found, expected=expected, param=name)


def _bias(key: str, bias: float) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        what = "a key of logit_bias is not a token id"
        raise RequestError(what, found=repr(key)[:80], expected="digits", param="logit_bias")
    if not -MAX_BIAS <= bias <= MAX_BIAS:
        what = "a value of logit_bias is out of range"
        raise RequestError(what, found=f"{bias:g}", expected="-100 to 100", param="logit_bias")
    return int(key), bias
