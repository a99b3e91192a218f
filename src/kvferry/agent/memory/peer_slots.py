"""Staging memory of targets on this host, attached: what is gathered for them goes straight into their slots."""

from __future__ import annotations

import logging

from kvferry.errors import TransportError
from kvferry.session.keys import Remote
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import View
from kvferry.transport.shm.transport import SharedMemoryTransport

logger = logging.getLogger(__name__)


class FarSlots:
    """Belongs to one thread. `arena` is our own staging memory, of which sources are told in `descriptor`: empty where
    nobody can attach it."""

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
        """Slots of this target can be reached from now on, if that is possible; else they are written to over the
        transport, as everywhere."""
        if self._transport is None or not descriptor:
            return
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
        """Slots that are in use stay mapped until whoever has their views lets go of them."""
        self._attached.discard(peer)
        if self._transport is not None:
            self._transport.disconnect(str(peer))

    def poll(self) -> None:
        """Let go of the memory of targets that have ended."""
        if self._transport is not None:
            self._transport.poll()

    def find(self, peer: Remote, address: int, num_bytes: int) -> View | None:
        """A slot of a target, by its address there; None where it cannot be reached from here."""
        return self._transport.view(str(peer), address, num_bytes) if self._transport is not None else None

    def close(self) -> None:
        """Nothing of others is attached any more."""
        if self._transport is not None:
            self._transport.close()
