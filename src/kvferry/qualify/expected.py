"""What is expected of a device, and below what it counts as slow. Data.

Shares of the copy engine's rate: of one copy of as many bytes that follow one another, between the device and pinned
memory of the host. `gather` and `scatter` are what the authors of SGLang's staging kernels report for a GPU; kvferry's
own measured 95 % and 93 % on an H200, and 94 to 98 % of a copy within the device's memory (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import Final, NamedTuple

TOLERANCE: Final = 0.9
"""The share of what is expected below which a figure counts as slow."""


class Expected(NamedTuple):
    """Shares; 0 where nobody has measured."""

    gather: float
    scatter: float
    on_device: float


GPU: Final = Expected(gather=0.97, scatter=0.93, on_device=0.94)
NOTHING_KNOWN: Final = Expected(0.0, 0.0, 0.0)

GPUS: Final = ("cuda", "rocm", "xpu")
"""The kinds of device that torch and our kernels reach."""
BY_KIND: Final = dict.fromkeys(GPUS, GPU)


def expected_of(kind: str) -> Expected:
    """What is expected of a kind of device, by kvferry's name for it."""
    return BY_KIND.get(kind, NOTHING_KNOWN)
