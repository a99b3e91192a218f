"""Which requests come when: a Poisson process or a trace, and a beginning that is suddenly in many of them. Pure but
for the dice, which are seeded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.bench.load.workload import Lengths, Piece, PlannedRequest, Prompt, Synthetic, synthetic
from kvferry.errors import ConfigurationError
from kvferry.router.policy.records import RequestCost
from kvferry.router.request.prompt_cost import BYTES_PER_TOKEN, MAX_PREFIXES, PREFIX_BYTES
from kvferry.simulate.incidents import HotPrefix

# The router names beginnings of a text prompt: one for each KiB.
PREFIX_TOKENS = PREFIX_BYTES // BYTES_PER_TOKEN
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """A Poisson process of `rate` requests/s for `duration_s` seconds. Lengths are in tokens. With `prefix_tokens`
    above 0 every prompt begins with one of `num_prefixes` shared beginnings of that length, which is added to it."""

    rate: float
    duration_s: float
    prompt: Lengths
    output: Lengths
    seed: int = 0
    prefix_tokens: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.duration_s > 0 and self.rate * self.duration_s <= MAX_REQUESTS):
            raise ConfigurationError(
                "nothing to simulate, or too much",
                found=f"{self.rate:g} requests/s for {self.duration_s:g} s",
                expected=f"a rate and a duration above 0, and at most {MAX_REQUESTS:,} requests",
            )

    def requests(self) -> tuple[PlannedRequest, ...]:
        """The requests of the process. The same seed has the same ones."""
        # Dice of their own, as in `poisson`: lengths must not follow from gaps.
        chooser, at, times = random.Random(f"{self.seed}/arrivals"), 0.0, []
        while (at := at + chooser.expovariate(self.rate)) < self.duration_s:
            times.append(at)
        if not times:
            raise ConfigurationError(
                "no request comes in this time",
                found=f"{self.rate:g} requests/s for {self.duration_s:g} s",
                expected="a longer --duration, or a higher --rate",
            )
        words = len(times), self.prompt, self.output, self.seed, self.prefix_tokens, self.num_prefixes
        return synthetic(Synthetic(*words), tuple(times))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the router sees it, and when. `names` are those of all beginnings of its prompt, for engines, which
    cache all of it: the router's estimate has the first ones."""

    at_s: float
    cost: RequestCost
    names: tuple[int, ...] = ()

    @property
    def output_tokens(self) -> int:
        return self.cost.new_tokens


def arrivals_of(planned: Sequence[PlannedRequest], hot: Iterable[HotPrefix], seed: int) -> tuple[Arrival, ...]:
    """The requests with their costs. A part of the prompts has a hot beginning in place of its own."""
    chooser, incidents = random.Random(f"{seed}/hot"), tuple(hot)
    return tuple(_arrival(each, incidents, chooser) for each in planned)


def check_fit(planned: Iterable[PlannedRequest], cache_tokens: int) -> None:
    """Raises ConfigurationError for a request whose prompt and answer no engine's cache holds: no engine serves it."""
    longest = max(each.prompt.num_tokens + each.output_tokens for each in planned)
    if longest > cache_tokens:
        raise ConfigurationError(
            "a request does not fit into an engine's cache",
            found=f"{longest:,} tokens of a prompt and its answer",
            expected=f"at most {cache_tokens:,}, which the cache holds",
            hint="raise --cache-tokens to what your engines have, or leave such requests out",
        )


def _arrival(each: PlannedRequest, hot: tuple[HotPrefix, ...], chooser: random.Random) -> Arrival:
    prompt, drawn = each.prompt, chooser.random()
    for number, incident in enumerate(hot):
        if incident.begins_s <= each.at_s < incident.ends_s:
            if 0 <= drawn < incident.share:
                prompt = _beginning(prompt, f"hot/{number}", incident.num_tokens)
            # Each has its own part of the draws: a prompt has the beginning of one of them.
            drawn -= incident.share
    names = _names(prompt)
    cost = RequestCost(prompt.num_tokens, each.output_tokens, names[:MAX_PREFIXES], PREFIX_TOKENS)
    return Arrival(each.at_s, cost, names)


def _beginning(prompt: Prompt, name: str, num_tokens: int) -> Prompt:
    """The prompt with a hot beginning of this name. Its length stays as it is."""
    hot = Piece(name, min(num_tokens, prompt.num_tokens))
    rest = Piece(f"{prompt.pieces[-1].name}/rest", prompt.num_tokens - hot.num_tokens)
    return Prompt((hot, rest) if rest.num_tokens else (hot,))


def _names(prompt: Prompt) -> tuple[int, ...]:
    """A name for every `PREFIX_TOKENS` tokens. Prompts that are equal up to there have equal names."""
    names, ends, pieces = list[int](), 0, blake2b(digest_size=8)
    for piece in prompt.pieces:
        pieces.update(f"/{piece.name}".encode())
        ends += piece.num_tokens
        # One digest for all names that end in this piece: a prompt of a million tokens has thousands.
        first = int.from_bytes(pieces.digest())
        names.extend(range(first + len(names), first + ends // PREFIX_TOKENS))
    return tuple(names)
