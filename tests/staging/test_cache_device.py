"""Which memory of a device an agent is told of; no device is touched."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kvferry import devices as module
from kvferry.devices import CacheDevice, cache_device
from kvferry.errors import ConfigurationError
from kvferry.extras import MissingExtraError
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain
from kvferry.staging.device.table import StagingMemory
from kvferry.transport.base import Memory


@pytest.mark.parametrize(
    ("device", "wanted", "found"),
    [
        ("cpu", "cpu", "cpu"),
        ("cuda:1", "cuda", "cuda"),
        ("cuda:1", "cpu", "cpu"),
        ("xpu:1", "xpu", "xpu"),
        ("xpu:1", "cpu", "cpu"),
    ],
)
def test_the_buffer_device_of_a_device(device, wanted, found):
    chosen = cache_device(torch.device(device), wanted)
    assert (str(chosen.device), chosen.name, chosen.buffer_device) == (device, device.split(":")[0], found)


def test_rocm_is_what_torch_calls_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert cache_device(torch.device("cuda:0"), "cuda").buffer_device == "rocm"


@pytest.mark.parametrize(
    ("device", "wanted"), [("cpu", "cuda"), ("cuda:0", "xpu"), ("xpu:0", "cuda"), ("meta", "cpu"), ("mps", "cpu")]
)
def test_what_does_not_go_together_is_refused(device, wanted):
    with pytest.raises(ConfigurationError):
        cache_device(torch.device(device), wanted)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "cpu"), ("cuda:0", "cpu")])
def test_staging_memory_lies_on_a_device_only_where_it_is_registered(device, wanted):
    with pytest.raises(ConfigurationError, match="whose memory is registered"):
        cache_device(torch.device(device), wanted, StagingMemory.DEVICE)
    assert cache_device(torch.device("cuda:0"), "cuda", StagingMemory.DEVICE).staging is StagingMemory.DEVICE


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

    class Stream:
        def __init__(self, device):
            assert device == torch.device("cuda:1")
            self.finish = lambda: None

        def launch(self, found):
            tiles.extend(found)
            return lambda: True

    monkeypatch.setattr(module, "_launcher", Stream)
    monkeypatch.setattr(module, "CudaRuntime", Driver)
    Driver.pinned = {}
    return tiles


def cache_of(wanted, staging):
    return cache_device(torch.device("cuda:1"), wanted, staging).cache((), CACHES)


def copies(source, target):
    return plain(Copies(*(torch.tensor([number]).numpy().astype("uint64") for number in (source, target, 256)), 1))


@pytest.mark.parametrize(("wanted", "registered"), [("cuda", 2), ("cpu", 0)])
def test_staging_memory_of_the_host_is_pinned_while_the_mover_lives(launched, wanted, registered):
    cache = cache_of(wanted, StagingMemory.HOST)
    arena = cache.arena(1 << 16)
    assert len(cache.memories) == registered
    assert all((memory.device, memory.device_id) == ("cuda", 1) for memory in cache.memories)
    mover = cache.mover([*cache.memories, arena.memory], lambda: None)
    assert Driver.pinned == {arena.memory.address: 1 << 16}
    mover.start("gather", copies(1 << 40, arena.memory.address))
    assert [moved.error for moved in mover.poll()] == [""]
    assert len(launched) == 1
    mover.close()
    assert Driver.pinned == {}
    arena.close(may_be_written=False)


def test_staging_memory_of_the_device_is_not_pinned(launched, monkeypatch):
    made = []

    def arena_on(device, num_bytes, name):
        made.append((num_bytes, str(device), name))
        return SimpleNamespace(memory=Memory(1 << 42, num_bytes, -1, name, device.index))

    monkeypatch.setattr(module, "device_arena", lambda num_bytes, device, name: arena_on(device, num_bytes, name))
    cache = cache_of("cuda", StagingMemory.DEVICE)
    arena = cache.arena(1 << 16)
    assert made == [(1 << 16, "cuda:1", "cuda")]
    mover = cache.mover([*cache.memories, arena.memory], lambda: None)
    assert Driver.pinned == {}
    mover.start("scatter", copies(1 << 42, 1 << 41))
    mover.start("elsewhere", copies(1 << 42, 1 << 43))
    assert {moved.key: bool(moved.error) for moved in mover.poll()} == {"scatter": False, "elsewhere": True}
    mover.close()


def test_staging_memory_for_an_xpu_is_allocated_pinned(launched, monkeypatch):
    """Its driver pins nothing that others have allocated."""
    monkeypatch.setattr(module, "_launcher", lambda device: SimpleNamespace(launch=lambda _: lambda: True, finish=id))
    pinned = SimpleNamespace(memory=Memory(1 << 42, 1 << 16, -1))
    monkeypatch.setattr(
        module, "pinned_arena", lambda num_bytes, device: {(1 << 16, "xpu:1"): pinned}[num_bytes, str(device)]
    )
    cache = cache_device(torch.device("xpu:1"), "cpu").cache((), CACHES)
    assert (cache.memories, cache.device, cache.buffer_device) == ((), "xpu", "cpu")
    arena = cache.arena(1 << 16)
    assert arena is pinned
    mover = cache.mover([arena.memory], lambda: None)
    mover.start("gather", copies(1 << 40, arena.memory.address))
    assert [moved.error for moved in mover.poll()] == [""]
    assert Driver.pinned == {}


def test_a_driver_that_refuses_to_pin_says_what_to_do(launched, monkeypatch):
    monkeypatch.setattr(Driver, "register", lambda *_: 2)
    cache = cache_of("cpu", StagingMemory.HOST)
    with pytest.raises(ConfigurationError, match=r"cudaHostRegister returned 2 .*hint: raise the limit"):
        cache.mover([Memory(1 << 42, 4096, -1)], lambda: None)


def test_a_milestone_is_an_event_on_the_engines_stream(monkeypatch):
    done, recorded = [], []

    class Event:
        def record(self, stream):
            recorded.append(stream)

        def query(self):
            return bool(done)

    module = SimpleNamespace(Event=Event, current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    is_done = CacheDevice(torch.device("cuda:1"), "cuda", "cuda").milestone()
    assert (is_done(), recorded) == (False, ["stream of cuda:1"])
    done.append(True)
    assert is_done()
    CacheDevice(torch.device("cuda:1"), "cuda", "cuda").milestone("another stream")
    assert recorded[1:] == ["another stream"]
    assert all(
        CacheDevice(torch.device("cpu"), "cpu", "cpu").milestone(stream)() for stream in (None, "another stream")
    )


def test_only_caches_on_a_device_need_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvferry.staging.device.kernels", raising=False)
    monkeypatch.delitem(sys.modules, "kvferry.staging.device.side_stream", raising=False)
    assert cache_device(torch.device("cpu"), "cpu").cache((), CACHES).memories == CACHES
    with pytest.raises(MissingExtraError, match=r"triton is not installed: pip install 'kvferry\[kernels\]'"):
        cache_of("cpu", StagingMemory.HOST)
