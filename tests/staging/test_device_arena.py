"""Memory of a device that peers are told of goes back to the device, or stays where a peer may still write to it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvferry.errors import TransportError
from kvferry.staging.device import arena as module
from kvferry.staging.device.arena import device_arena, pinned_arena

REAL = [pytest.param(name, marks=pytest.mark.device) for name in ("cuda", "xpu")]


@pytest.fixture(params=["cpu", *REAL])
def where(request) -> torch.device:
    if request.param != "cpu" and not torch.get_device_module(request.param).is_available():
        pytest.skip(f"no {request.param} device here")
    return torch.device(request.param, 0) if request.param != "cpu" else torch.device("cpu")


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(module, "_kept", [])
    return module._kept


def test_it_is_what_transports_call_it(where, kept):
    arena = device_arena(1 << 16, where, "abacus")
    (tensor,) = arena._tensors
    assert (arena.memory.address, arena.memory.size_bytes) == (tensor.data_ptr(), 1 << 16)
    assert (arena.memory.device, arena.memory.device_id, arena.memory.shared_fd) == ("abacus", 0, -1)
    assert tensor.device.type == where.type
    assert not tensor.any()


@pytest.mark.parametrize("may_be_written", [False, True])
def test_it_is_freed_unless_a_peer_may_still_write_to_it(where, kept, may_be_written):
    arena = device_arena(1 << 16, where, "abacus")
    tensor = weakref.ref(arena._tensors[0])
    arena.close(may_be_written)
    # The first word counts.
    arena.close(not may_be_written)
    gc.collect()
    assert (tensor() is not None) == may_be_written
    assert len(kept) == may_be_written


def test_too_little_memory_is_an_error_that_says_what_to_do(where, kept):
    with pytest.raises(
        TransportError, match=r"of abacus memory for staging; .*hint: .*staging_memory \(--staging-memory\) to 'host'"
    ):
        device_arena(1 << 56, where, "abacus")


def test_pinned_memory_needs_the_device(kept):
    with pytest.raises(TransportError, match=r"65,536 bytes of pinned memory for staging; .*is the device here\?"):
        pinned_arena(1 << 16, torch.device("xpu", 99))


@pytest.mark.device
@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_pinned_memory_is_the_hosts_and_the_device_reaches_it(name, kept):
    if not torch.get_device_module(name).is_available():
        pytest.skip(f"no {name} device here")
    arena = pinned_arena(1 << 16, torch.device(name, 0))
    (tensor,) = arena._tensors
    assert (arena.memory.device, arena.memory.address) == ("cpu", tensor.data_ptr())
    assert tensor.is_pinned()
    assert not tensor.any()


@pytest.mark.device
def test_kept_memory_is_nobody_elses(kept):
    """What is freed is soon handed out again by the allocator; what is kept never is."""
    if not torch.cuda.is_available():
        pytest.skip("no cuda device here")
    arena = device_arena(64 << 20, torch.device("cuda", 0), "cuda")
    start = arena.memory.address
    arena.close(may_be_written=True)
    others = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert all(abs(other.data_ptr() - start) >= 64 << 20 for other in others)
