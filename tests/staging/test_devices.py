"""The whole table of devices and buffer devices, and what is said about everything that is not in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.errors import ConfigurationError, TransportError
from kvferry.staging.device import table as table
from kvferry.staging.device.table import (
    StagingMemory,
    check_pair,
    check_staging,
    devices,
    register_device,
    staging_memory_named,
)
from kvferry.transport.memory_kind import kind_of

NAMES = ["cpu", "cuda", "rocm", "tpu", "xpu"]
ALLOWED = {
    ("cpu", "cpu"),
    ("cuda", "cuda"),
    ("cuda", "cpu"),
    ("rocm", "rocm"),
    ("rocm", "cpu"),
    ("tpu", "cpu"),
    ("xpu", "xpu"),
    ("xpu", "cpu"),
}


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(table, "_registered", {})


def test_the_table_has_every_device():
    assert sorted(devices()) == NAMES


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("buffer_device", [*NAMES, "npu", ""])
def test_every_pair(device, buffer_device):
    if (device, buffer_device) in ALLOWED:
        check_pair(device, buffer_device)
    else:
        with pytest.raises(ConfigurationError) as caught:
            check_pair(device, buffer_device)
        expected = " or ".join(f"'{right}'" for left, right in sorted(ALLOWED) if left == device)
        assert set(caught.value.expected.split(" or ")) == set(expected.split(" or "))
        assert repr(buffer_device) in caught.value.found
        assert "set the buffer device to" in caught.value.hint


@pytest.mark.parametrize("device", ["npu", "", "cuda:0", "CUDA"])
def test_an_unknown_device(device):
    with pytest.raises(ConfigurationError) as caught:
        check_pair(device, "cpu")
    assert caught.value.found == device
    assert caught.value.expected == "'cpu' or 'cuda' or 'rocm' or 'tpu' or 'xpu'"
    assert "kvferry.devices" in caught.value.hint


@pytest.mark.parametrize("memory", ["file", "object", "block", "managed"])
def test_memory_that_nobody_answers_for_is_refused_with_what_there_is(memory):
    with pytest.raises(ConfigurationError, match="cannot use this buffer device"):
        check_pair("cuda", memory)
    with pytest.raises(TransportError, match=r"cannot be registered with NIXL; .*hint: set the buffer device to 'cpu'"):
        kind_of(memory)


def test_others_can_be_registered():
    register_device("npu", ["npu", "cpu"])
    register_device("npu", ("npu", "cpu"))
    check_pair("npu", "npu")
    check_pair("npu", "cpu")
    with pytest.raises(ConfigurationError, match="found: buffer device 'cuda'"):
        check_pair("npu", "cuda")
    with pytest.raises(ConfigurationError, match="already registered"):
        register_device("npu", ["cpu"])


def test_what_is_built_in_stays():
    register_device("cuda", ("cuda", "cpu"))
    with pytest.raises(ConfigurationError, match="already registered"):
        register_device("tpu", ("tpu", "cpu"))


@pytest.mark.parametrize(
    ("device", "buffers"), [("", ["cpu"]), ("npu", []), ("npu", ["cuda"]), ("npu", ["cpu", "cpu"])]
)
def test_what_is_no_device_is_refused(device, buffers):
    with pytest.raises(ConfigurationError, match="invalid registration of a device"):
        register_device(device, buffers)


def test_the_table_in_the_documents_is_this_one():
    text = (Path(__file__).parents[2] / "docs/staging.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", text, re.MULTILINE)
    assert {device: tuple(re.findall(r"\w+", buffers)) for device, buffers in rows} == devices()


@pytest.mark.parametrize(("device", "buffer_device"), sorted(ALLOWED))
def test_staging_memory_lies_on_a_device_that_is_its_own_buffer_device(device, buffer_device):
    check_staging(device, buffer_device, StagingMemory.HOST)
    if device == buffer_device != "cpu":
        check_staging(device, buffer_device, StagingMemory.DEVICE)
        return
    with pytest.raises(ConfigurationError, match=r"hint: set staging_memory \(--staging-memory\) to 'host'") as caught:
        check_staging(device, buffer_device, StagingMemory.DEVICE)
    assert f"device {device!r}, buffer device {buffer_device!r}" in caught.value.found


def test_staging_memory_has_two_names():
    assert [staging_memory_named(name) for name in ("host", "device")] == list(StagingMemory)
    with pytest.raises(ConfigurationError, match="found: vram; expected: host or device"):
        staging_memory_named("vram")
