"""What gathers and scatters: a dozen lines of contract.

A mover copies rows between memories of one process, such as the blocks of an engine and a slot of staging memory, while
its owner does something else. It belongs to one thread, the agent's; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from kvferry.plan.programs.tiles import Tile
from kvferry.transport.registered_memory import View

CLOSED = "the mover was closed"


class Moved(NamedTuple):
    """The end of what was started under a key: no byte of it is read or written any more. `error` is empty when all is
    copied."""

    key: Hashable
    error: str


class Mover(Protocol):
    """Copies rows inside one process; addresses are absolute, those of a device or of the host."""

    def start(self, key: Hashable, tiles: Sequence[Tile], far: View | None = None) -> None:
        """Begin to copy; what goes wrong comes out of `poll`, also rows that leave the memories of the mover. One that
        `reaches_far` can be lent memory of another process for these rows, mapped here.

        Targets must not overlap one another or a source, nor anything else that is under way. Raises IllegalEventError
        when the key is in use: from its start until `poll` has reported its end.
        """
        ...

    def poll(self) -> list[Moved]:
        """What has ended since the last call, each exactly once, in any order. Never raises."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an end is still to be reported."""
        ...

    @property
    def reaches_far(self) -> bool:
        """Whether rows may also touch memory that it was not made for."""
        ...

    @property
    def rings(self) -> bool:
        """Whether it says by itself that `poll` has something to report; else it has to be asked again and again."""
        ...

    def close(self) -> None:
        """Stop as soon as a copy allows it, at most within seconds; what was cut off ends with an error in the next
        `poll`. Safe to call twice."""
        ...
