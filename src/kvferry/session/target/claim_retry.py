"""What a target says to a source about one fetch, and when it is time to say it again."""

from __future__ import annotations

from msgspec.structs import replace

from kvferry.errors import TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.events import FetchRequest, Timing
from kvferry.session.target.fetch import Fetch, Read, ReadState
from kvferry.wire.messages import Claim, Party, Reason

WAITING = (ReadState.CLAIMING, ReadState.EXPOSED, ReadState.MOVING, ReadState.LANDED, ReadState.DIGESTED)
"""States in which a read needs its source to be alive."""
ASKING = (ReadState.LANDED, ReadState.DIGESTED)
"""States in which it wants to hear whether its bytes are valid."""


def claim_of(ours: Party, wanted: FetchRequest, readers: tuple[int, ...], read: Read, slot_bytes: int) -> Claim:
    """The claim of a read. A source that writes has to know where; one that packs, how it is cut."""
    way = read.way
    names = ours, wanted.claim_id, wanted.reference
    claim = Claim(*names, wanted.num_tokens, readers, subject=read.subject, prompt=wanted.prompt)
    if way.direction is Direction.WRITE or way.read_from:
        where = {"block_tables": wanted.block_tables, "ranges": wanted.ranges}
        claim = replace(claim, direction=way.direction, read_from=way.read_from, **where)
    return replace(claim, strategy=way.strategy, slot_bytes=slot_bytes) if way.strategy is Strategy.PACK else claim


def overdue(fetch: Fetch, timing: Timing, now: float) -> tuple[TransferError, ...]:
    """Why a fetch has taken too long; empty while it has not. That one of its reads gets on is no reason to wait for
    another."""
    if fetch.failed:
        return ()
    limit_s = timing.handshake_s + timing.transfer_s
    open_reads = [read for read in fetch.reads.values() if read.state is not ReadState.VALID]
    moved_at = min((read.moved_at for read in open_reads), default=fetch.began)
    if now - max(fetch.began, moved_at) > limit_s:
        return (TransferError(Reason.DEADLINE, f"the fetch took longer than {limit_s:g} s"),)
    moving = [max(read.granted_at, read.moved_at) for read in open_reads if read.state is ReadState.MOVING]
    if moving and now - min(moving) > timing.transfer_s:
        return (TransferError(Reason.DEADLINE, f"the read took longer than {timing.transfer_s:g} s"),)
    return ()
