"""When vLLM has begun to compute what early legs were promised: told by its statistics, waited for by their answers.

Both are in vLLM's API server, which makes each of them by itself: they meet in `BEGINNINGS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beginnings:
    """By the promise's name. Only what is waited for is kept. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Callable[[], object]] = {}

    def __len__(self) -> int:
        """Names that are waited for."""
        return len(self._waiting)

    def expect(self, name: str, tell: Callable[[], object]) -> None:
        """Call `tell`, from whatever thread, when it has begun; `forget` follows."""
        with self._lock:
            self._waiting[name] = tell

    def note(self, name: str) -> None:
        """It has begun; what nobody waits for is dropped."""
        with self._lock:
            tell = self._waiting.pop(name, None)
        if tell is not None:
            tell()

    def forget(self, name: str) -> None:
        """Nobody waits any more. Unknown ones are fine."""
        with self._lock:
            self._waiting.pop(name, None)


BEGINNINGS = Beginnings()
