"""Who is told what comes over the networks."""

from __future__ import annotations

from typing import Protocol

from kvferry.session.events import PeerConnected, PeerGone, PeerUnreachable, TicketEnded
from kvferry.session.keys import PeerKey
from simulator.state.rank import Rank


class Receiver(Protocol):
    """A rank that is connected to both networks."""

    @property
    def rank(self) -> Rank:
        """What it has."""
        ...

    def frame_arrived(self, name: str, frame: bytes) -> None:
        """From a target, which is answered by this name."""
        ...

    def answer_arrived(self, peer: PeerKey, frame: bytes) -> None:
        """From a source that it addresses."""
        ...

    def network_event(self, event: PeerConnected | PeerUnreachable | PeerGone | TicketEnded) -> None:
        """What the transport, or a peer's host, says."""
        ...
