"""What names a peer, and what is done for it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.wire.messages import Party, Reference


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One incarnation of one source rank: where it listens and who we expect there."""

    address: str
    engine_id: str
    epoch: str

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.address}#{self.epoch}"


def peers_of(reference: Reference, addresses: tuple[str, ...]) -> tuple[PeerKey, ...]:
    """The source ranks that a reference means, in their order."""
    return tuple(PeerKey(address, reference.engine_id, reference.epoch) for address in addresses)


Remote = PeerKey | Party
"""Whom a transport is connected to: a source rank that we read from, or a target rank that we write to."""


def incarnation_of(remote: Remote) -> tuple[str, str]:
    """The engine that a rank is of, and which of its starts: all of that may fall silent at once."""
    return remote.engine_id, remote.epoch


@dataclass(frozen=True, slots=True)
class ReadKey:
    """Names what a target does for one part of a fetch: its claim and the peer that has the bytes."""

    claim_id: str
    peer: PeerKey

    @property
    def remote(self) -> Remote:
        """Who is on the other side."""
        return self.peer


@dataclass(frozen=True, slots=True)
class ClaimKey:
    """Names what a source does for one claim: the lease and who has claimed it."""

    lease_id: str
    party: Party
    claim_id: str

    @property
    def remote(self) -> Remote:
        """Who is on the other side."""
        return self.party


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Names a slot of staging memory for a read or a claim: by the stretch of the request, and which of its slots."""

    work: ReadKey | ClaimKey
    stretch: int
    number: int

    @property
    def remote(self) -> Remote:
        """Who is on the other side."""
        return self.work.remote


WorkKey = ReadKey | ClaimKey | SlotKey
"""Names a ticket or a digest: of a read at a target, of a claim at a source, or of a slot of either."""
