"""The contract of what gathers and scatters.

A mover copies rows between memories of one process, such as an engine's blocks and a slot of staging memory, in the
background. Only one thread uses it, the agent's; no method but `close` blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from kvferry.plan.programs.tiles import Tile
from kvferry.transport.registered_memory import View

CLOSED = "the mover was closed"


class Moved(NamedTuple):
    """The end of the copy of a key: none of its bytes is read or written any more. `error` is empty when all is
    well."""

    key: Hashable
    error: str


class Mover(Protocol):
    """Copies rows inside one process; addresses are absolute, those of a device or of the host.

    `notifies`: whether it calls the agent when `poll` has something to report; if not, the agent must poll repeatedly.
    `reaches_peer_memory`: whether `start` takes a `peer_view`.
    """

    notifies: bool
    reaches_peer_memory: bool

    def start(self, key: Hashable, tiles: Sequence[Tile], peer_view: View | None = None) -> None:
        """Begin a copy. Errors come out of `poll`, such as rows that leave the memories of the mover. With
        `reaches_peer_memory`, the rows may also lie in `peer_view`: memory of another process that is mapped here.

        Targets must not overlap one another, a source, or other copies in progress. Raises IllegalEventError when the
        key is in use: from its start until `poll` has reported its end.
        """
        ...

    def poll(self) -> list[Moved]:
        """The copies that have ended since the last call, each exactly once, in any order. Never raises."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `poll` has not yet reported the end of every copy."""
        ...

    def close(self) -> None:
        """Stop within seconds. Copies that were cut off end with an error in the next `poll`. Safe to call twice."""
        ...
