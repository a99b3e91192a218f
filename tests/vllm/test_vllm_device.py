"""Which buffers caches on a device get: a table; no device is touched."""

import importlib
import warnings

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch

from kvferry.connectors.vllm.device import buffers_of
from kvferry.errors import ConfigurationError


class Cache:
    """A tensor's device is all that is looked at."""

    def __init__(self, device):
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("device", "wanted", "found"),
    [("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda:1", "cuda", "cuda"), ("cuda:1", "cpu", "cpu")],
)
def test_the_buffers_of_a_device(device, wanted, found):
    buffers = buffers_of({"layer": Cache(device)}, wanted)
    assert (str(buffers.device), buffers.name, buffers.buffer_device) == (device, device.split(":")[0], found)


def test_rocm_is_what_torch_calls_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert buffers_of({"layer": Cache("cuda:0")}, "cuda").buffer_device == "rocm"


@pytest.mark.parametrize(("device", "wanted"), [("cuda:0", "xpu"), ("xpu:0", "xpu"), ("meta", "cpu")])
def test_what_does_not_go_together_is_refused(device, wanted):
    with pytest.raises(ConfigurationError):
        buffers_of({"layer": Cache(device)}, wanted)
