"""What an engine is given to do, whom it tells of that, and what it says to who asks it: plain records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """How an engine reacts: READY and DRAINING serve, STOPPED refuses connections, SILENT says nothing at all."""

    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Watcher:
    """The functions that are told of work: its first token, its end, its loss, and the number of tokens meanwhile."""

    first: Callable[[], None]
    ended: Callable[[], None]
    lost: Callable[[], None]
    progress: Callable[[int], None]


@dataclass(slots=True, eq=False)
class Work:
    """`left` tokens of a prompt are to be computed, then `num_tokens` of an answer written, of which the first one
    comes with the end of the prompt. `context_tokens` are those that its steps read, on average.

    `num_slow` gaps between its tokens were longer than the engine's `slow_s`. Where the engine has computed the prompt,
    the answer had its first token at `first_s`, and waited for `waited_s` for a place among those that steps write.
    """

    left: int
    num_tokens: int
    context_tokens: int
    watcher: Watcher
    num_written: int = 0
    num_slow: int = 0
    first_s: float = 0.0
    waited_s: float = 0.0
