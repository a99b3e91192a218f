"""The check of kernels in `kvferry qualify`, with the kernels themselves: in Triton's interpreter, and on devices."""

from __future__ import annotations

import pytest

from kvferry.qualify.checks import copy_rates, kernels
from kvferry.qualify.outcome import Result
from kvferry.qualify.torch_device import TorchDevice


class Interpreted(TorchDevice):
    """Memory of the host, which the interpreter's kernels reach."""

    free_bytes = 1 << 30

    def __init__(self):
        super().__init__("cpu")

    def pinned(self, num_bytes):
        return self.empty(num_bytes)

    def seconds(self, steps, repeats):
        for step in steps.values():
            step()
        return dict.fromkeys(steps, 1.0)


@pytest.fixture
def where(device, side_streams, monkeypatch):
    """`side_streams` has kernels for it."""
    if device.name != "cpu":
        return TorchDevice(device.name)
    monkeypatch.setattr(kernels, "NUM_ROWS", 12)
    monkeypatch.setattr(kernels, "UNITS", (1, 16, 48))
    monkeypatch.setattr(copy_rates, "TOTAL_BYTES", 1 << 14)
    return Interpreted()


def test_our_kernels_pass(where):
    assert kernels.check(where).result is Result.PASSED


def test_our_kernels_have_rates(where):
    found = copy_rates.check(where)
    assert found.result in (Result.PASSED, Result.SLOW), found.words
    assert len(found.figures) == 6
