"""Requests with their arrival times: synthetic ones by seed, and recorded ones. Pure.

A line of a trace has the keys of Mooncake's traces: `{"timestamp": 1200, "input_length": 6755, "output_length": 500,
"hash_ids": [0, 1, 2]}`: milliseconds, tokens, and, if given, a name for every 512 tokens of the prompt; prompts that
share names begin alike.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from kvferry.errors import ConfigurationError

# Every model has these ids, and no special token is among them: bytes in most vocabularies.
FIRST_ID, LAST_ID = 32, 255
# Words that most tokenizers know as one token each.
WORDS = (
    *("the", "a", "one", "two", "on", "in", "at", "over", "when", "then", "and", "or", "not", "all", "some", "river"),
    *("water", "boat", "sea", "wind", "night", "day", "hour", "time", "way", "side", "end", "bank", "line", "house"),
)
BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000


class Endpoint(StrEnum):
    """The API that requests go to, by its word on the command line."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens that follow from `name` alone: prompts that begin with the same pieces begin alike."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Pieces, one after the other."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    def token_ids(self) -> list[int]:
        """Exactly `num_tokens` ids."""
        ids: list[int] = []
        for piece in self.pieces:
            ids.extend(random.Random(piece.name).choices(range(FIRST_ID, LAST_ID + 1), k=piece.num_tokens))
        return ids

    def text(self) -> str:
        """About `num_tokens` tokens, a word each: the server's tokenizer has the last word."""
        words: list[str] = []
        for piece in self.pieces:
            words.extend(random.Random(piece.name).choices(WORDS, k=piece.num_tokens))
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `low` to `high`, both included, each as likely as the other."""

    low: int
    high: int

    def draw(self, chooser: random.Random) -> int:
        return chooser.randint(self.low, self.high)


def lengths_named(text: str) -> Lengths:
    """The lengths that text such as `512` or `256-1024` names. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text.strip(), re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigurationError("invalid number of tokens", found=text, expected="such as 512 or 256-1024")
    return Lengths(low, high)


def rates_named(text: str) -> tuple[float, ...]:
    """The rates that text such as `1,2,4,8` names, ascending, each once. Raises ConfigurationError."""
    try:
        rates = sorted({float(word) for word in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigurationError("invalid rates for --sweep", found=text, expected="requests/s such as 1,2,4,8")
    return tuple(rates)


def poisson(num_requests: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds, ascending; at an infinite `rate` (requests/s) all arrive at once, at 0.

    The same seed gives the same times, scaled by the rate. Raises ConfigurationError for a rate that is not positive.
    """
    if not rate > 0:
        raise ConfigurationError("the rate must be positive", found=str(rate), expected="requests/s, or inf")
    if math.isinf(rate):
        return (0.0,) * num_requests
    # Dice of their own: with those of the lengths, a short gap would have a short prompt.
    chooser, at, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(num_requests):
        at += chooser.expovariate(1.0)
        times.append(at / rate)
    return tuple(times)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: it arrives `at_s` seconds after the start, and its answer is to have `output_tokens` tokens."""

    at_s: float
    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Lengths in tokens. With `prefix_tokens` above 0 every prompt begins with one of `num_prefixes` shared beginnings
    of that length, and `prompt` counts the tokens that follow it.

    The same seed gives the same requests. Raises ConfigurationError.
    """

    num_requests: int
    prompt: Lengths
    output: Lengths
    seed: int = 0
    prefix_tokens: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_prefixes < 1 or self.prefix_tokens < 0:
            raise ConfigurationError(
                "invalid number of requests or prefixes",
                found=str(self),
                expected="at least one request and one prefix",
            )


def synthetic(load: Synthetic, arrivals: tuple[float, ...]) -> tuple[PlannedRequest, ...]:
    """A request for every arrival, in their order; `arrivals` has `load.num_requests` times."""
    chooser = random.Random(load.seed)
    return tuple(_planned(load, number, at_s, chooser) for number, at_s in enumerate(arrivals))


def _planned(load: Synthetic, number: int, at_s: float, chooser: random.Random) -> PlannedRequest:
    own = Piece(f"{load.seed}/own/{number}", load.prompt.draw(chooser))
    if not load.prefix_tokens:
        return PlannedRequest(at_s, Prompt((own,)), load.output.draw(chooser))
    shared = Piece(f"{load.seed}/shared/{chooser.randrange(load.num_prefixes)}", load.prefix_tokens)
    return PlannedRequest(at_s, Prompt((shared, own)), load.output.draw(chooser))


def renamed(planned: Iterable[PlannedRequest], name: str) -> tuple[PlannedRequest, ...]:
    """The same arrivals and lengths with other tokens. Prompts that begin alike still do, with each other only: a
    server's prefix cache has nothing of them from requests under another name."""
    return tuple(replace(each, prompt=_renamed(each.prompt, name)) for each in planned)


def _renamed(prompt: Prompt, name: str) -> Prompt:
    return Prompt(tuple(Piece(f"{name}/{piece.name}", piece.num_tokens) for piece in prompt.pieces))


class Line(msgspec.Struct, frozen=True):
    """One line of a trace. Other keys are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(lines: Iterable[str], speed: float = 1.0) -> tuple[PlannedRequest, ...]:
    """The requests in the order of their arrival, the first at 0; `speed` 2 lets them come twice as fast.

    Raises ConfigurationError naming the line.
    """
    if not speed > 0:
        raise ConfigurationError("--trace-speed must be positive", found=str(speed), expected="such as 1 or 2.5")
    numbered = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
    read = sorted(((_line(number, text), number) for number, text in numbered), key=lambda pair: pair[0].timestamp)
    if not read:
        raise ConfigurationError("the trace is empty", expected="one JSON object per line")
    first_ms = read[0][0].timestamp
    return tuple(
        PlannedRequest((line.timestamp - first_ms) / 1000 / speed, _prompt(line, number), line.output_length)
        for line, number in read
    )


def _line(number: int, text: str) -> Line:
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _wrong(number, str(error)) from None
    if not (1 <= line.input_length <= MAX_TOKENS and 1 <= line.output_length <= MAX_TOKENS and line.timestamp >= 0):
        raise _wrong(number, text.strip())
    return line


def _wrong(number: int, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"invalid line {number} of the trace",
        found=found,
        expected=f"timestamp (ms, not negative), input_length and output_length (tokens, 1 to {MAX_TOKENS})",
        hint='such as {"timestamp": 1200, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}',
    )


def _prompt(line: Line, number: int) -> Prompt:
    pieces, left = [], line.input_length
    for hash_id in line.hash_ids:
        if left > 0:
            pieces.append(Piece(f"hash/{hash_id}", min(left, BLOCK_TOKENS)))
            left -= BLOCK_TOKENS
    if left > 0:
        pieces.append(Piece(f"line/{number}", left))
    return Prompt(tuple(pieces))
