"""Every device that is here, the CPU with Triton's interpreter among them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch

from kvferry.plan.programs.tiles import Tile
from kvferry.staging.device.launches import launch_of

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    # Before any test asks for the interpreter, or Triton's own library is interpreted for ever.
    import triton.language  # noqa: F401


@cache
def load_kernels(name: str) -> ModuleType:
    """The kernels once more: whether they are interpreted is decided when their module is loaded."""
    spec = importlib.util.find_spec("kvferry.staging.device.kernels")
    assert spec is not None
    assert spec.origin is not None
    again = importlib.util.spec_from_file_location(name, spec.origin)
    assert again is not None
    assert again.loader is not None
    module = importlib.util.module_from_spec(again)
    again.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_kernels() -> Callable[[str], ModuleType]:
    return load_kernels


class Device:
    """`kernels` are those that run on it."""

    def __init__(self, name: str, kernels: ModuleType) -> None:
        self.name, self.kernels = name, kernels

    def copy(self, tile: Tile) -> None:
        columns = torch.from_numpy(tile.columns()).to(self.name)
        self.kernels.copy_tile(columns, launch_of(tile))
        if self.name != "cpu":
            torch.accelerator.synchronize()


REAL = [pytest.param(name, marks=pytest.mark.device) for name in ("cuda", "xpu")]


@pytest.fixture(params=["cpu", *REAL])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed (pip install 'kvferry[kernels]')")
    name = request.param
    if name != "cpu" and not torch.get_device_module(name).is_available():
        pytest.skip(f"no {name} device here")
    # Both when a kernel is defined and while it runs.
    monkeypatch.setenv("TRITON_INTERPRET", "1" if name == "cpu" else "0")
    return Device(name, load_kernels(f"kernels_on_{name}"))


@pytest.fixture
def side_streams(device: Device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with kernels that run on the device."""
    from kvferry.staging.device import side_stream

    monkeypatch.setattr(side_stream, "copy_tile", device.kernels.copy_tile)
    return side_stream
