"""Deadlines of an agent that shares its interpreter and its cores with a rank that computes, and how soon it gets its
turn there: engines' connectors set Python's switch interval to `SWITCH_S` seconds."""

from __future__ import annotations

from kvferry import Timing

# A peer may be slow to meet and slow to answer without being lost, and taking it for lost would fail its requests. One
# whose process has ended is noticed after two heartbeats, and one whose host is silent after three attempts to connect.
HANDSHAKE_S = 45.0
MISSED_HEARTBEATS = 30
# With Python's default of 5 ms, every message between two agents waits that long for an engine that computes.
SWITCH_S = 0.0001


def timing_of(lease_s: float, early_claim_s: float = Timing().early_claim_s) -> Timing:
    """The timing for leases of `lease_s` seconds. A claim waits `early_claim_s` for its source to know the lease."""
    return Timing(
        lease_s=lease_s, handshake_s=HANDSHAKE_S, missed_heartbeats=MISSED_HEARTBEATS, early_claim_s=early_claim_s
    )
