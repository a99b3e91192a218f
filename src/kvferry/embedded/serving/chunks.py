"""Parts of answers, with log-probabilities of their tokens, and several answers that come side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvferry.connectors.jobs import Scored, TokenLogprob
from kvferry.embedded.engine.detokenizer import Tokenizer
from kvferry.embedded.serving.metrics import Report

# JSON has no infinity; the number is vLLM's.
LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token as text, and the logarithm of its probability."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, its place in the answer's text in characters, and the likeliest tokens there."""

    chosen: Candidate
    top: tuple[Candidate, ...]
    text_offset: int


def scored_token(tokenizer: Tokenizer, scored: Scored, text_offset: int, before: Sequence[int]) -> ScoredToken:
    """A scored token with texts in place of token ids, each token decoded by itself, but for the space that some
    tokenizers leave out at the start of a text. `before` has the id of the token before it."""
    known = tokenizer.decode([*before], skip_special_tokens=False)

    def candidate(found: TokenLogprob) -> Candidate:
        text = tokenizer.decode([found.token_id], skip_special_tokens=False)
        if tokenizer.decode([*before, found.token_id], skip_special_tokens=False) == f"{known} {text}":
            text = f" {text}"
        return Candidate(text, max(found.logprob, LEAST))

    return ScoredToken(candidate(scored.chosen), tuple(candidate(one) for one in scored.top), text_offset)


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A part of choice `index` of an answer. The last one has a `finish_reason`, the report, and a prefill request's
    reference.

    The reference of an early prefill comes in its first chunk as well, which has nothing else.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: Report = field(default_factory=Report)
    reference: dict[str, object] = field(default_factory=dict)
    index: int = 0
    scored: tuple[ScoredToken, ...] = ()


def joined(pieces: Sequence[AnswerChunk]) -> AnswerChunk:
    """The whole of one choice from all its pieces."""
    last = pieces[-1]
    return AnswerChunk(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=last.finish_reason,
        report=last.report,
        reference=last.reference,
        index=last.index,
        scored=tuple(token for piece in pieces for token in piece.scored),
    )


async def interleaved(answers: Sequence[AsyncGenerator[AnswerChunk, None]]) -> AsyncGenerator[AnswerChunk, None]:
    """The pieces of several answers as they come. The first error ends all of them, and so does closing this."""
    arrived: asyncio.Queue[AnswerChunk | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(answer, arrived)) for answer in answers]
    for task in tasks:
        task.add_done_callback(lambda done: arrived.put_nowait(None if done.cancelled() else done.exception()))
    try:
        num_open = len(tasks)
        while num_open:
            match await arrived.get():
                case AnswerChunk() as piece:
                    yield piece
                case None:
                    num_open -= 1
                case error:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    answer: AsyncGenerator[AnswerChunk, None], arrived: asyncio.Queue[AnswerChunk | BaseException | None]
) -> None:
    async with aclosing(answer):
        async for piece in answer:
            arrived.put_nowait(piece)
