"""Messages that overtake others: claims and aborts of leases that this rank does not know yet, because a reference was
faster than the engine, and claims that arrive after their own abort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvferry.wire.messages import Abort, Claim, Party

# Claims are made by whoever can connect: only so many may wait for a lease.
MAX_EARLY = 1024
# One peer cannot take the room of all others.
MAX_EARLY_OF_ONE = 128
# Aborts are sent by whoever can connect.
MAX_ABORTED = 1 << 14


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """The latest message of one party about one lease; `peer` names whom to answer."""

    peer: str
    message: Claim | Abort
    deadline: float


class EarlyMessages:
    """At most one message per lease and party. Of claims, which can be long, there are `MAX_EARLY` in all at most, and
    `MAX_EARLY_OF_ONE` of one peer; of aborts no more than are remembered (`AbortedClaims`)."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, Party], EarlyMessage] = {}

    def add(self, lease_id: str, early: EarlyMessage) -> bool:
        """Keep a message in place of an earlier one, whose deadline stays. False when there is no room for it."""
        key = lease_id, early.message.party
        if known := self._waiting.get(key):
            early = EarlyMessage(early.peer, early.message, known.deadline)
        elif isinstance(early.message, Claim) and not self._has_room_for_claims_of(early.peer):
            return False
        self._waiting[key] = early
        return True

    def _has_room_for_claims_of(self, peer: str) -> bool:
        peers = [early.peer for early in self._waiting.values() if isinstance(early.message, Claim)]
        return len(peers) < MAX_EARLY and peers.count(peer) < MAX_EARLY_OF_ONE

    def knows(self, lease_id: str, party: Party) -> bool:
        """Whether a message of this party waits for this lease."""
        return (lease_id, party) in self._waiting

    def next_deadline(self) -> float:
        """When the next message has waited long enough; infinity when there is none."""
        return min(early.deadline for early in self._waiting.values()) if self._waiting else inf

    def opened(self, lease_id: str) -> list[EarlyMessage]:
        """Take out what waited for a lease."""
        return self._take(lambda key, _: key[0] == lease_id)

    def expired(self, now: float) -> list[EarlyMessage]:
        """Take out what has waited long enough."""
        return self._take(lambda _, early: early.deadline <= now)

    def _take(self, chosen: Callable[[tuple[str, Party], EarlyMessage], bool]) -> list[EarlyMessage]:
        return [self._waiting.pop(key) for key, early in list(self._waiting.items()) if chosen(key, early)]


class AbortedClaims:
    """Claims that their targets have aborted. Each is remembered until it cannot arrive any more: it must not be
    granted, as the target was told that no ticket of it is open, and uses its blocks again."""

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
        return next(iter(self._until.values()), inf)
