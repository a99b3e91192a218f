"""What must never happen to staging memory: I9 for its slots, and I8 for blocks that are gathered from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.session.keys import ClaimKey, ReadKey, SlotKey
from simulator.state.naming import request_of
from simulator.state.rank import Copy, Rank
from simulator.state.ticket import Ticket
from simulator.violation import Violation


def slot_lands(ticket: Ticket) -> None:
    """Bytes from the wire only land in the slot that they were sent to, while it is nobody else's and nobody looks."""
    rank, key = ticket.target_rank, _at_target(ticket)
    _check_inside(rank, key, ticket.target, "late bytes move into a slot used since")
    if key in rank.copies:
        raise Violation(f"{rank.name}: bytes of {ticket.request_id} move into a slot that is being scattered")


def slot_leaves(ticket: Ticket) -> None:
    """What a source writes comes out of a slot of its own, once all is gathered."""
    rank, key = ticket.source_rank, ticket.key if isinstance(ticket.key, SlotKey) else None
    _check_inside(rank, key, ticket.source, "a slot used since is written")
    if key in rank.copies:
        raise Violation(f"{rank.name}: a slot of {ticket.request_id} is written while it is being gathered")


def copy_moves(rank: Rank, copy: Copy) -> None:
    """A gather only looks at blocks that are still leased, a scatter only touches those that its request still has;
    both in a slot that is held for them, here or at the target."""
    what, work = "gather" if copy.is_gather else "scatter", copy.key.work
    if copy.far is None:
        _check_inside(rank, copy.key, copy.in_slot, f"a {what} goes on in a slot used since")
    elif copy.far.alive:
        _check_far(rank, copy, copy.far)
    if isinstance(work, ClaimKey):
        is_kept = rank.keeps(work.lease_id)
    else:
        fetching = rank.fetching.get(request_of(work.claim_id))
        is_kept = fetching is not None and fetching.status != "fetched"
    if not is_kept:
        raise Violation(f"{rank.name}: a {what} of {work} goes on in blocks used since")


def _check_far(rank: Rank, copy: Copy, far: Rank) -> None:
    """As with bytes from a wire: the slot is still that of this claim, and nobody scatters it yet."""
    key = _as_of_target(copy.key, rank)
    _check_inside(far, key, copy.in_slot, "a gather moves into a slot used since")
    if key in far.copies:
        raise Violation(f"{far.name}: a slot of {key.work} is being scattered while it is gathered into")


def slot_is_released(rank: Rank, key: SlotKey, tickets: list[Ticket], gathers: list[tuple[Rank, Copy]]) -> None:
    """A slot comes back when nothing touches it any more: no copy, no ticket of ours, nothing of its source."""
    if not rank.slot(key):
        return
    if key in rank.copies:
        raise Violation(f"{rank.name}: a slot of {key.work} is released while it is being copied")
    if key in [_as_of_target(copy.key, source) for source, copy in gathers]:
        raise Violation(f"{rank.name}: a slot of {key.work} is released while its source gathers into it")
    touching = [
        ticket
        for ticket in tickets
        if (ticket.owner is rank and ticket.key == key) or (ticket.target_rank is rank and _at_target(ticket) == key)
    ]
    if touching:
        raise Violation(f"{rank.name}: a slot of {key.work} is released while a ticket may touch it")


def _at_target(ticket: Ticket) -> SlotKey | None:
    """What the target calls the slot that a ticket fills; None when it goes straight to blocks."""
    key = ticket.key
    if not isinstance(key, SlotKey) or not ticket.is_staged:
        return None
    if isinstance(key.work, ReadKey):
        return key
    return _as_of_target(key, ticket.source_rank)


def _as_of_target(key: SlotKey, source: Rank) -> SlotKey:
    """What the target calls a slot of a claim."""
    return SlotKey(ReadKey(key.work.claim_id, source.peer_key), key.stretch, key.number)


def _check_inside(rank: Rank, key: SlotKey | None, indices: NDArray[np.int64], what: str) -> None:
    extent = range(0) if key is None else rank.slot(key)
    if len(indices) and not (extent.start <= indices.min() and indices.max() < extent.stop):
        raise Violation(f"{rank.name}: {what}: {key}")
