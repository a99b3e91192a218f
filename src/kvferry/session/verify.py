"""What a fetch fails with when its bytes cannot be verified, or are not the source's own."""

from __future__ import annotations

from kvferry.errors import MAX_LISTED, TransferError
from kvferry.session.events import PeerKey
from kvferry.session.fetch import Read
from kvferry.wire.messages import Reason

__all__ = ["cannot_digest", "no_digest", "other_bytes"]


def cannot_digest(kinds: str) -> TransferError:
    """Before anything is claimed: the policy asks for more than can be done."""
    return TransferError(
        Reason.DIGEST,
        "a full digest is wanted of memory that the CPU cannot read",
        found=f"memory of kind {kinds}",
        hint="choose the digest policy sampled, which does without where it must, or off",
    )


def no_digest(why: str) -> TransferError:
    """What has landed cannot be looked at."""
    return TransferError(Reason.DIGEST, "no digest can be made", found=why)


def other_bytes(key: PeerKey, read: Read) -> tuple[TransferError, ...]:
    """Both sides have spoken: an error that names the states of which they differ; none when they agree."""
    wrong, num_states = read.differing(), len(read.subject.names)
    if not wrong:
        return ()
    more = [f"and {len(wrong) - MAX_LISTED} more"] if len(wrong) > MAX_LISTED else []
    error = TransferError(
        Reason.DIGEST,
        f"other bytes have landed than {key} has",
        found=f"{len(wrong)} of {num_states} states differ: {', '.join([*wrong[:MAX_LISTED], *more])}",
        hint="wrong blocks, or a transport that spoils bytes; another --transport tells which",
    )
    return (error,)
