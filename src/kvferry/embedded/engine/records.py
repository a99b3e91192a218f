"""Requests on their way through the engine, and what comes back."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvferry import NOT_AHEAD, Ahead, FirstToken
from kvferry.connectors.jobs import Allocated, BlockTables, Held, Produced, Progressed, Scored, Unanswerable
from kvferry.connectors.sampling import GREEDY, Sampling
from kvferry.errors import FerryError, RequestError


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `request_id` must never have been used with this engine before.

    The answer ends after `max_new_tokens` tokens or with one of `stop_token_ids`, which is then its last token.
    `sampling` says how its tokens are chosen.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. `finish_reason` is empty but for the last one: `stop` or `length`.

    `num_computed` prompt tokens really went through this engine's model before the first token. `scored` is there when
    the request's sampling wants log-probabilities.
    """

    token_id: int
    finish_reason: str
    num_computed: int
    scored: Scored | None = None

    def to_send(self) -> FirstToken:
        """Return the token in the form for a decode engine that computes no token of a prompt."""
        if self.scored is None:
            return FirstToken(self.token_id)
        top = tuple((one.token_id, one.logprob) for one in self.scored.top)
        return FirstToken(self.token_id, self.scored.chosen.logprob, top)


@dataclass(frozen=True, slots=True)
class Grown:
    """Where a request's cache is, or will be: `block_tables`, one per cache group. `num_tokens` of it are computed, and
    of some states more (`ahead`)."""

    num_tokens: int
    block_tables: BlockTables
    ahead: Ahead = NOT_AHEAD


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt: `block_tables` (one per cache group) hold the cache of all its `num_tokens` tokens."""

    first: Token
    num_tokens: int
    block_tables: BlockTables


@dataclass(slots=True)
class Entry:
    """A request that owns, or waits for, blocks. The last item of `tokens` is a finishing token or an error. The last
    item of `grown` is all of a held prompt or an error."""

    request: Request
    is_leased: bool
    tokens: asyncio.Queue[Token | FerryError] = field(default_factory=asyncio.Queue)
    grown: asyncio.Queue[Grown | FerryError] = field(default_factory=asyncio.Queue)
    scored: deque[Scored] = field(default_factory=deque)
    num_seen: int = 0
    freeing: bool = False

    def fail(self, error: FerryError) -> None:
        self.tokens.put_nowait(error)
        self.grown.put_nowait(error)

    def hear(self, event: Allocated | Progressed | Held | Produced | Scored | Unanswerable) -> None:
        """Take in what has happened to this request in the engine's thread."""
        match event:
            case Allocated(_, tables):
                self._grow(tables, 0)
            case Progressed(_, tables, num_tokens, ahead):
                self._grow(tables, num_tokens, ahead)
            case Held(_, tables):
                self._grow(tables, len(self.request.prompt))
            case Scored():
                self.scored.append(event)
            case Unanswerable(_, reason):
                self.fail(_no_token(reason))
            case Produced():
                self._produce(event)

    def _grow(self, tables: BlockTables, num_tokens: int, ahead: Ahead = NOT_AHEAD) -> None:
        if tables:
            self.grown.put_nowait(Grown(num_tokens, tables, ahead))
        else:
            request_id = self.request.request_id
            self.fail(RequestError("the engine had no blocks left for an admitted request", found=request_id))

    def _produce(self, event: Produced) -> None:
        new, self.num_seen = event.tokens[self.num_seen :], len(event.tokens)
        for i, token_id in enumerate(new):
            last = event.finished and not event.error and i == len(new) - 1
            reason = "stop" if token_id in self.request.stop_token_ids else "length"
            scored = self.scored.popleft() if self.scored else None
            self.tokens.put_nowait(Token(token_id, reason if last else "", event.num_computed, scored))
        if event.error:
            self.fail(FerryError("the engine could not answer", found=event.error))


def _no_token(reason: str) -> RequestError:
    return RequestError(
        "the engine has no token to go on with",
        found=reason,
        expected="a token that allowed_token_ids, bad_words, logit_bias and min_tokens leave possible",
        hint="forbid fewer tokens",
    )
