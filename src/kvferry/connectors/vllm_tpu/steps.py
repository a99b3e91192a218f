"""The turns of a runner: it has its arrays from before a step is begun until there are those that follow them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from kvferry.jax_caches import JaxCaches, Turn


class Steps:
    """Called on the engine's thread only. A copy of a transfer may follow a step as soon as that is begun."""

    def __init__(self, runner: Any, caches: JaxCaches) -> None:
        self._runner, self._caches = runner, caches
        self._known = tuple(runner.kv_caches)
        self._has_begun = False
        self._under_way: list[tuple[ExitStack, Turn]] = []

    def adopt(self) -> bool:
        """Take in arrays that the runner has got between two steps, as it does before its first one, when it compiles,
        and for new weights. Whether steps before have written to others."""
        ours = tuple(self._runner.kv_caches)
        if not ours or all(one is known for one, known in zip(ours, self._known, strict=False)):
            return False
        with self._caches.turn() as turn:
            turn.arrays = ours
        self._known = ours
        return self._has_begun

    def begin(self) -> None:
        """Give the runner the newest arrays; it may have deleted its own, and has none then."""
        if not self._runner.kv_caches:
            return
        stack = ExitStack()
        turn = stack.enter_context(self._caches.turn())
        self._under_way.append((stack, turn))
        self._runner.kv_caches = list(turn.arrays)
        self._has_begun = True

    def end(self) -> None:
        """Leave to copies what the step has made of the arrays."""
        while self._under_way:
            stack, turn = self._under_way.pop()
            self._known = tuple(self._runner.kv_caches)
            with stack:
                # A step that computes nothing leaves what it was given.
                if any(one is not given for one, given in zip(self._known, turn.arrays, strict=True)):
                    turn.arrays = self._known
