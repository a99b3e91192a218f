"""One answer of a server, with its tokens' log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvferry.bench.load.answer import refusal

# Where kvferry's router says how a request has gone, and its engines whether the cache that they were sent was used.
PATH_HEADER, CACHE_HEADER = "x-kvferry-path", "x-kvferry-cache"
DISAGGREGATED, RECOMPUTED = "disaggregated", "recomputed"
# Of what is asked, not of the moment or of who asks.
UNFIT = (400, 413, 422)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a greedy answer, their ids where the server tells them, and the log-probability of each.

    `path` says how a router has sent the request, `cache` what became of its cache; empty where nobody says so. `error`
    is why there is no answer, and `is_unfit` that none can be expected, as where a prompt is too long.
    """

    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    path: str = ""
    cache: str = ""
    error: str = ""
    is_unfit: bool = False

    @property
    def is_split(self) -> bool:
        """Whether its prompt was computed by one engine and its cache used by another."""
        return self.path == DISAGGREGATED and self.cache != RECOMPUTED


class Logprobs(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]


class Choice(msgspec.Struct, frozen=True):
    text: str
    logprobs: Logprobs
    token_ids: tuple[int, ...] | None = None


class Completion(msgspec.Struct, frozen=True):
    choices: tuple[Choice, ...]


def answer_of(status: int, body: bytes, headers: Mapping[str, str]) -> Answer:
    """What an HTTP response comes to."""
    path, cache = headers.get(PATH_HEADER, ""), headers.get(CACHE_HEADER, "")
    if status != 200:
        return Answer(path=path, error=refusal(status, body), is_unfit=status in UNFIT)
    try:
        choice = msgspec.json.decode(body, type=Completion).choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        return Answer(path=path, error=f"not a completion with log-probabilities: {error}")
    ids, tokens = choice.token_ids or (), choice.logprobs.tokens
    if len({len(each) for each in (ids or tokens, tokens, choice.logprobs.token_logprobs)}) > 1:
        return Answer(path=path, error="as many log-probabilities as tokens were expected")
    return Answer(tokens, ids, choice.logprobs.token_logprobs, choice.text, path, cache)
