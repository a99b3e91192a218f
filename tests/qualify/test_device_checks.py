"""The checks of kernels and of their rates pass a device that is right, and find what is wrong with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stand_in_device import Shortened, Spilling, StandIn, ThirtyTwoBits

from kvferry.qualify import torch_device
from kvferry.qualify.checks import copy_rates, kernels
from kvferry.qualify.outcome import Result, passed


def test_kernels_that_are_right_pass():
    found = kernels.check(StandIn())
    assert (found.result, found.words.endswith("also beyond 4 GiB")) == (Result.PASSED, True), found.words
    assert found.left_out == ()


def test_without_the_memory_for_it_nothing_is_said_of_far_rows():
    found = kernels.check(StandIn(free_bytes=1 << 30))
    assert (found.result, "not tried: so much memory is not free" in found.words) == (Result.PASSED, True)
    assert found.left_out == ("kernels beyond 4 GiB",)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Shortened, "equal rows of 1 bytes, within the device"),
        (Spilling, "uneven rows of 1 bytes, within the device"),
        (ThirtyTwoBits, "more than 4 GiB apart"),
    ],
)
def test_kernels_that_are_wrong_fail(broken, words):
    found = kernels.check(broken())
    assert (found.result, words in found.words) == (Result.FAILED, True), found.words


@pytest.mark.parametrize(
    ("reads", "way"), [(True, "from the host to the device"), (False, "from the device to the host")]
)
def test_pinned_memory_that_the_device_does_not_reach_is_found(reads, way):
    class Unpinned(StandIn):
        """What a kernel reads there is nothing, or what it writes there is lost."""

        def __init__(self):
            super().__init__()
            self.host = []

        def pinned(self, num_bytes):
            self.host.append(found := self.empty(num_bytes))
            return found

        def changed(self, source, target, length):
            lost = self.host and int((source if reads else target)[0])
            is_there = any(0 <= lost - each.data_ptr() < len(each) for each in self.host)
            return super().changed(source, target, length * (not is_there))

    found = kernels.check(Unpinned())
    assert (found.result, way in found.words) == (Result.FAILED, True), found.words


@pytest.mark.slow
def test_every_device_is_tried_and_the_wrong_one_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "number_of", lambda kind: 3)
    monkeypatch.setattr(kernels, "TorchDevice", lambda kind, number: Shortened() if number == 1 else StandIn())
    found = kernels.run("cuda")
    assert (found.result, found.words.startswith("device 1: ")) == (Result.FAILED, True)
    monkeypatch.setattr(kernels, "TorchDevice", lambda kind, number: StandIn())
    assert kernels.run("cuda").words.startswith("on each of 3 devices ")


@pytest.mark.parametrize(("full", "where"), [({1}, "no room on 1 of them"), ({0, 1, 2}, "no room"), ((), "all tried")])
def test_what_one_device_cannot_try_was_not_tried_on_all(monkeypatch, full, where):
    without, whole = passed("kernels", "no room", left_out=(kernels.FAR_ROWS,)), passed("kernels", "all tried")
    monkeypatch.setattr(kernels, "number_of", lambda kind: 3)
    monkeypatch.setattr(kernels, "TorchDevice", lambda kind, number: number)
    monkeypatch.setattr(kernels, "check", lambda number: without if number in full else whole)
    found = kernels.run("cuda")
    assert (found.result, found.words) == (Result.PASSED, f"on each of 3 devices {where}")
    assert found.left_out == ((kernels.FAR_ROWS,) if full else ())


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(copy_rates, "TOTAL_BYTES", 1 << 16)


def test_a_device_that_is_as_fast_as_expected_passes(little):
    found = copy_rates.check(StandIn(limit=0.97, rows=1.0))
    assert found.result is Result.PASSED, found.words
    assert [figure.expected for figure in found.figures] == [0.97, 0.97, 0.93, 0.93, 0.94, 0.94]
    assert {figure.share for figure in found.figures} == {0.97}


def test_a_slow_device_is_called_slow_with_its_share_and_what_is_expected(little):
    found = copy_rates.check(StandIn(limit=0.85, rows=1.0))
    assert found.result is Result.SLOW
    slow = {figure.name for figure in found.figures if figure.is_slow}
    assert slow == {f"gather to the host, rows of {size} bytes" for size in (256, 4096)}
    assert "gather to the host, rows of 256 bytes: 85% of a pinned copy, expected 97%" in found.words


def test_wrong_bytes_have_no_rate(little):
    class Late(StandIn):
        def launch(self, tiles):
            return None

    found = copy_rates.check(Late())
    assert (found.result, found.words) == (Result.FAILED, "gather to the host, rows of 256 bytes: wrong bytes")
    assert found.figures == ()


def test_a_kernel_that_fills_the_gaps_has_no_rate(little):
    class Filling(StandIn):
        def changed(self, source, target, length):
            return source.tolist(), target.tolist(), [each + 1 for each in length.tolist()[:-1]] + [int(length[-1])]

    found = copy_rates.check(Filling(limit=1.0, rows=1.0))
    assert (found.result, found.words) == (Result.FAILED, "scatter from the host, rows of 256 bytes: wrong bytes")


def test_without_free_memory_rates_are_left_out(little):
    assert copy_rates.check(StandIn(free_bytes=0)).result is Result.SKIPPED


def test_rates_are_those_of_copies_that_were_made(little):
    found = copy_rates.check(StandIn())
    assert all(figure.gigabytes_per_s > 0 for figure in found.figures)


@pytest.mark.parametrize(
    ("kind", "hip", "number"),
    [("cuda", None, 3), ("rocm", None, 0), ("cuda", "6.2", 0), ("rocm", "6.2", 3), ("xpu", None, 3), ("xpu", "6.2", 3)],
)
def test_devices_are_those_that_torch_was_built_for(monkeypatch, kind, hip, number):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: 3))
    assert torch_device.number_of(kind) == number
    assert torch_device.number_of("cpu") == 1
    assert torch_device.number_of("tpu") == 0


@pytest.mark.parametrize("error", [AttributeError("mem_get_info"), RuntimeError("not supported by this driver")])
def test_a_driver_that_does_not_say_what_is_free_ends_no_check(monkeypatch, error):
    def unknown(device):
        raise error

    driver = SimpleNamespace(mem_get_info=unknown, empty_cache=lambda: None, set_device=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)
    assert torch_device.TorchDevice("xpu").free_bytes == 0
