"""Synthetic requests with their arrival times, by seed. Pure."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from kvferry.bench.load.prompts import Piece, Prompt
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `low` to `high`, both included, each as likely as the other."""

    low: int
    high: int

    def draw(self, chooser: random.Random) -> int:
        return chooser.randint(self.low, self.high)


def lengths_named(text: str) -> Lengths:
    """`512` or `256-1024`. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text.strip(), re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigurationError("invalid number of tokens", found=text, expected="such as 512 or 256-1024")
    return Lengths(low, high)


def poisson(num_requests: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds, ascending; at an infinite `rate` (requests/s) all arrive at once, at 0.

    The same seed gives the same times, scaled by the rate. Raises ConfigurationError for a rate that is not positive.
    """
    if not rate > 0:
        raise ConfigurationError("the rate must be positive", found=str(rate), expected="requests/s, or inf")
    if math.isinf(rate):
        return (0.0,) * num_requests
    chooser, at, times = random.Random(seed), 0.0, []
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
