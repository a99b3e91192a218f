"""Messages that overtake others: claims and aborts of leases that this rank does not know yet, because a reference was
faster than the engine, and claims that arrive after their own abort."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from kvferry.wire.messages import Abort, Claim, Party

# Claims are made by whoever can connect: only so many may wait for a lease.
MAX_EARLY = 1024
# One peer cannot take the room of all others.
MAX_EARLY_OF_ONE = 128
# Aborts are sent by whoever can connect.
MAX_ABORTED = 1 << 14
# One aborted claim may be said to be of any number of leases.
MAX_EARLY_AND_ABORTED = MAX_EARLY + MAX_ABORTED


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """The latest message of one party about one lease; `peer` names whom to answer."""

    peer: str
    message: Claim | Abort
    deadline: float


class EarlyMessages:
    """At most one message per lease and party. Of claims, which can be long, there are `MAX_EARLY` in all at most, and
    `MAX_EARLY_OF_ONE` of one peer; of all messages `MAX_EARLY_AND_ABORTED`.

    All have the same patience: deadlines ascend in the order in which messages are added.
    """

    def __init__(self) -> None:
        # A message that takes the place of an earlier one has its time as well, so the first always ends first.
        self._waiting: dict[tuple[str, Party], EarlyMessage] = {}
        # Who waits for each lease, the first one first.
        self._parties: dict[str, dict[Party, None]] = {}
        self._claims = _ClaimCounts()

    def add(self, lease_id: str, early: EarlyMessage) -> bool:
        """Keep a message in place of an earlier one, whose deadline stays. False when there is no room for it."""
        key = lease_id, early.message.party
        known = self._waiting.get(key)
        replaces_claim = known is not None and isinstance(known.message, Claim)
        if isinstance(early.message, Claim) and not (replaces_claim or self._claims.has_room(early.peer)):
            return False
        if known is None and len(self._waiting) >= MAX_EARLY_AND_ABORTED:
            return False
        if known is not None:
            self._claims.remove(known)
            early = EarlyMessage(early.peer, early.message, known.deadline)
        self._claims.add(early)
        self._waiting[key] = early
        self._parties.setdefault(lease_id, {})[early.message.party] = None
        return True

    def knows(self, lease_id: str, party: Party) -> bool:
        """Whether a message of this party waits for this lease."""
        return (lease_id, party) in self._waiting

    def next_deadline(self) -> float:
        """When the next message has waited long enough; infinity when there is none."""
        return next(iter(self._waiting.values())).deadline if self._waiting else inf

    def opened(self, lease_id: str) -> list[EarlyMessage]:
        """Take out what waited for a lease."""
        return [self._take(lease_id, party) for party in list(self._parties.get(lease_id, ()))]

    def expired(self, now: float) -> list[EarlyMessage]:
        """Take out what has waited long enough."""
        found = []
        while self.next_deadline() <= now:
            found.append(self._take(*next(iter(self._waiting))))
        return found

    def _take(self, lease_id: str, party: Party) -> EarlyMessage:
        early = self._waiting.pop((lease_id, party))
        self._claims.remove(early)
        del self._parties[lease_id][party]
        if not self._parties[lease_id]:
            del self._parties[lease_id]
        return early


class _ClaimCounts:
    """How many of the messages are claims: in all, and of each peer that has any."""

    def __init__(self) -> None:
        self._total = 0
        self._of_peer: Counter[str] = Counter()

    def has_room(self, peer: str) -> bool:
        return self._total < MAX_EARLY and self._of_peer[peer] < MAX_EARLY_OF_ONE

    def add(self, early: EarlyMessage) -> None:
        if isinstance(early.message, Claim):
            self._total += 1
            self._of_peer[early.peer] += 1

    def remove(self, early: EarlyMessage) -> None:
        if isinstance(early.message, Claim):
            self._total -= 1
            self._of_peer[early.peer] -= 1
            if not self._of_peer[early.peer]:
                del self._of_peer[early.peer]


class AbortedClaims:
    """Claims that their targets have aborted, or are going to. Each is remembered until it cannot arrive any more: it
    must not be granted, as the target was told that no ticket of it is open, and uses its blocks again."""

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
