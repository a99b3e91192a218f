"""Attached staging memory of targets on this host: gathers for them go straight into their slots."""

from __future__ import annotations

import logging

from kvferry.errors import TransportError
from kvferry.session.keys import Remote
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import View
from kvferry.transport.shm.transport import SharedMemoryTransport

logger = logging.getLogger(__name__)


class PeerSlots:
    """Only one thread uses it. `arena` is the staging memory of this rank, which sources attach by `descriptor`: empty
    where it cannot be attached."""

    def __init__(self, arena: Memory) -> None:
        self.descriptor = b""
        self._transport: SharedMemoryTransport | None = None
        self._attached: set[Remote] = set()
        try:
            self._transport = SharedMemoryTransport()
            self._transport.register(arena)
            self.descriptor = self._transport.descriptor()
        except TransportError as error:
            logger.debug("other engines cannot attach this engine's staging memory: %s", error)

    def attach(self, peer: Remote, descriptor: bytes) -> None:
        """Attach the slots of a target, if that is possible; otherwise they are written over the transport, as
        everywhere."""
        if self._transport is None or not descriptor:
            return
        # What was attached before is let go.
        self._attached.discard(peer)
        try:
            self._transport.connect(str(peer), descriptor)
        except TransportError as error:
            logger.debug("%s: its staging memory is not attached: %s", peer, error)
        else:
            self._attached.add(peer)

    def reaches(self, peer: Remote) -> bool:
        """Whether the slots of a target have been attached."""
        return peer in self._attached

    def detach(self, peer: Remote) -> None:
        """Slots that are in use stay mapped until their views are gone."""
        self._attached.discard(peer)
        if self._transport is not None:
            self._transport.disconnect(str(peer))

    def poll(self) -> None:
        """Unmap the memory of targets that have ended."""
        if self._transport is not None:
            self._transport.poll()

    def find(self, peer: Remote, address: int, num_bytes: int) -> View | None:
        """A slot of a target, by its remote address; None where it is not attached."""
        return self._transport.view(str(peer), address, num_bytes) if self._transport is not None else None

    def close(self) -> None:
        """Detach all targets."""
        if self._transport is not None:
            self._transport.close()
