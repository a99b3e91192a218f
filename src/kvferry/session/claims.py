"""What a target says to a source about one fetch, and when it is time to say it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.errors import TransferError
from kvferry.plan.copies import Direction
from kvferry.session.events import FetchWanted, PeerKey, Send, Timing
from kvferry.session.fetch import Fetch, ReadState
from kvferry.wire.messages import Claim, Party, Reason, Renew

__all__ = ["ASKING", "USING", "WAITING", "claim_of", "overdue", "renewals"]

WAITING = (ReadState.CLAIMING, ReadState.EXPOSED, ReadState.MOVING, ReadState.LANDED, ReadState.DIGESTED)
"""States in which a read needs its source to be alive."""
USING = (ReadState.MOVING, ReadState.LANDED, ReadState.DIGESTED)
"""States in which it needs its lease."""
ASKING = (ReadState.LANDED, ReadState.DIGESTED)
"""States in which it wants to hear whether its bytes are valid."""


def claim_of(ours: Party, wanted: FetchWanted, readers: tuple[int, ...], direction: Direction) -> Claim:
    """The claim of a fetch. A source that writes has to know where."""
    tables, ranges = (wanted.block_tables, wanted.ranges) if direction is Direction.WRITE else ((), ())
    return Claim(ours, wanted.request_id, wanted.reference, wanted.num_tokens, readers, direction, tables, ranges)


def overdue(fetch: Fetch, timing: Timing, now: float) -> tuple[TransferError, ...]:
    """Why a fetch has taken too long; empty while it has not."""
    limit_s = timing.handshake_s + timing.transfer_s
    if fetch.failed:
        return ()
    if now - fetch.began > limit_s:
        return (TransferError(Reason.DEADLINE, f"the fetch took longer than {limit_s:g} s"),)
    if now - fetch.posted_at > timing.transfer_s and any(r.state is ReadState.MOVING for r in fetch.reads.values()):
        return (TransferError(Reason.DEADLINE, f"the read took longer than {timing.transfer_s:g} s"),)
    return ()


def renewals(ours: Party, fetches: Iterable[Fetch], held: Iterable[tuple[PeerKey, str]]) -> Iterator[Send]:
    """Heartbeats for the leases that are being used or held: one message per peer."""
    by_peer: dict[PeerKey, list[str]] = {}
    for fetch in fetches:
        for key, read in fetch.reads.items():
            if read.state in USING:
                by_peer.setdefault(key, []).append(fetch.wanted.reference.lease_id)
    for key, lease_id in held:
        by_peer.setdefault(key, []).append(lease_id)
    for key, lease_ids in by_peer.items():
        yield Send(key, Renew(ours, tuple(lease_ids)))
