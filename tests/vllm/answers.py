"""What an answer is compared with, and how: tokens exactly, log-probabilities within the noise of a control."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from proxy import Answer, Question, RefusedError, ask, ask_disaggregated
from servers import Pair, Server
from tiny_models import VOCAB_SIZE

__all__ = ["Comparison", "alone", "check_equal", "compare", "judge", "loaded_tokens", "prompts_of", "wait_until_free"]

FIRST_PLAIN_TOKEN = 4
# Where a last token is computed alone or behind others, its sums are added up in another order.
FLOORS = {"float32": 1e-4, "bfloat16": 0.2}
NOISE_FACTOR = 10.0
POLL_S = 0.25
USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's three answers: of the prefill server alone, of the decode server alone, and of both together.

    `moved` is the error when the servers refused to work together, `dtype` that of their weights and caches.
    """

    num_prompt_tokens: int
    reference: Answer
    control: Answer
    moved: Answer | RefusedError
    dtype: str = "float32"

    @property
    def noise(self) -> float:
        """What two servers differ by when nothing is transferred."""
        return difference(self.reference, self.control)

    @property
    def error(self) -> float:
        return float("inf") if isinstance(self.moved, RefusedError) else difference(self.reference, self.moved)

    @property
    def problem(self) -> str:
        """Empty when the transferred cache gave the answer of a single server."""
        size = f"prompt of {self.num_prompt_tokens} tokens"
        if isinstance(self.moved, RefusedError):
            return f"{size}: {self.moved}"
        if self.control.tokens != self.reference.tokens:
            return f"{size}: inconclusive, the two servers differ without any transfer"
        # In a short format the second best token can become the best, and all that follow are others.
        if self.moved.tokens != self.reference.tokens and self.dtype == "float32":
            return f"{size}: tokens {self.moved.tokens} instead of {self.reference.tokens}"
        limit = max(FLOORS[self.dtype], NOISE_FACTOR * self.noise)
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


def try_both(source: Server, target: Server, question: Question) -> Answer | RefusedError:
    try:
        return ask_disaggregated(source, target, question)
    except RefusedError as refused:
        return refused


def judge(source: Server, target: Server, question: Question, moved: Answer | RefusedError) -> Comparison:
    """Compare an answer of both servers together with those of each alone."""
    reference, control = ask(source, alone(question)), ask(target, alone(question))
    return Comparison(len(question.prompt), reference, control, moved, source.pair.computes_in)


def compare(pair: Pair, questions: Sequence[Question], at_once: int = 1, reverse: bool = False) -> list[Comparison]:
    """Ask prefill alone, decode alone and both together; `at_once` transfers run at the same time.

    With `reverse` the cache goes from the decode server to the prefill server, which both must be able to do.
    """
    source, target = (pair.decode, pair.prefill) if reverse else (pair.prefill, pair.decode)
    with ThreadPoolExecutor(at_once) as pool:
        moved = list(pool.map(lambda question: try_both(source, target, question), questions))
    return [judge(source, target, *both) for both in zip(questions, moved, strict=True)]


def check_equal(pair: Pair, questions: Sequence[Question], at_once: int = 1, reverse: bool = False) -> None:
    """Every answer is right, and the deciding side computed no prompt but for the last token of each."""
    target = pair.prefill if reverse else pair.decode
    before = loaded_tokens(target)
    found = compare(pair, questions, at_once, reverse)
    loaded = loaded_tokens(target) - before
    error, noise = max(one.error for one in found), max(one.noise for one in found)
    print(f"\n{pair.spec}: loaded {loaded:.0f} tokens, off by {error:.1e}, control {noise:.1e}")
    assert [one.problem for one in found if one.problem] == []
    assert loaded >= sum(len(question.prompt) - 1 for question in questions)


def loaded_tokens(server: Server) -> float:
    """How many prompt tokens this server took from another server instead of computing them, so far.

    vLLM counts what a connector promised; with the failure policy `fail` a broken promise is an error, not an answer.
    """
    return server.metric(EXTERNAL_HITS)


def wait_until_free(servers: Sequence[Server], within_s: float) -> None:
    """Wait until no request holds a block of any of these servers; fails when that takes longer than `within_s`."""
    deadline = time.monotonic() + within_s
    while held := {s.log.stem: s.metric(USAGE) for s in servers if s.metric(USAGE) > 0 or s.metric(RUNNING) > 0}:
        assert time.monotonic() < deadline, f"blocks are still held after {within_s:.0f} s: {held}"
        time.sleep(POLL_S)
