"""Host memory is pinned for a device while it is in use, and not a moment longer."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from kvferry.errors import ConfigurationError
from kvferry.staging.device.mover import DeviceMover
from kvferry.staging.device.pinned import CudaRuntime, pinned
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions

MEMORIES = [Memory(1 << 20, 4096, -1), Memory(1 << 21, 8192, -1)]


class Driver:
    """Pins at most `room` bytes; `pinned` is what it has pinned, `calls` what it was asked in turn."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room, self.pinned, self.calls = room, {}, []

    def register(self, address: int, num_bytes: int) -> int:
        if num_bytes > self.room or address in self.pinned:
            return 2 if num_bytes > self.room else 712
        self.room -= num_bytes
        self.pinned[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        self.room += self.pinned.pop(address)
        return 0


def test_what_is_pinned_is_let_go_once():
    driver = Driver()
    pins = pinned(driver, MEMORIES)
    assert driver.pinned == {1 << 20: 4096, 1 << 21: 8192}
    pins.close()
    pins.close()
    assert driver.pinned == {}
    # The same addresses can be pinned again, as when another engine of this process gets them.
    pinned(driver, MEMORIES).close()


def test_a_refusal_says_what_was_asked_and_leaves_nothing_pinned():
    driver = Driver(room=8192)
    with pytest.raises(ConfigurationError, match=r"returned 2 for 8,192 bytes; .*hint: raise the limit on locked"):
        pinned(driver, MEMORIES)
    assert driver.pinned == {}


def test_a_device_that_has_failed_does_not_stop_the_end():
    class Lost(Driver):
        def unregister(self, address: int) -> int:
            self.calls.append(("unregister", address))
            raise RuntimeError("the device is lost")

    driver = Lost()
    pinned(driver, MEMORIES).close()
    assert len(driver.calls) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_mover_lets_go_when_nothing_runs_any_more(fails):
    driver = Driver()

    class Launcher:
        def finish(self) -> None:
            driver.calls.append("finish")
            if fails:
                raise RuntimeError("the device is lost")

    array = np.zeros(4096, np.uint8)
    memory = Memory(array.ctypes.data, 4096, -1)
    mover = DeviceMover(Launcher(), Regions.of([(memory.address, 4096)]), [pinned(driver, [memory])])
    mover.close()
    mover.close()
    assert driver.calls == ["finish", ("unregister", memory.address)]
    assert driver.pinned == {}


def test_what_a_device_may_still_copy_to_stays_pinned():
    driver = Driver()

    class Stuck:
        def finish(self) -> None:
            raise TimeoutError("copies have not ended")

    array = np.zeros(4096, np.uint8)
    memory = Memory(array.ctypes.data, 4096, -1)
    DeviceMover(Stuck(), Regions.of([(memory.address, 4096)]), [pinned(driver, [memory])]).close()
    assert driver.calls == []


def test_cuda_is_asked_on_the_device_whoever_asks(monkeypatch):
    calls = []

    class Cudart:
        def cudaHostRegister(self, *what):
            calls.append(("register", *what))
            return 0

        def cudaHostUnregister(self, *what):
            calls.append(("unregister", *what))
            return 0

    @contextlib.contextmanager
    def on(device):
        calls.append(("on", device))
        yield
        calls.append("off")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "device", on)
    device = torch.device("cuda:1")
    pinned(CudaRuntime(device), MEMORIES[:1]).close()
    on_it = ("on", device)
    assert calls == [on_it, ("register", 1 << 20, 4096, 0), "off", on_it, ("unregister", 1 << 20), "off"]
