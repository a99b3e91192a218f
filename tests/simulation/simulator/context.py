"""What all parts of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.timing import Timing
from simulator.checks.requests import Checks
from simulator.defects.defect import Defect
from simulator.faults import Faults
from simulator.report.event_log import EventLog
from simulator.scheduler import Scheduler
from simulator.state.shapes import Shape
from simulator.state.staging_setup import StagingSetup
from simulator.state.ticket import Ticket

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
class RunContext:
    """The clock, what may go wrong, what the engines look like, how they verify and stage, who watches and who writes
    it down.

    `has_names` says that engines name prompts, `is_revocable` that targets can keep what a source writes from arriving.
    `cuts` has the pairs of engines that cannot reach one another at the
    moment.
    """

    scheduler: Scheduler
    faults: Faults
    shape: Shape
    log: EventLog
    defect: Defect
    digest: DigestPolicy
    staging: StagingSetup
    has_names: bool = True
    is_revocable: bool = False
    timing: Timing = TIMING
    checks: Checks = field(init=False)
    open_tickets: list[Ticket] = field(default_factory=list)
    cuts: set[frozenset[str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checks", Checks(self.shape, self.open_tickets))

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition lies between two engines."""
        return frozenset((one, other)) in self.cuts
