"""How long a session waits for what: the defaults.

The connectors of vLLM and SGLang give others (`kvferry.connectors.timing`): 30 heartbeats may be missed, since a worker
that computes answers late, so that a host that says nothing at all is lost after 30 s instead of 3.
"""

from __future__ import annotations

from dataclasses import dataclass

STALLED_LEASES = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """All deadlines, in seconds.

    Two agents have to meet within `handshake_s`, and a read that makes no progress for `transfer_s` fails. A computed
    lease ends `lease_s` after it was last renewed, one that grows `stalled_s` after its engine's last word. A target
    renews every `heartbeat_s` and takes a peer for lost after `missed_heartbeats` without any answer; it repeats an
    unanswered message every `resend_s`. A lease that has ended is remembered for `tombstone_s`, so that a late claim
    is told why. A claim that arrives before the engine has opened its lease waits `early_claim_s` for it. A peer from
    which nothing has been fetched for `idle_peer_s` is forgotten. The lease of a request that waits in a queue is
    renewed for at most `hold_s`; as long may a read hold slots while its source answers `Queued`, or go on of which it
    is only known that bytes of its peer move. Bytes that were in flight when a write of a peer ended badly, or the peer
    died, have landed or are lost after `fence_s`.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3
    resend_s: float = 1.0
    handshake_s: float = 15.0
    transfer_s: float = 60.0
    tombstone_s: float = 60.0
    early_claim_s: float = 10.0
    hold_s: float = 600.0
    idle_peer_s: float = 600.0
    fence_s: float = 10.0

    @property
    def stalled_s(self) -> float:
        """How long a growing lease lasts without a word of its engine, which is then taken to have given it up."""
        return self.lease_s * STALLED_LEASES

    @property
    def silence_s(self) -> float:
        """How long a peer may stay silent while it is being waited for."""
        return self.heartbeat_s * self.missed_heartbeats
