"""Parts of answers, and several answers that come side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvferry.embedded.serving.logprobs import ScoredToken
from kvferry.embedded.serving.metrics import Report


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A part of choice `index` of an answer. The last one has a `finish_reason`, the report, and a prefill leg's
    reference.

    That of an early leg comes in its first piece as well, which has nothing else.
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
