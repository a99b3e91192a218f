"""What an agent is told when the device has done what vLLM takes for done: a speculator writes its layers after the
token for which vLLM ends a request, and gives its blocks to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Command = Callable[[], None]
Milestone = Callable[[], Callable[[], bool]]
"""Called, it marks what the engine has begun so far; what it returns says whether that is done, and does not wait."""


def at_once() -> Callable[[], bool]:
    """The milestone of an engine that has done what it has begun."""
    return lambda: True


def end_of_request(milestone: Milestone, *, speculates: bool) -> Milestone:
    """What shows that the device has done with a request that vLLM has ended. Without a speculator the last token
    does, and to wait for what was queued behind it would cost a step."""
    return milestone if speculates else at_once


class DeferredCommands:
    """Each command is carried out when the device has done all that was begun before it was given, one after the other.

    Until then nobody reads or writes the blocks that it names, and vLLM keeps them: it has not heard of the end.
    """

    def __init__(self, milestone: Milestone) -> None:
        self._milestone = milestone
        self._waiting: deque[tuple[Callable[[], bool], Command]] = deque()

    def give(self, command: Command) -> None:
        """Carry it out at once where the device has nothing to do."""
        self._waiting.append((self._milestone(), command))
        self.look()

    def look(self) -> None:
        """The device may have got on."""
        while self._waiting and self._waiting[0][0]():
            self._waiting.popleft()[1]()
