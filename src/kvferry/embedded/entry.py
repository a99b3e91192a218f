"""Requests on their way through the engine, and what comes back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvferry.errors import FerryError
from kvferry.session.events import NOT_AHEAD, Ahead

__all__ = ["Entry", "Grown", "Prefilled", "Request", "Token"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `request_id` must never have been used with this engine before.

    The answer ends after `max_new_tokens` tokens or with one of `stop_token_ids`, which is then its last token.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. `finish_reason` is empty but for the last one: `stop` or `length`.

    `num_computed` prompt tokens really went through this engine's model before the first token.
    """

    token_id: int
    finish_reason: str
    num_computed: int


@dataclass(frozen=True, slots=True)
class Grown:
    """Where a request's cache is, or will be: `block_tables`, one per cache group. `num_tokens` of it are computed, and
    of some states more (`ahead`)."""

    num_tokens: int
    block_tables: list[list[int]]
    ahead: Ahead = NOT_AHEAD


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt: `block_tables` (one per cache group) hold the cache of all its `num_tokens` tokens."""

    first: Token
    num_tokens: int
    block_tables: list[list[int]]


@dataclass(slots=True)
class Entry:
    """A request that owns, or waits for, blocks. The last item of `tokens` is a finishing token or an error, that of
    `grown` all of a held prompt or an error."""

    request: Request
    lent: bool
    tokens: asyncio.Queue[Token | FerryError] = field(default_factory=asyncio.Queue)
    grown: asyncio.Queue[Grown | FerryError] = field(default_factory=asyncio.Queue)
    num_seen: int = 0
    freeing: bool = False

    def fail(self, error: FerryError) -> None:
        self.tokens.put_nowait(error)
        self.grown.put_nowait(error)
