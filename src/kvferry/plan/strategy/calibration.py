"""What moving costs between two ranks: measured, or typical until somebody has measured. `prices` has the formulas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isfinite

from kvferry.errors import ConfigurationError

NUM_STAGES = 3.0
"""Gather, wire and scatter."""
MAY_BE_ZERO = ("staging_s", "sharing_s", "gathers_into_peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What moving costs between one pair of ranks; best measured there, while all stages run.

    latency_s: one transfer of nothing, from the request to the completion.
    row_s: one row on the wire, on top of its bytes.
    wire_bytes_per_s, gather_bytes_per_s, scatter_bytes_per_s: rate of long rows in each stage.
    copy_row_s: one row in a gather or a scatter, on top of its bytes.
    launch_s: starting a gather or a scatter of one slot, and telling the next stage of its end.
    slot_bytes: what is gathered, sent and scattered at a time.
    num_at_once: how many stages' work is done in the time of one. All three, unless they share few cores or the memory.
    fan_in: how many times as much the target receives from all its sources as from this one; n from n that have equal
    shares.
    fan_out: how many target ranks fetch from this source at a time.
    rows_fan_in: how many times as many rows whoever posts those of this source posts: a target that reads, all.
    staging_s: what staging takes on top, once: a source to be asked, and threads to be woken. May be 0.
    sharing_s: what each source takes on top that moves a share itself; 0 where only one side can move anything.
    gathers_into_peer: whether a source reaches the target's staging memory: no wire between gather and scatter.

    Raises ConfigurationError naming every other value that is not a positive, finite number.
    """

    latency_s: float
    row_s: float
    wire_bytes_per_s: float
    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    copy_row_s: float
    launch_s: float
    slot_bytes: int
    num_at_once: float = NUM_STAGES
    fan_in: float = 1.0
    rows_fan_in: float = 1.0
    fan_out: float = 1.0
    staging_s: float = 0.0
    sharing_s: float = 0.0
    gathers_into_peer: bool = False

    def __post_init__(self) -> None:
        wrong = [f"{name} = {value}" for name, value in asdict(self).items() if not _can_be(name, value)]
        if wrong:
            raise ConfigurationError(
                "invalid transfer costs",
                found=", ".join(wrong),
                expected="positive, finite numbers",
                hint="measure again: a rate or duration of zero comes from a failed measurement",
            )


def _can_be(name: str, value: float) -> bool:
    return isfinite(value) and (value > 0 or (name in MAY_BE_ZERO and value == 0))


TYPICAL_HOST = Costs(
    latency_s=15e-6,
    row_s=3e-6,
    wire_bytes_per_s=6.4e9,
    gather_bytes_per_s=5.6e9,
    scatter_bytes_per_s=5.6e9,
    copy_row_s=30e-9,
    launch_s=15e-6,
    slot_bytes=4 << 20,
)
"""CPU memory of two processes on one host, over NIXL 1.5.1 with UCX's cma, on two cores of an AMD EPYC, 64 MiB moved.

row_s: 3.1 to 3.6 µs with rows of 256 bytes to 4 KiB in random order, one system call each. wire: one contiguous
transfer took 10.5 ms. latency and launch: a message there and back takes 12 to 15 µs. copy_row_s: 15 ns in the fastest
kernels, 37 ns in plain ones. gather and scatter: fitted, to reach within 10 % the 21 ms that a whole pipeline took (512
bytes a row, 8 slots) and to meet direct at 64 KiB a row, as measured; alone each reaches 12 GB/s, but stages that share
cores and memory slow each other down. Filling the pipeline with slots of 4 MiB takes 1.4 ms, little beside the rest.
"""


TYPICAL_AGENTS = replace(TYPICAL_HOST, launch_s=150e-6, staging_s=1e-3)
"""The same between two agents, which know nothing better of each other.

launch_s: a slot is planned, asked for, handed out and reported on: what the agents spend on that at each end.
staging_s: a source is asked, slots are planned and handed out, threads have to be woken: what staging a small read
takes on top.
"""


def typical_device(wire_bytes_per_s: float) -> Costs:
    """GPU memory behind a link of a given rate, staged in pinned host memory.

    The rates are those published for kernels that gather into and scatter from pinned memory over PCIe 5 (97 and 93 %
    of a plain copy, in which the cost of their rows is included, hence a nominal `copy_row_s`); ours took 95 and 93 %
    on an H200. `row_s` is the lower end of what posting costs a card; on one host, over cuda_ipc, it is three times
    that. `latency_s` and `launch_s` are a message there and back and an ordinary kernel launch with its event.
    """
    return Costs(
        latency_s=15e-6,
        row_s=2e-6,
        wire_bytes_per_s=wire_bytes_per_s,
        gather_bytes_per_s=52.6e9,
        scatter_bytes_per_s=51.4e9,
        copy_row_s=0.1e-9,
        launch_s=15e-6,
        slot_bytes=16 << 20,
    )
