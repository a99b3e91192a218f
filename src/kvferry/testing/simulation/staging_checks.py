"""What must never happen to staging memory: I9 for its slots, and I8 for blocks that are gathered from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.session.events import Acquired, AnswerArrived, ClaimKey, ReadKey, SlotKey, Staged, TicketEnded
from kvferry.session.target.session import TargetEvent
from kvferry.testing.simulation.naming import request_of
from kvferry.testing.simulation.violation import Violation
from kvferry.wire.messages import Grant, Packed, Queued

if TYPE_CHECKING:
    from kvferry.testing.simulation.node import Node
    from kvferry.testing.simulation.staging import Copy
    from kvferry.testing.simulation.tickets import Ticket


def slot_lands(ticket: Ticket) -> None:
    """Bytes from the wire only land in the slot that they were sent to, while it is nobody else's and nobody looks."""
    node, key = ticket.node, _at_target(ticket)
    _check_inside(node, key, ticket.target, "late bytes move into a slot used since")
    if key in node.stager.copies:
        raise Violation(f"{node.name}: bytes of {ticket.request_id} move into a slot that is being scattered")


def slot_leaves(ticket: Ticket) -> None:
    """What a source writes comes out of a slot of its own, once all is gathered."""
    remote, key = ticket.remote, ticket.key if isinstance(ticket.key, SlotKey) else None
    _check_inside(remote, key, ticket.source, "a slot used since is written")
    if key in remote.stager.copies:
        raise Violation(f"{remote.name}: a slot of {ticket.request_id} is written while it is being gathered")


def copy_moves(node: Node, copy: Copy) -> None:
    """A gather only looks at blocks that are still lent, a scatter only touches those that its request still has; both
    in a slot that is held for them, here or at the target."""
    what, work = "gather" if copy.is_gather else "scatter", copy.key.work
    if copy.far is None:
        _check_inside(node, copy.key, copy.in_slot, f"a {what} goes on in a slot used since")
    elif copy.far.alive:
        _check_far(node, copy, copy.far)
    if isinstance(work, ClaimKey):
        is_kept = work.lease_id in {lent.wanted.lease_id for lent in node.lent.values()}
    else:
        fetching = node.fetching.get(request_of(work.claim_id))
        is_kept = fetching is not None and fetching.status != "fetched"
    if not is_kept:
        raise Violation(f"{node.name}: a {what} of {work} goes on in blocks used since")


def _check_far(node: Node, copy: Copy, far: Node) -> None:
    """As with bytes from a wire: the slot is still that of this claim, and nobody scatters it yet."""
    key = _as_of_target(copy.key, node)
    _check_inside(far, key, copy.in_slot, "a gather moves into a slot used since")
    if key in far.stager.copies:
        raise Violation(f"{far.name}: a slot of {key.work} is being scattered while it is gathered into")


def slot_is_released(node: Node, key: SlotKey, tickets: list[Ticket], gathers: list[tuple[Node, Copy]]) -> None:
    """A slot comes back when nothing touches it any more: no copy, no ticket of ours, nothing of its source."""
    if not node.stager.extent(key):
        return
    if key in node.stager.copies:
        raise Violation(f"{node.name}: a slot of {key.work} is released while it is being copied")
    if key in [_as_of_target(copy.key, source) for source, copy in gathers]:
        raise Violation(f"{node.name}: a slot of {key.work} is released while its source gathers into it")
    touching = [
        ticket
        for ticket in tickets
        if (ticket.owner is node and ticket.key == key) or (ticket.node is node and _at_target(ticket) == key)
    ]
    if touching:
        raise Violation(f"{node.name}: a slot of {key.work} is released while a ticket may touch it")


def gets_on(event: TargetEvent) -> bool:
    """Whether a read through staging memory has got on, or has been told to be patient: its deadline begins anew."""
    if isinstance(event, AnswerArrived):
        is_patience = isinstance(event.message, Grant) and event.message.num_missing_tokens > 0
        return is_patience or isinstance(event.message, Packed | Queued)
    return isinstance(event, Acquired | Staged) or (isinstance(event, TicketEnded) and isinstance(event.key, SlotKey))


def _at_target(ticket: Ticket) -> SlotKey | None:
    """What the target calls the slot that a ticket fills; None when it goes straight to blocks."""
    key, remote = ticket.key, ticket.remote
    if not isinstance(key, SlotKey) or not ticket.is_staged:
        return None
    if isinstance(key.work, ReadKey):
        return key
    return _as_of_target(key, remote)


def _as_of_target(key: SlotKey, source: Node) -> SlotKey:
    """What the target calls a slot of a claim."""
    return SlotKey(ReadKey(key.work.claim_id, source.peer_key), key.stretch, key.number)


def _check_inside(node: Node, key: SlotKey | None, indices: NDArray[np.int64], what: str) -> None:
    extent = range(0) if key is None else node.stager.extent(key)
    if len(indices) and not (extent.start <= indices.min() and indices.max() < extent.stop):
        raise Violation(f"{node.name}: {what}: {key}")
