"""Names of peers as labels of metrics: a bounded number of them."""

from __future__ import annotations

from typing import Final

# Engines whose names change with every start would otherwise grow the page of metrics for ever.
MAX_PEERS: Final = 128
OTHER_PEERS: Final = "other"


class PeerLabels:
    """The labels of peers on one page of metrics. The peers that came first have their own names."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, peer: str) -> str:
        """The peer's name, or `other` where there are too many already."""
        if peer not in self._known and len(self._known) >= MAX_PEERS:
            return OTHER_PEERS
        self._known.add(peer)
        return peer
