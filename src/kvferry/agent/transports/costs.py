"""What moving costs between this rank and one peer, from the self-test of the transport that was chosen."""

from __future__ import annotations

import os
from dataclasses import replace

from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.calibration import NUM_STAGES, TYPICAL_AGENTS, Costs, typical_device
from kvferry.transport.machine.facts import Place
from kvferry.transport.memory_kind import HOST
from kvferry.transport.selection.measurement import FAR_SLOWER, Measurement
from kvferry.transport.selection.self_test_steps import ROW_BYTES

LEAST_ROW_S = 1e-9
# On one host a gather is a copy in memory, like a transfer. Measured as a factor, on 2 cores over NIXL's cma.
GATHER_PER_WIRE = 1.2
# A row takes about as long as copying so many bytes: the least, the most. A page of the other process has to be found,
# and NIXL makes a system call for each. From benchmarks/mixed_tp.py, 2 to 4, direct and wire: 3.4 KB in kvferry's cma,
# 13 in NIXL's; in kvferry's tcp 0.1 to 0.8 (benchmarks/transports.py --hosts). A self-test beside busy engines can say
# that a row costs nothing, or many times what it does.
COPIED_PER_ROW = {"cma": (2.5e3, 8e3), "cma/memory": (4e3, 24e3), "tcp": (100.0, 1e3)}
# Two cores that copy get on like one and a half: they share the memory.
STAGES_PER_CORE = 0.75
# A source plans its share and says when it is written, while it keeps a core from the target: below some milliseconds
# nothing is gained. Measured between 256 and 2,048 tokens in benchmarks/mixed_tp.py, on 2 cores.
SHARING_S = 1e-3
# Carriers for which the posting process copies with its own processor: both sides can do so at once.
COPYING = ("cma", "knem", "posix", "shm", "sysv", "xpmem")
# The carrier that copies rows with the loops of gathers and scatters, so that a row costs the same over it as in them.
STRIDED = "shm"
# A self-test moves host memory. A row of device memory takes this long over cuda_ipc, with 1.5 KiB as with 24, and each
# slot of a packed read this long beside its bytes: both fitted on an H200 (benchmarks/device_pair.py).
DEVICE_ROW_S = 5.7e-6
DEVICE_SLOT_S = 1e-3


def costs_of(
    found: Measurement, place: Place, direction: Direction = Direction.READ, buffer_device: str = HOST
) -> Costs:
    """Return the costs of moving in a direction: a long row tells the rate, many short ones the extra cost of each.

    Where processors copy, what a row costs is kept within bounds that follow from the rate of the wire: a moment at
    which all of it, or a part, is slow does not change which strategy is the cheapest. The costs of a gather and a
    scatter are not measured. Between processes of one host, whose wire is a copy too, they follow from that rate as
    well; elsewhere they are the typical costs on a host. Where transports register a device's memory, the rate of the
    wire stays that of host memory, which is the same for all strategies.
    """
    rates = found.likely_rates(direction)
    long_s, short_s = (ROW_BYTES / rate / 1e9 for rate in (rates.gigabytes_per_s, rates.row_gigabytes_per_s))
    costs = replace(
        TYPICAL_AGENTS,
        latency_s=rates.latency_s,
        row_s=max(short_s - long_s, LEAST_ROW_S),
        wire_bytes_per_s=rates.gigabytes_per_s * 1e9,
    )
    if buffer_device != HOST and place is Place.SAME_HOST:
        return _slowed(found, _on_device(costs))
    return _slowed(found, _on_one_host(found, place, _bounded(found, costs)))


def _slowed(found: Measurement, costs: Costs) -> Costs:
    """Limit gathers to the rate of writing where that is far slower than reading: packed slots are written."""
    if found.times_slower(Direction.WRITE) < FAR_SLOWER:
        return costs
    return replace(costs, gather_bytes_per_s=min(costs.gather_bytes_per_s, found.writing.gigabytes_per_s * 1e9))


def _on_device(costs: Costs) -> Costs:
    """The costs where a device gathers and scatters while its copy engines move other slots."""
    device = typical_device(costs.wire_bytes_per_s)
    return replace(
        costs,
        row_s=max(costs.row_s, DEVICE_ROW_S),
        gather_bytes_per_s=device.gather_bytes_per_s,
        scatter_bytes_per_s=device.scatter_bytes_per_s,
        copy_row_s=device.copy_row_s,
        launch_s=DEVICE_SLOT_S,
    )


def _on_one_host(found: Measurement, place: Place, costs: Costs) -> Costs:
    if place is not Place.SAME_HOST or any(carrier.startswith("tcp") for carrier in found.carriers):
        return costs
    copy_rate = GATHER_PER_WIRE * costs.wire_bytes_per_s
    num_at_once = max(1.0, min(NUM_STAGES, STAGES_PER_CORE * len(os.sched_getaffinity(0))))
    copying = replace(
        costs,
        gather_bytes_per_s=copy_rate,
        scatter_bytes_per_s=copy_rate,
        num_at_once=num_at_once,
    )
    if found.carriers == (STRIDED,):
        # Measured with rows of 4 KiB, which is too much for shorter ones; but not more than a gather of them takes.
        copying = replace(copying, copy_row_s=max(copying.copy_row_s, copying.row_s))
    return replace(copying, sharing_s=SHARING_S, gathers_into_peer=True) if _is_shareable(found) else copying


def _bounded(found: Measurement, costs: Costs) -> Costs:
    """With the cost of a row as measured, but within the bounds of `COPIED_PER_ROW`."""
    row_s = costs.row_s
    for least, most in (COPIED_PER_ROW[carrier] for carrier in found.carriers if carrier in COPIED_PER_ROW):
        row_s = max(least / costs.wire_bytes_per_s, min(row_s, most / costs.wire_bytes_per_s))
    return replace(costs, row_s=row_s)


def _is_shareable(found: Measurement) -> bool:
    """Whether a source may write a share while its target reads the rest. Processors copy as fast in either direction:
    a self-test that says otherwise was disturbed, unless a direction is barred."""
    by_processors = bool(found.carriers) and all(carrier.startswith(COPYING) for carrier in found.carriers)
    is_known = all(found.times_slower(direction) for direction in Direction)
    return by_processors and is_known and not found.is_asymmetric
