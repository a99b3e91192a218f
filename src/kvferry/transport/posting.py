"""What every `post` begins with: the peer must be connected, and every row must lie in registered memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column, Copies, split
from kvferry.transport.base import Direction
from kvferry.transport.registered_memory import LocatedRows, Regions

Peer = TypeVar("Peer")


def connected(peers: Mapping[str, Peer], name: str) -> Peer:
    """Raises TransportError when no peer of this name is connected."""
    if name not in peers:
        raise TransportError(f"peer {name!r} is not connected", hint="has its process exited?")
    return peers[name]


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """Rows to copy between `local` regions of this process and `remote` regions of a peer."""

    peer: str
    local: Regions
    remote: Regions
    copies: Copies
    direction: Direction

    def columns(self, max_row_bytes: int) -> tuple[Column, Column, Column]:
        """Local addresses, remote addresses and lengths, of rows cut to `max_row_bytes`.

        Raises TransportError when a row leaves the regions of either side.
        """
        local, remote = self._sides(self.copies)
        # Checked before they are cut: a row of nonsense length would become very many.
        self.local.check(local, self.copies.length, self._local_owner)
        self.remote.check(remote, self.copies.length, self._remote_owner)
        rows = split(self.copies, max_row_bytes)
        return *self._sides(rows), rows.length

    def located(self) -> tuple[LocatedRows, LocatedRows]:
        """The rows of the local and of the remote side, both mapped here. Raises TransportError like `columns`."""
        local, remote = self._sides(self.copies)
        return (
            self.local.located(local, self.copies.length, self._local_owner),
            self.remote.located(remote, self.copies.length, self._remote_owner),
        )

    def _sides(self, rows: Copies) -> tuple[Column, Column]:
        return (rows.target, rows.source) if self.direction is Direction.READ else (rows.source, rows.target)

    @property
    def _local_owner(self) -> str:
        return f"this process ({self.direction})"

    @property
    def _remote_owner(self) -> str:
        return f"peer {self.peer!r} ({self.direction})"
