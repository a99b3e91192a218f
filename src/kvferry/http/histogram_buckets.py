"""The buckets of histograms of transfers: the same on every engine and on the router, so that they can be added up."""

from __future__ import annotations

from typing import Final

# A claim between two processes takes tenths of a millisecond; a long prompt over a slow network a minute.
PHASE_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
# From 4 KiB to 64 GiB, and from one row to millions.
BYTES_BUCKETS: Final = tuple(float(1 << exponent) for exponent in range(12, 37, 2))
ROWS_BUCKETS: Final = tuple(float(4**exponent) for exponent in range(13))
