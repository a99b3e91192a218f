"""What an engine's steps cost, from a `StepCost` or from times that somebody has measured, and what its caches weigh.
Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from kvferry.connectors.step_cost import UNITS_S, StepCost
from kvferry.errors import ConfigurationError
from kvferry.plan.description.layout import State
from kvferry.plan.description.tokens import TokenRange

Points = tuple[tuple[int, float], ...]
MAX_STEP_S = 86_400.0
EXAMPLE = "such as 1=8ms,32=10ms,128=18ms: answers in the batch, and what a step takes"


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A token of a prompt takes `token_s` to compute. A step with so many answers takes the seconds of `points`, in a
    straight line between two of them and beyond the last, and `context_s` more for each token of their contexts.
    `overlap` is that of `StepCost`.

    A step computes `chunk_tokens` tokens, of which each answer takes `answer_tokens`. An engine writes `max_answers`
    answers at a time whose contexts have `cache_tokens` tokens in all; others wait.
    """

    token_s: float
    points: Points
    overlap: float = 0.0
    context_s: float = 0.0
    chunk_tokens: int = 2048
    answer_tokens: int = 1
    max_answers: int = 256
    cache_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "answer_tokens", "max_answers", "cache_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be positive", found=str(getattr(self, name)), expected=">= 1")
        step_s = self.reading_s(1, 1)
        longest_s = max(self.token_s, step_s, *(step_s for _, step_s in self.points))
        if not (self.token_s > 0 and step_s > 0 and longest_s <= MAX_STEP_S):
            raise ConfigurationError(
                "a step must take time, and end",
                found=f"token={self.token_s:g}s, {step_s:g}s for a step of one answer, {longest_s:g}s for the longest",
                expected=f"times above 0 for a token of a prompt and for a step, and none above {MAX_STEP_S:g} s",
            )

    def reading_s(self, num_answers: int, context_tokens: int) -> float:
        """The seconds of a step without prompts."""
        return _interpolated(self.points, num_answers) + context_tokens * self.context_s

    def seconds(self, num_tokens: int, num_answers: int, context_tokens: int) -> float:
        """The seconds of a step that computes `num_tokens` tokens of prompts, and the next token of each answer."""
        reading_s = self.reading_s(num_answers, context_tokens)
        return StepCost(self.token_s, reading_s, 0.0, self.overlap).seconds(num_tokens, 0)

    def room(self, num_answers: int) -> int:
        """How many tokens of prompts a step can compute beside so many answers."""
        return max(self.chunk_tokens - self.answer_tokens * num_answers, 1)


@dataclass(frozen=True, slots=True)
class PartOfTokens:
    """Layers of which not all tokens move: those in a window, or of the last chunk, with `bytes_per_entry` each. With
    `compress_ratio` above 1 an entry is of so many tokens, and all of them move. The names are those of `State`."""

    bytes_per_entry: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    compress_ratio: int = 1

    def num_bytes(self, tokens: TokenRange) -> int:
        limits = self.window_tokens, self.chunk_tokens, self.compress_ratio
        return self.bytes_per_entry * len(State("", "", 1, (), True, *limits).seen_by_next(tokens))


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What moves of a request: bytes for each token, of fixed size, and of layers of which only a part of the tokens
    moves; in so many rows per block of a prompt. A model whose layers all have windows has nothing for each token."""

    bytes_per_token: float
    fixed_bytes: int = 0
    rows_per_block: int = 1
    block_tokens: int = 16
    parts: tuple[PartOfTokens, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.bytes_per_token, self.fixed_bytes, *(part.bytes_per_entry for part in self.parts)
        if not min(sizes) >= 0 or not sum(sizes) > 0:
            raise ConfigurationError(
                "a cache must have bytes",
                found=f"{self.bytes_per_token:g} per token, {self.fixed_bytes} of fixed size",
                expected="none below 0, and one above",
            )

    def num_bytes(self, tokens: TokenRange) -> int:
        """The bytes that move of these tokens of a prompt, the last ones."""
        lasting = round(len(tokens) * self.bytes_per_token)
        return lasting + self.fixed_bytes + sum(part.num_bytes(tokens) for part in self.parts)

    def num_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens) * self.rows_per_block + 1


def points_of(step: StepCost) -> Points:
    """Two points of the straight line that a `StepCost` is."""
    return ((0, step.step_s), (1, step.step_s + step.sequence_s))


def beside_measured_prompts(points: Points) -> Points:
    """The same points where the speed of prompts was measured: that has all that a step without answers takes."""
    # The second point keeps the line to the next one, and beyond, as steep as it was.
    first = ((0, 0.0), *((number, _interpolated(points, number)) for number in (1, 2)))
    return (*first, *(point for point in points if point[0] > 2))


def points_named(text: str) -> Points:
    """The points of `1=8ms,32=10ms,128=18ms`, by ascending numbers of answers. Raises ConfigurationError."""
    points = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d{1,6})=(\d+(?:\.\d+)?)(us|ms|s)", word.strip(), re.ASCII)
        if found is None:
            raise ConfigurationError("invalid times of decode steps", found=word.strip() or text, expected=EXAMPLE)
        points.append((int(found[1]), float(found[2]) * UNITS_S[found[3]]))
    numbers = [number for number, _ in points]
    if numbers != sorted(set(numbers)):
        raise ConfigurationError("the numbers of answers must ascend", found=text, expected=EXAMPLE)
    if any(later[1] < sooner[1] for sooner, later in pairwise(points)):
        raise ConfigurationError("a step with more answers cannot take less", found=text, expected=EXAMPLE)
    return tuple(points)


def _interpolated(points: Points, number: int) -> float:
    """The seconds for this number of answers. Below the first point, they are that point's."""
    if number <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right(points, number, key=lambda point: point[0]), len(points) - 1)
    (low, low_s), (high, high_s) = points[right - 1], points[right]
    return low_s + (high_s - low_s) * (number - low) / (high - low)
