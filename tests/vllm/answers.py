"""What an answer is compared with, and how: tokens exactly, log-probabilities within the noise of a control."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from models import VOCAB_SIZE
from proxy import Answer, Question, ask, ask_disaggregated
from servers import Pair, Server

__all__ = ["Comparison", "compare", "loaded_tokens", "prompts_of"]

FIRST_PLAIN_TOKEN = 4
FLOOR = 1e-4
NOISE_FACTOR = 10.0
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's three answers: of the prefill server alone, of the decode server alone, and of both together."""

    num_prompt_tokens: int
    reference: Answer
    control: Answer
    moved: Answer

    @property
    def noise(self) -> float:
        """What two servers differ by when nothing is transferred."""
        return difference(self.reference, self.control)

    @property
    def error(self) -> float:
        return difference(self.reference, self.moved)

    @property
    def problem(self) -> str:
        """Empty when the transferred cache gave the answer of a single server."""
        size = f"prompt of {self.num_prompt_tokens} tokens"
        if self.control.tokens != self.reference.tokens:
            return f"{size}: inconclusive, the two servers differ without any transfer"
        if self.moved.tokens != self.reference.tokens:
            return f"{size}: tokens {self.moved.tokens} instead of {self.reference.tokens}"
        limit = max(FLOOR, NOISE_FACTOR * self.noise)
        if not self.error <= limit:
            return f"{size}: log-probabilities off by {self.error:.1e}, the control without transfer {self.noise:.1e}"
        return ""


def difference(left: Answer, right: Answer) -> float:
    """The largest difference of log-probabilities, as far as the tokens agree."""
    pairs = zip(left.tokens, right.tokens, left.logprobs, right.logprobs, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return max((abs(a - b) for _, _, a, b in same), default=float("inf"))


def prompts_of(sizes: Sequence[int], num_tokens: int = 12, seed: int = 0) -> list[Question]:
    """Random prompts of these many tokens, alike in every run; no two share a cached prefix, nor two calls'."""
    chooser = random.Random(seed)
    salt = f"salt-{next(_salts)}"
    return [
        Question(
            tuple(chooser.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(size)), f"{salt}-{i}", num_tokens
        )
        for i, size in enumerate(sizes)
    ]


def alone(question: Question) -> Question:
    """The same question under another salt, so that it meets no cached prefix."""
    return replace(question, salt=f"alone-{next(_salts)}")


def compare(pair: Pair, questions: Sequence[Question], at_once: int = 1, reverse: bool = False) -> list[Comparison]:
    """Ask prefill alone, decode alone and both together; `at_once` transfers run at the same time.

    With `reverse` the cache goes from the decode server to the prefill server, which both must be able to do.
    """
    source, target = (pair.decode, pair.prefill) if reverse else (pair.prefill, pair.decode)
    with ThreadPoolExecutor(at_once) as pool:
        moved = list(pool.map(lambda question: ask_disaggregated(source, target, question), questions))
    return [
        Comparison(len(q.prompt), ask(source, alone(q)), ask(target, alone(q)), answer)
        for q, answer in zip(questions, moved, strict=True)
    ]


def problems(comparisons: Sequence[Comparison]) -> list[str]:
    return [found.problem for found in comparisons if found.problem]


def loaded_tokens(server: Server) -> float:
    """How many prompt tokens this server took from another server instead of computing them, so far."""
    return server.metric(EXTERNAL_HITS)
