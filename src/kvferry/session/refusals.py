"""How a source says no. What goes wrong is a `FerryError` until it reaches a peer, as a `Refusal`."""

from __future__ import annotations

from kvferry.errors import FerryError, TransferError
from kvferry.session.commands import Command, Count, Reply
from kvferry.wire.messages import Reason, Refusal


def refuse(peer: str, error: FerryError, claim_id: str = "") -> list[Command]:
    """Tell a peer why something cannot be, and count it."""
    refusal = refusal_of(as_transfer_error(error), claim_id)
    return [Reply(peer, refusal), Count("refusals_sent", refusal.reason)]


def refusal_of(error: TransferError, claim_id: str = "") -> Refusal:
    """What a peer is told. An error's texts have been cut, so they fit into a message."""
    return Refusal(Reason(error.reason), error.what, error.found, error.expected, claim_id)


def as_transfer_error(error: FerryError) -> TransferError:
    """An error of planning means that a request asks for what is not there."""
    if isinstance(error, TransferError):
        return error
    return TransferError(Reason.OUT_OF_RANGE, error.what, found=error.found, expected=error.expected)


def unknown_lease(lease_id: str) -> TransferError:
    """There is no such lease, or it is another request's."""
    return TransferError(Reason.UNKNOWN_LEASE, "unknown lease", found=lease_id, expected="a live lease")
