"""NIXL between the device memory of two processes: its self-test, what carries the bytes, and READ against WRITE."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import count
from typing import Final

import numpy as np
import torch

from kvferry.errors import ConfigurationError, FerryError, TransportError
from kvferry.extras import how_to_install
from kvferry.plan.programs.copies import Copies, Direction, split
from kvferry.qualify.checks.ucx_settings import NOT_REACHED, has_nixl, reaches_device
from kvferry.qualify.outcome import Figure, Outcome, Result, failed, passed, skipped
from kvferry.qualify.torch_device import TorchDevice, number_of
from kvferry.testing.transports.peer import PeerProcess, digest
from kvferry.transport.base import Memory, Transport
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Severity
from kvferry.transport.registry import OPENERS
from kvferry.transport.selection.diagnosis import diagnose, local_context
from kvferry.transport.selection.measurement import FAR_SLOWER, Measurement
from kvferry.transport.selection.probe import NUM_MARKS, PROBE_BYTES, Probe, pattern
from kvferry.transport.selection.self_test import measure
from kvferry.transport.ucx.environment import prepare, system_facts

NAME: Final = "transports in device memory"
PEER: Final = "peer"
READ, WRITE = Direction.READ, Direction.WRITE
READ_SEED: Final = 7
"""The seed of what is in the memory that is read."""
TOTAL_BYTES: Final = 64 << 20
ROW_BYTES: Final = 4 << 10
REPEATS: Final = 3
DEADLINE_S: Final = 20.0

Seconds = dict[tuple[str, Direction], float]


def run(kind: str) -> Outcome:
    """Check transfers to the next device, or within the only one."""
    if not has_nixl():
        return skipped(NAME, f"NIXL is not installed: {how_to_install('nixl')}")
    if not reaches_device(system_facts(kind, kind)):
        return skipped(NAME, NOT_REACHED.format(kind=kind))
    try:
        prepared = prepare(kind, kind, Place.SAME_HOST)
    except ConfigurationError as error:
        return failed(NAME, str(error))
    for finding in prepared.environment.warnings:
        if finding.severity is Severity.ERROR:
            return failed(NAME, str(finding))
    return check(TorchDevice(kind), 1 % number_of(kind), OPENERS["nixl"])


def check(device: TorchDevice, peer_number: int, opener: Callable[[str], Transport]) -> Outcome:
    """Check transfers to another process, on device `peer_number` of the same kind. Every byte is compared."""
    try:
        with (
            closing(opener("127.0.0.1")) as transport,
            PeerProcess("nixl", TOTAL_BYTES, READ_SEED, device=(device.kind, peer_number)) as peer,
        ):
            pair = _Pair(device, transport, peer)
            seconds = pair.seconds(READ)
            # The self-test writes as well, so it comes between reading and writing.
            tested = measure(transport, PEER, Probe(peer.probe.address, PROBE_BYTES, READ_SEED, NUM_MARKS))
            if tested.error:
                return failed(NAME, f"the self-test fails: {tested.error}")
            return _outcome(device.kind, tested, seconds | pair.seconds(WRITE), transport.carriers(PEER))
    except FerryError as error:
        return failed(NAME, str(error))


def _outcome(kind: str, tested: Measurement, seconds: Seconds, carriers: tuple[str, ...]) -> Outcome:
    carried_by = ", ".join(carriers) or "unknown"
    figures = tuple(_figure(what, direction, seconds) for what, direction in seconds)
    found = passed(NAME, f"every byte arrives; carried by {carried_by}", figures, (("carriers", carried_by),))
    slow = diagnose(tested, READ, Place.SAME_HOST, local_context("auto", buffer_device=kind))
    if slow and found.result is Result.PASSED:
        words = "; ".join([found.words, *map(str, slow)])
        return Outcome(NAME, Result.SLOW, words, figures, found.facts)
    return found


def _figure(what: str, direction: Direction, seconds: Mapping[tuple[str, Direction], float]) -> Figure:
    """One figure. Reading is not to be far slower than writing."""
    rate = TOTAL_BYTES / seconds[what, direction] / 1e9
    if direction is WRITE:
        return Figure(f"write, {what}", rate)
    share = seconds[what, WRITE] / seconds[what, READ]
    return Figure(f"read, {what}", rate, share, "writing", 1.0, 1 / FAR_SLOWER)


class _Pair:
    """Memory of the device here, and that of the other process."""

    def __init__(self, device: TorchDevice, transport: Transport, peer: PeerProcess) -> None:
        """Raises TransportError when the two cannot be connected."""
        self._device, self._transport, self._peer = device, transport, peer
        self._seeds = count(READ_SEED + 1)
        self._here = device.empty(TOTAL_BYTES)
        number = device.torch.index or 0
        transport.register(Memory(self._here.data_ptr(), TOTAL_BYTES, -1, device.kind, number))
        transport.connect(PEER, peer.descriptor)

    def seconds(self, direction: Direction) -> Seconds:
        """Median times, of one row and of many. Raises TransportError when bytes are wrong, or none come in time."""
        ends = [self._peer.probe.address, self._here.data_ptr()]
        source, target = ends if direction is READ else reversed(ends)
        start, goal, length = np.array([[source], [target], [TOTAL_BYTES]], np.uint64)
        whole = Copies(start, goal, length, 1)
        shapes = {"one row": whole, "4 KiB rows": split(whole, ROW_BYTES)}
        return {(what, direction): self._compared(copies, direction) for what, copies in shapes.items()}

    def _compared(self, copies: Copies, direction: Direction) -> float:
        """The median time of moves, each of which is into memory that has other bytes."""
        return statistics.median(self._once(copies, direction) for _ in range(REPEATS))

    def _once(self, copies: Copies, direction: Direction) -> float:
        seed = next(self._seeds) if direction is WRITE else READ_SEED
        expected = pattern(TOTAL_BYTES, seed)
        if direction is WRITE:
            self._here.copy_(torch.from_numpy(expected))
        else:
            self._here.zero_()
        self._device.wait()
        taken = self._moved(copies, direction)
        arrived = digest(self._here.cpu().numpy()) if direction is READ else self._peer.digest()
        if arrived != digest(expected):
            raise TransportError(f"{direction.name} between devices brings wrong bytes")
        return taken

    def _moved(self, copies: Copies, direction: Direction) -> float:
        began = time.perf_counter()
        ticket = self._transport.post(PEER, copies, direction)
        while time.perf_counter() - began < DEADLINE_S:
            for completion in self._transport.poll():
                if completion.ticket == ticket and completion.error:
                    raise TransportError(f"{direction.name} between devices fails", found=completion.error)
                if completion.ticket == ticket:
                    return time.perf_counter() - began
        raise TransportError(f"{direction.name} between devices does not end", expected=f"an end in {DEADLINE_S:g} s")
