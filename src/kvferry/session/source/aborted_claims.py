"""Claims that their targets have aborted. A claim that arrives after its own abort must not be granted: the target was
told that no ticket of it is open, and uses its blocks again."""

from __future__ import annotations

from kvferry.wire.messages import Party

# Aborts are sent by whoever can connect.
MAX_ABORTED = 1 << 14


class AbortedClaims:
    """Each is remembered until its claim cannot arrive any more."""

    def __init__(self) -> None:
        self._until: dict[tuple[Party, str], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, claim: tuple[Party, str]) -> bool:
        return claim in self._until

    def add(self, party: Party, claim_id: str, until: float) -> bool:
        """Remember a claim of a target. False when there is no room for it: then its abort must not be acknowledged."""
        claim = party, claim_id
        # The newest is last.
        self._until.pop(claim, None)
        if len(self._until) >= MAX_ABORTED:
            return False
        self._until[claim] = until
        return True

    def expire(self, now: float) -> None:
        """Forget those that are old enough."""
        while self.next_deadline() <= now:
            del self._until[next(iter(self._until))]

    def next_deadline(self) -> float:
        """When the next one is old enough; infinity when there is none."""
        return next(iter(self._until.values()), float("inf"))
