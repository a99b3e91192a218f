"""Memory of devices: which kind it is, who may register it, and how rows of several kinds are posted.

There is no device here, and NIXL refuses host memory that is said to be a device's. That rows of every kind are posted
as what they are is tested with an agent that pretends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.world import finish
from kvferry.transport import memory_kind
from kvferry.transport.base import Direction, Memory, Transport
from kvferry.transport.cma.transport import CrossMemoryTransport
from kvferry.transport.memory_kind import MemoryKind, kind_of, register_kind
from kvferry.transport.nixl.descriptor_lists import Devices, cut_by_kind, descriptor_list
from kvferry.transport.registered_memory import Regions
from kvferry.transport.shm.transport import SharedMemoryTransport
from kvferry.transport.tcp.transport import TcpTransport

DRAM, VRAM = MemoryKind.DRAM, MemoryKind.VRAM
PIECE_BYTES = 1 << 16


@pytest.mark.parametrize(("device", "kind"), [("cpu", DRAM), ("cuda", VRAM), ("rocm", VRAM), ("xpu", VRAM)])
def test_a_device_has_a_kind_of_memory(device: str, kind: MemoryKind) -> None:
    assert kind_of(device) is kind


def test_more_devices_can_be_made_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_kind, "KINDS", dict(memory_kind.KINDS))
    with pytest.raises(TransportError, match=r"found: abacus; .* hint: set the buffer device to 'cpu'"):
        kind_of("abacus")
    register_kind("abacus", VRAM)
    register_kind("abacus", VRAM)
    assert kind_of("abacus") is VRAM
    with pytest.raises(TransportError, match="already registered"):
        register_kind("abacus", DRAM)


@pytest.mark.parametrize(
    "make",
    [SharedMemoryTransport, CrossMemoryTransport, TcpTransport, lambda: MemoryTransport(MemoryFabric())],
    ids=["shm", "cma", "tcp", "memory"],
)
def test_who_copies_with_the_processor_takes_no_device_memory(make: Callable[[], Transport]) -> None:
    transport, view = make(), np.zeros(64, np.uint8)
    with pytest.raises(TransportError, match=r"found: cuda memory; .*hint: use nixl"):
        transport.register(Memory(view.ctypes.data, 64, -1, "cuda"))
    transport.register(Memory(view.ctypes.data, 64, -1))
    transport.close()


def test_devices_are_marked_in_rows_by_the_piece_that_they_lie_in() -> None:
    extents = [(3000, 100), (1000, 100), (2000, 100)]
    devices = Devices.of(extents, [("cuda", 5), ("cpu", 0), ("cuda", 3)])
    rows = descriptor_list(np.array([1000, 2010, 3020, 1050], np.uint64), np.full(4, 10, np.uint64))
    assert devices.mark(rows, Regions.of(extents)).tolist() == [False, True, True, False]
    assert rows[:, 2].tolist() == [0, 3, 5, 0]
    assert Devices.of(extents, [("cpu", 0)] * 3).kinds == Devices.of(extents, ()).kinds == ()
    with pytest.raises(TransportError, match="another number of regions"):
        Devices.of(extents, [("cuda", 0)])
    with pytest.raises(TransportError, match="cannot be registered"):
        Devices.of(extents[:1], [("abacus", 0)])


def test_a_part_has_one_kind_of_memory_on_each_side() -> None:
    local = descriptor_list(np.arange(8, dtype=np.uint64) * 100 + 1, np.full(8, 10, np.uint64))
    marks = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool), np.array([0, 1, 0, 1, 0, 1, 0, 1], bool)
    parts = cut_by_kind(local, local + 7, marks)
    assert [(part.local_kind, part.remote_kind) for part in parts] == [
        (n, f) for n in (DRAM, VRAM) for f in (DRAM, VRAM)
    ]
    assert sorted(row for part in parts for row in part.local[:, 0].tolist()) == local[:, 0].tolist()
    assert all(np.array_equal(part.local + 7, part.remote) for part in parts)
    (whole,) = cut_by_kind(local, local, (np.ones(8, bool), np.zeros(8, bool)))
    assert (whole.local_kind, whole.remote_kind, len(whole.local)) == (VRAM, DRAM, 8)


def test_nixl_refuses_device_memory_that_it_does_not_recognise() -> None:
    nixl = pytest.importorskip("kvferry.transport.nixl.transport")
    pytest.importorskip("nixl_cu13")
    transport, view = nixl.NixlTransport(), np.zeros(PIECE_BYTES, np.uint8)
    with pytest.raises(TransportError, match=r"cannot register cuda memory; .*hint: kvferry doctor"):
        transport.register(Memory(view.ctypes.data, PIECE_BYTES, -1, "cuda"))
    transport.register(Memory(view.ctypes.data, PIECE_BYTES, -1))
    transport.close()


class Pretending:
    """A NIXL agent to which memory of devices is memory of the host; `kinds` are those that it was told."""

    def __init__(self, agent: Any, kinds: list[str]) -> None:
        self._agent, self._kinds = agent, kinds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Any:
        return self._agent.register_memory(places, "DRAM")

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> Any:
        self._kinds.append(kind)
        return self._agent.get_xfer_descs(rows, "DRAM")


@pytest.mark.parametrize("direction", Direction)
def test_rows_move_between_memory_of_both_kinds(direction: Direction) -> None:
    nixl = pytest.importorskip("kvferry.transport.nixl.transport")
    pytest.importorskip("nixl_cu13")
    sides, kinds = [nixl.NixlTransport() for _ in range(2)], []
    for transport in sides:
        transport._agent = Pretending(transport._agent, kinds)
    views = [[np.zeros(PIECE_BYTES, np.uint8) for _ in range(2)] for _ in sides]
    for transport, (host, device) in zip(sides, views, strict=True):
        transport.register(Memory(host.ctypes.data, PIECE_BYTES, -1))
        transport.register(Memory(device.ctypes.data, PIECE_BYTES, -1, "cuda"))
    near, far = sides
    near.connect("far", far.descriptor())
    sources, targets = (views[1], views[0]) if direction is Direction.READ else (views[0], views[1])
    for number, view in enumerate(sources):
        view[:] = np.arange(PIECE_BYTES, dtype=np.uint32).view(np.uint8)[:PIECE_BYTES] + number
    pairs = [(source, target) for source in range(2) for target in range(2)]
    places = [(pair, 4096 * (2 * number), 4096 * number + 512) for number, pair in enumerate(pairs)]
    source = np.array([sources[pair[0]].ctypes.data + start for pair, start, _ in places], np.uint64)
    target = np.array([targets[pair[1]].ctypes.data + start for pair, _, start in places], np.uint64)
    ticket = near.post("far", Copies(source, target, np.full(4, 512, np.uint64), 4), direction)
    assert finish(near, [ticket], far)[ticket].error == ""
    for pair, start, end in places:
        assert np.array_equal(sources[pair[0]][start : start + 512], targets[pair[1]][end : end + 512])
    assert sorted(kinds[-8:]) == [DRAM] * 4 + [VRAM] * 4
    for transport in sides:
        transport.close()
