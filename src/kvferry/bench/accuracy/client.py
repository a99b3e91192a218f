"""Asks a server for greedy answers with log-probabilities, and how likely it finds a text that is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvferry.bench.accuracy.completion import Answer, answer_of
from kvferry.bench.load.answer import refusal
from kvferry.bench.load.target import open_session
from kvferry.http.client_errors import client_error_text

# Not every server knows the field.
IGNORED = "the server has not answered with the only token that was allowed (allowed_token_ids)"

Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Forced:
    """A prompt's token ids, and the token that comes next in the text that is given."""

    prompt: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class Server:
    """A base URL without `/v1`, a model, and headers of every request. `at_once` requests are open at a time. Only
    requests with the same `salt` share a prefix cache."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    at_once: int = 1
    salt: str = ""
    timeout_s: float = 600.0

    async def answers(
        self, prompts: Iterable[str | Sequence[int]], max_tokens: int, progress: Progress
    ) -> list[Answer]:
        """A greedy answer to each prompt, which is a text or token ids."""
        fields = {"max_tokens": max_tokens, "logprobs": 1, "return_token_ids": True}
        return await self._each([{"prompt": prompt, **fields} for prompt in prompts], progress)

    async def scores(self, forced: Iterable[Forced], progress: Progress) -> list[Answer]:
        """Each given token after its prompt, with its log-probability: no other is allowed to follow. The answer is an
        error if one does, or if the server does not say which."""
        forced = list(forced)
        bodies = [
            {
                "prompt": list(each.prompt),
                "max_tokens": 1,
                "logprobs": 1,
                "return_token_ids": True,
                "allowed_token_ids": [each.token],
                "ignore_eos": True,
            }
            for each in forced
        ]
        answers = await self._each(bodies, progress)
        return [_checked(answer, each.token) for answer, each in zip(answers, forced, strict=True)]

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of a prompt. Raises ClientError, OSError or ValueError where the server cannot tell them."""
        async with open_session(self.headers, self.timeout_s) as session:
            body = await _post(session, f"{self.url}/tokenize", {"model": self.model, "prompt": text})
        return msgspec.convert(body, Tokenized).tokens

    async def _each(self, bodies: list[dict[str, Any]], progress: Progress) -> list[Answer]:
        found: dict[int, Answer] = {}
        waiting = iter(enumerate(bodies))

        async with open_session(self.headers, self.timeout_s) as session:

            async def work() -> None:
                for number, body in waiting:
                    found[number] = await self._ask(session, body)
                    progress()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.at_once, len(bodies))):
                    group.create_task(work())
        return [found[number] for number in range(len(bodies))]

    async def _ask(self, session: aiohttp.ClientSession, fields: dict[str, Any]) -> Answer:
        body = fields | {"model": self.model, "temperature": 0} | ({"cache_salt": self.salt} if self.salt else {})
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                return answer_of(response.status, await response.read(), response.headers)
        except TimeoutError:
            return Answer(error=f"no answer within {self.timeout_s:g} s (--timeout)")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(error=client_error_text(error))


def _checked(answer: Answer, token: int) -> Answer:
    return answer if answer.error or answer.ids == (token,) else Answer(error=IGNORED)


class Tokenized(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]


async def _post(session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> Any:
    async with session.post(url, json=fields) as response:
        if response.status != 200:
            raise ValueError(refusal(response.status, await response.read()))
        return msgspec.json.decode(await response.read())
