"""Who a target rank is, and what it tells source ranks about itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.plan.description.layout import Layout
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.target.read_strategy import NO_STAGING, StagingPolicy
from kvferry.wire.messages import Party, Probe, TransportOffer

NO_PROBE = Probe(0, 0, 0)


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Who this rank is, and the layouts of all ranks of its engine: the route depends on all of them.

    `digest` says how much of what has landed is compared with the source's own, `direction` who moves the bytes, and
    `staging` whether they may go through staging memory. For sources that write are `transports`, `probe` and
    `staging_descriptor`, which is what a process of this host needs to attach our staging memory, empty where none can.
    With `may_turn` a source to which reading turns out to be far slower than writing writes instead, and one that can
    write while we read writes a share.
    """

    party: Party
    product_version: str
    layouts: tuple[Layout, ...]
    digest: DigestPolicy = DigestPolicy.OFF
    direction: Direction = Direction.READ
    transports: tuple[TransportOffer, ...] = ()
    probe: Probe = NO_PROBE
    staging_descriptor: bytes = b""
    staging: StagingPolicy = NO_STAGING
    may_turn: bool = False
