"""Rooms in use. A room is the name of one lease: with two of one name, an end of the first would be taken for that of
the second, whose blocks are still being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# The workers hear of a lease that is taken back one step later.
MAX_WITHDRAWN = 1024


class Rooms:
    """The names of rooms in use, by the id of the request that is, or was, in each of them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._withdrawn: deque[str] = deque(maxlen=MAX_WITHDRAWN)

    def enter(self, request_id: str, name: str) -> bool:
        """Put a request into a room if nobody else is in it. Return whether that was so."""
        if name in self._withdrawn or name in self._names.values():
            return False
        self._names[request_id] = name
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._names

    def withdrawn(self, request_id: str) -> None:
        """Note that a lease was taken back, and that nothing more will be heard of its end."""
        if request_id in self._names:
            self._withdrawn.append(self._names.pop(request_id))

    def left(self, request_ids: Iterable[str]) -> None:
        """Note that all ranks say that the leases of these requests are over. Unknown ones are fine."""
        for request_id in request_ids:
            self._names.pop(request_id, None)
