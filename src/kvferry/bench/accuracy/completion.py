"""One answer of a server, with its tokens' log-probabilities. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvferry.bench.load.answer import refusal


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a greedy answer, as ids where the server tells them, and the log-probability of each. `path` says
    how a router has sent the request, empty from others; `error` why there is no answer."""

    tokens: tuple[int | str, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    path: str = ""
    error: str = ""


class Logprobs(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]


class Choice(msgspec.Struct, frozen=True):
    text: str
    logprobs: Logprobs
    token_ids: tuple[int, ...] | None = None


class Completion(msgspec.Struct, frozen=True):
    choices: tuple[Choice, ...]


def answer_of(status: int, body: bytes, path: str) -> Answer:
    """What an HTTP response comes to."""
    if status != 200:
        return Answer(error=refusal(status, body), path=path)
    try:
        choice = msgspec.json.decode(body, type=Completion).choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        return Answer(error=f"not a completion with log-probabilities: {error}", path=path)
    tokens: tuple[int | str, ...] = choice.token_ids or choice.logprobs.tokens
    if len(tokens) != len(choice.logprobs.token_logprobs):
        return Answer(error="as many log-probabilities as tokens were expected", path=path)
    return Answer(tokens, choice.logprobs.token_logprobs, choice.text, path)
