"""What all parts of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.events import Timing
from kvferry.testing.simulation.checks import Checks
from kvferry.testing.simulation.clock import World
from kvferry.testing.simulation.faults import Faults
from kvferry.testing.simulation.plants import Plant
from kvferry.testing.simulation.shapes import Shape
from kvferry.testing.simulation.staging_setup import StagingSetup
from kvferry.testing.simulation.story import Story

TIMING = Timing(
    lease_s=6.0,
    heartbeat_s=1.0,
    missed_heartbeats=3,
    resend_s=0.5,
    handshake_s=3.0,
    transfer_s=15.0,
    tombstone_s=8.0,
    early_claim_s=3.0,
    hold_s=30.0,
    idle_peer_s=20.0,
    fence_s=5.0,
)


@dataclass(frozen=True, slots=True)
class Site:
    """The clock, what may go wrong, what the engines look like, how they verify and stage, who watches and who writes
    it down.

    `has_names` says that engines name prompts. `cuts` has the pairs of engines that cannot reach one another at the
    moment.
    """

    world: World
    faults: Faults
    shape: Shape
    checks: Checks
    story: Story
    plant: Plant
    digest: DigestPolicy
    staging: StagingSetup
    has_names: bool = True
    timing: Timing = TIMING
    cuts: set[frozenset[str]] = field(default_factory=set)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition lies between two engines."""
        return frozenset((one, other)) in self.cuts
