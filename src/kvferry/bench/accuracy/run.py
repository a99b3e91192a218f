"""Three runs over the same prompts: the whole server, the whole server in other batches, and the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from kvferry.bench.accuracy.client import IGNORED, Forced, Progress, Server
from kvferry.bench.accuracy.comparison import Comparison, Measured, Run
from kvferry.bench.accuracy.items import Item
from kvferry.http.client_errors import client_error_text

Phase = Callable[[str, int], Progress]
"""Says what is going to be asked, and how often; returns what counts the answers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked: tokens of an answer, and tokens of each reference, spread over it."""

    answer_tokens: int
    score_tokens: int


async def measure(
    whole: Server, split: Server, items: tuple[Item, ...], extent: Extent, phase: Phase, *, with_control: bool
) -> Measured:
    """Ask both servers everything. `whole` is asked one request at a time, and so many as it says in the control."""
    forced, unscored = await _forced(whole, items, extent.score_tokens)

    async def run(name: str, server: Server) -> Run:
        count = phase(name, len(items) + len(forced))
        answers = await server.answers([item.prompt for item in items], extent.answer_tokens, count)
        return Run(tuple(answers), tuple(await server.scores(forced, count)))

    baseline = await run("whole, one at a time", replace(whole, at_once=1, salt=f"{whole.salt}-baseline"))
    if any(answer.error == IGNORED for answer in baseline.scores):
        forced, unscored, baseline = [], IGNORED, replace(baseline, scores=())

    async def compared(name: str, server: Server) -> Comparison:
        return Comparison(items, baseline, await run(name, server))

    again = replace(whole, salt=f"{whole.salt}-control")
    control = await compared("whole, several at once", again) if with_control else None
    return Measured(items, baseline, await compared("split", split), control, unscored)


async def _forced(server: Server, items: Sequence[Item], num_tokens: int) -> tuple[list[Forced], str]:
    """The tokens of references that both servers are going to score; or none, and why."""
    found: list[Forced] = []
    try:
        for item in items if num_tokens else ():
            if item.reference:
                prompt, text = await server.tokenize(item.prompt), await server.tokenize(item.prompt + item.reference)
                found += _spread(prompt, text, num_tokens)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return [], client_error_text(error) if isinstance(error, aiohttp.ClientError) else str(error)
    return found, ""


def _spread(prompt: tuple[int, ...], text: tuple[int, ...], num_tokens: int) -> list[Forced]:
    """Tokens of a text after those that it shares with its prompt: the first, and others as far apart as can be."""
    shared = next((at for at, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), len(prompt))
    first, last = max(shared, 1), len(text) - 1
    steps = min(num_tokens, last - first + 1)
    places = {first + (last - first) * step // max(steps - 1, 1) for step in range(steps)}
    return [Forced(text[:place], text[place]) for place in sorted(places)]
