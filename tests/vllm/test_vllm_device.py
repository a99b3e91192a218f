"""Which buffers caches on a device get, and what the agent is told of them; no device is touched."""

import importlib
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch

from kvferry.connectors.vllm.worker import device as module
from kvferry.connectors.vllm.worker.device import buffers_of
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain
from kvferry.staging.device.table import StagingMemory
from kvferry.transport.base import Memory


class Cache:
    """A tensor's device is all that is looked at."""

    def __init__(self, device):
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("device", "wanted", "found"),
    [("cpu", "cpu", "cpu"), ("cuda:1", "cuda", "cuda"), ("cuda:1", "cpu", "cpu")],
)
def test_the_buffers_of_a_device(device, wanted, found):
    buffers = buffers_of({"layer": Cache(device)}, wanted)
    assert (str(buffers.device), buffers.name, buffers.buffer_device) == (device, device.split(":")[0], found)


def test_rocm_is_what_torch_calls_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert buffers_of({"layer": Cache("cuda:0")}, "cuda").buffer_device == "rocm"


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "cuda"), ("cuda:0", "xpu"), ("xpu:0", "xpu"), ("meta", "cpu")])
def test_what_does_not_go_together_is_refused(device, wanted):
    with pytest.raises(ConfigurationError):
        buffers_of({"layer": Cache(device)}, wanted)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "cpu"), ("cuda:0", "cpu")])
def test_staging_memory_lies_on_a_device_only_where_it_is_registered(device, wanted):
    with pytest.raises(ConfigurationError, match="whose memory is registered"):
        buffers_of({"layer": Cache(device)}, wanted, StagingMemory.DEVICE)
    assert buffers_of({"layer": Cache("cuda:0")}, "cuda", StagingMemory.DEVICE).staging is StagingMemory.DEVICE


CACHES = (Memory(1 << 40, 4096, -1), Memory(1 << 41, 8192, -1))


class Driver:
    """Stands for the device's runtime: what is pinned."""

    pinned: ClassVar[dict] = {}

    def __init__(self, device):
        assert device == torch.device("cuda:1")

    def register(self, address, num_bytes):
        self.pinned[address] = num_bytes
        return 0

    def unregister(self, address):
        return 0 if self.pinned.pop(address) else 1


@pytest.fixture
def launched(monkeypatch):
    """What was launched on the side of a device that is not there."""
    tiles = []

    class LocatedRows:
        def __init__(self, device):
            assert device == torch.device("cuda:1")
            self.finish = lambda: None

        def launch(self, found):
            tiles.extend(found)
            return lambda: True

    monkeypatch.setattr(module, "SideStream", LocatedRows)
    monkeypatch.setattr(module, "CudaRuntime", Driver)
    Driver.pinned = {}
    return tiles


def host_of(wanted, staging):
    buffers = buffers_of({"layer": Cache("cuda:1")}, wanted, staging)
    return buffers.cache(SimpleNamespace(memories=CACHES), ())


def copies(source, target):
    return plain(Copies(*(torch.tensor([number]).numpy().astype("uint64") for number in (source, target, 256)), 1))


@pytest.mark.parametrize(("wanted", "registered"), [("cuda", 2), ("cpu", 0)])
def test_staging_memory_of_the_host_is_pinned_while_the_mover_lives(launched, wanted, registered):
    host = host_of(wanted, StagingMemory.HOST)
    arena = host.arena(1 << 16)
    assert len(host.memories) == registered
    assert all((memory.device, memory.device_id) == ("cuda", 1) for memory in host.memories)
    mover = host.mover([*host.memories, arena.memory], lambda: None)
    assert Driver.pinned == {arena.memory.address: 1 << 16}
    mover.start("gather", copies(1 << 40, arena.memory.address))
    assert [moved.error for moved in mover.poll()] == [""]
    assert len(launched) == 1
    mover.close()
    assert Driver.pinned == {}
    arena.close(may_be_written=False)


def test_staging_memory_of_the_device_is_not_pinned(launched, monkeypatch):
    made = []

    class Arena:
        def __init__(self, num_bytes, device, name):
            made.append((num_bytes, str(device), name))
            self.memory = Memory(1 << 42, num_bytes, -1, name, device.index)

    monkeypatch.setattr(module, "DeviceArena", Arena)
    host = host_of("cuda", StagingMemory.DEVICE)
    arena = host.arena(1 << 16)
    assert made == [(1 << 16, "cuda:1", "cuda")]
    mover = host.mover([*host.memories, arena.memory], lambda: None)
    assert Driver.pinned == {}
    mover.start("scatter", copies(1 << 42, 1 << 41))
    mover.start("elsewhere", copies(1 << 42, 1 << 43))
    assert {moved.key: bool(moved.error) for moved in mover.poll()} == {"scatter": False, "elsewhere": True}
    mover.close()


def test_a_driver_that_refuses_to_pin_says_what_to_do(launched, monkeypatch):
    monkeypatch.setattr(Driver, "register", lambda *_: 2)
    host = host_of("cpu", StagingMemory.HOST)
    with pytest.raises(ConfigurationError, match=r"cudaHostRegister returned 2 .*hint: raise the limit"):
        host.mover([Memory(1 << 42, 4096, -1)], lambda: None)
