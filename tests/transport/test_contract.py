"""Every transport keeps the contract of `kvferry.transport.base`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from faulty_transport import FaultyTransport
from memory_transport import MemoryFabric, MemoryTransport
from process_contract import PROCESS_CONTRACT, ProcessCheck

from kvferry.errors import TransportError
from kvferry.testing.transports.contract import CONTRACT, Check
from kvferry.testing.transports.peer import make_transport
from kvferry.testing.transports.world import World
from kvferry.transport import registered_memory
from kvferry.transport.base import Transport
from kvferry.transport.cma.transport import CrossMemoryTransport
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.selection.self_test import Probe, fill_probe, measure
from kvferry.transport.shm.transport import SharedMemoryTransport
from kvferry.transport.tcp import client
from kvferry.transport.tcp.transport import TcpTransport


def memory_factory() -> Callable[[], Transport]:
    fabric = MemoryFabric()
    return lambda: MemoryTransport(fabric)


def faulty_factory() -> Callable[[], Transport]:
    fabric = MemoryFabric()
    return lambda: FaultyTransport(MemoryTransport(fabric))


FACTORIES: dict[str, Callable[[], Callable[[], Transport]]] = {
    "memory": memory_factory,
    "shm": lambda: SharedMemoryTransport,
    "cma": lambda: CrossMemoryTransport,
    "tcp": lambda: TcpTransport,
    "tcp-divided": lambda: TcpTransport,
    "nixl": lambda: NixlTransport,
    "faulty": faulty_factory,
}


@pytest.fixture(params=FACTORIES)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    if request.param == "tcp-divided":
        # What as a rule only happens with long tickets happens with all.
        monkeypatch.setattr(client, "MIN_SHARE_BYTES", 1)
    made = World(FACTORIES[request.param]())
    yield made
    made.close()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_two_transports_of_one_process(world: World, check: Check) -> None:
    check(world)


@pytest.fixture(params=["shm", "cma", "tcp", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    return str(request.param)


@pytest.mark.parametrize("check", PROCESS_CONTRACT, ids=lambda check: check.__name__)
def test_a_peer_in_another_process(name: str, check: ProcessCheck) -> None:
    transport = make_transport(name)
    check(transport, name)
    transport.close()


def test_as_many_pieces_as_peers_take_leave_room_for_a_self_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor tells of its buffer."""
    monkeypatch.setattr(registered_memory, "MAX_REGIONS", 2)
    world = World(FACTORIES[name]())
    fill_probe(world.far.views[0], 9)
    probe = Probe(world.far.address(0, 0), world.far.views[0].size, 9)

    def clock() -> float:
        # Nothing comes over NIXL unless the far side is polled as well.
        assert world.far.transport.poll() == []
        return time.perf_counter()

    assert measure(world.near.transport, "far", probe, clock).error == ""
    world.near.allocate(4096, 3)
    with pytest.raises(TransportError, match="too many pieces of memory"):
        world.near.transport.descriptor()
    world.close()
