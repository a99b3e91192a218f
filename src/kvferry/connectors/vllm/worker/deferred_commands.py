"""What an agent is told when the device has done what vLLM takes for done: a speculator writes its layers after the
token for which vLLM ends a request, and gives its blocks to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.connectors.vllm.worker.prefill_progress import Milestone, at_once

Order = Callable[[], None]


def end_of_request(milestone: Milestone, *, speculates: bool) -> Milestone:
    """What shows that the device has done with a request that vLLM has ended. Without a speculator the last token
    does, and to wait for what was queued behind it would cost a step."""
    return milestone if speculates else at_once


class LateOrders:
    """Each order is carried out when the device has done all that was begun before it was given, one after the other.

    Until then nobody reads or writes the blocks that it names, and vLLM keeps them: it has not heard of the end.
    """

    def __init__(self, milestone: Milestone) -> None:
        self._milestone = milestone
        self._begun: deque[tuple[Callable[[], bool], Order]] = deque()

    def give(self, order: Order) -> None:
        """Carry it out at once where the device has nothing to do."""
        self._begun.append((self._milestone(), order))
        self.look()

    def look(self) -> None:
        """The device may have got on."""
        while self._begun and self._begun[0][0]():
            self._begun.popleft()[1]()
