"""How a source says no: the refusal itself, and its count."""

from __future__ import annotations

from kvferry.errors import FerryError, TransferError
from kvferry.session.commands import Command, Count, Reply
from kvferry.wire.messages import Claim, Landed, Pack, Reason, Refusal


def refuse(peer: str, refusal: Refusal) -> list[Command]:
    """Tell a peer, and count it."""
    return [Reply(peer, refusal), Count("refusals_sent", refusal.reason)]


def because_of(error: TransferError, claim_id: str) -> Refusal:
    """The refusal of what an error stands in the way of."""
    return Refusal(Reason(error.reason), error.what, error.found, error.expected, claim_id)


def as_transfer_error(error: FerryError) -> TransferError:
    """Of what has been asked for, and cannot be."""
    if isinstance(error, TransferError):
        return error
    return TransferError(Reason.OUT_OF_RANGE, error.what, found=error.found, expected=error.expected)


def unknown_lease(about: Claim | Landed | Pack) -> Refusal:
    """The refusal of what a peer says about a lease that there is not, or that is another request's."""
    lease_id = about.reference.lease_id if isinstance(about, Claim) else about.lease_id
    return Refusal(Reason.UNKNOWN_LEASE, "unknown lease", lease_id, "a live lease", about.claim_id)
