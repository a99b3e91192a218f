"""What moving costs between this rank and one peer, from the self-test of the transport that was chosen."""

from __future__ import annotations

from dataclasses import replace

from kvferry.plan.strategy import TYPICAL_HOST, Costs
from kvferry.transport.measurement import Measurement
from kvferry.transport.steps import ROW_BYTES

__all__ = ["costs_of"]

LEAST_ROW_S = 1e-9


def costs_of(found: Measurement) -> Costs:
    """A long row tells the rate, many short ones what each costs beside that. What a gather and a scatter cost is what
    they typically do on a host."""
    long_s, short_s = (ROW_BYTES / rate / 1e9 for rate in (found.gigabytes_per_s, found.row_gigabytes_per_s))
    return replace(
        TYPICAL_HOST,
        latency_s=found.latency_s,
        row_s=max(short_s - long_s, LEAST_ROW_S),
        wire_bytes_per_s=found.gigabytes_per_s * 1e9,
    )
