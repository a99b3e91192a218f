"""Choosing tokens request by request, where upstream knows one way for all.

Upstream's own logits processors do the work, in the order in which vLLM applies its own. The log-probabilities are
those of the model, before any of it, as vLLM's are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.connectors.jobs import Event, Job, Scored, TokenLogprob, Unanswerable
from kvferry.connectors.sampling import GREEDY_BELOW, Sampling

Processors = list[LogitsProcessor]


@dataclass
class SampledState(RequestState):  # type: ignore[misc]
    """A request with its own way of choosing tokens; without one it is decoded greedily."""

    sampler: TokenSampler | None = None


class TokenSampler:
    """Chooses the tokens of one request. What it draws depends on its seed and its own logits only, so that an answer
    is the same beside other requests, on another engine, and after a transfer."""

    def __init__(self, job: Job) -> None:
        sampling = job.sampling
        self.sampling = sampling
        self._prompt = job.prompt
        self._stops = SuppressTokensLogitsProcessor(sorted(job.stop_token_ids)) if job.stop_token_ids else None
        self._constraints = _constraints(sampling)
        self._repetition = _repetition(sampling)
        self._warpers = _warpers(sampling)
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @classmethod
    def of(cls, job: Job) -> TokenSampler | None:
        """Return the job's sampler, or None for a job that only wants the likeliest tokens."""
        return None if job.sampling.is_greedy else cls(job)

    def choose(self, logits: torch.Tensor, answer: list[int]) -> int:
        """The token after `answer`. `logits` has one row. Raises ValueError when no token is possible."""
        scores = self._penalised(self._allowed(logits, answer), answer)
        if not torch.isfinite(scores.max()):
            raise ValueError("the request forbids every token")
        if self.sampling.temperature < GREEDY_BELOW:
            return int(scores.argmax())
        ids = torch.empty((1, 0), dtype=torch.long)  # none of these looks at the text
        for warper in self._warpers:
            scores = warper(ids, scores)
        odds = scores.softmax(-1)
        if not torch.isfinite(odds).all():
            # Drawing from these raises an error that would end every request of the batch.
            raise ValueError("the request's penalties and temperature leave no valid probabilities")
        return int(torch.multinomial(odds, 1, generator=self._generator))

    def _allowed(self, scores: torch.Tensor, answer: list[int]) -> torch.Tensor:
        if self._constraints:
            ids = torch.tensor([answer], dtype=torch.long)
            for constraint in self._constraints:
                scores = constraint(ids, scores)
        if self._stops is not None and len(answer) < self.sampling.min_tokens:
            scores = self._stops(None, scores)
        return scores

    def _penalised(self, scores: torch.Tensor, answer: list[int]) -> torch.Tensor:
        if self._repetition is not None:
            scores = self._repetition(torch.tensor([[*self._prompt, *answer]]), scores)
        sampling = self.sampling
        if answer and (sampling.frequency_penalty or sampling.presence_penalty):
            # Upstream has no processor for these two.
            counts = torch.bincount(torch.tensor(answer), minlength=scores.shape[-1])
            scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        return scores


class BatchSampler:
    """Takes the place of upstream's `ModelRunner._sample`, which it asks first: its tokens stay where no request says
    otherwise."""

    def __init__(self, runner: Any, emit: Callable[[Event], None]) -> None:
        self._batch = runner.inputs_and_outputs
        self._greedy = runner._sample
        self._emit = emit

    def __call__(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """`scores` is (1, answered requests, vocabulary); the first row of `output_ids` gets their tokens."""
        self._greedy(scores, output_ids)
        states = [future.state for future in self._batch.requests_in_batch if future.has_new_token]
        for row, state in enumerate(states):
            if state.sampler is not None:
                # On the host, where a seed draws the same whatever the device is.
                output_ids[0, row] = self._token(state, scores[0, row : row + 1].cpu())

    def _token(self, state: SampledState, logits: torch.Tensor) -> int:
        sampler = state.sampler
        if sampler is None:
            return int(logits.argmax())
        try:
            token_id = sampler.choose(logits, state.generated_tokens)
        except ValueError as error:
            # An error that leaves this thread's step would end every request of the batch.
            self._emit(Unanswerable(state.request_id, str(error)))
            return int(logits.argmax())
        if sampler.sampling.logprobs:
            self._emit(_scored(state.request_id, logits[0], token_id, sampler.sampling.num_top_logprobs))
        return token_id


def _scored(request_id: str, logits: torch.Tensor, token_id: int, num_top: int) -> Scored:
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(TokenLogprob(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True))
    return Scored(request_id, TokenLogprob(token_id, float(logprobs[token_id])), top)


def _constraints(sampling: Sampling) -> Processors:
    """Return the logits processors that look at the answer so far."""
    processors: Processors = []
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1))
    if sampling.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words_ids]))
    if sampling.logit_bias:
        bias = {(token_id,): float(value) for token_id, value in sampling.logit_bias}
        processors.append(SequenceBiasLogitsProcessor(bias))
    return processors


def _repetition(sampling: Sampling) -> LogitsProcessor | None:
    is_given = sampling.repetition_penalty != 1.0
    return RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty) if is_given else None


def _warpers(sampling: Sampling) -> Processors:
    processors: Processors = []
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors
