"""Pages that an SGLang prefill has handed over are offered once the device has written them, and no sooner.

The sender runs without SGLang: names stand for its base classes. Without a device, a test's own events stand for one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from plain_tables import PlainTables

from kvferry import FirstToken
from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang.construction import note_request
from kvferry.devices import CacheDevice

PAGE_SIZE, ROW_BYTES, PROMPT = 16, 256, list(range(40))
FIRST = FirstToken(17)
# Steps of a stream that take a second and more, where what a test does meanwhile takes microseconds.
CYCLES, PRODUCTS, SIDE = 3_000_000_000, 200, 8192
OURS = [f"kvferry.connectors.sglang.{name}" for name in ("manager", "sender")]
NAMES = ("BaseKVSender", "BaseKVManager", "BaseKVBootstrapServer", "KVTransferMetric")


class PretendedDevice:
    """Events of streams that a test lets run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self._events = torch.device("cuda:0"), list[Any]()
        self._pages = torch.zeros(4, PAGE_SIZE, ROW_BYTES)
        self._waiting = list[tuple[int, int]]()
        module = SimpleNamespace(Event=self.event, current_stream=lambda device: "the current one")
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def event(self) -> Any:
        made = SimpleNamespace(is_done=False)
        made.record, made.query = lambda stream: self._events.append(made), lambda: made.is_done
        return made

    def write_late(self, page: int, value: int) -> None:
        self._waiting.append((page, value))

    def recorded(self) -> Any:
        made = self.event()
        made.record("the forward's")
        return made

    def finish(self) -> None:
        for page, value in self._waiting:
            self._pages[page].fill_(value)
        for each in self._events:
            each.is_done = True

    def page(self, number: int) -> torch.Tensor:
        return self._pages[number]


class RealDevice:
    """A device whose current stream is busy for a while before it writes."""

    def __init__(self, name: str) -> None:
        self.device, self._module = torch.device(name, 0), torch.get_device_module(name)
        self._pages = torch.zeros(4, PAGE_SIZE, ROW_BYTES, device=self.device)
        self._factor = torch.ones(SIDE, SIDE, device=self.device) if name != "cuda" else None
        torch.accelerator.synchronize()

    def write_late(self, page: int, value: int) -> None:
        if self._factor is None:
            torch.cuda._sleep(CYCLES)
        else:
            for _ in range(PRODUCTS):
                torch.mm(self._factor, self._factor, out=self._factor)
        self._pages[page].fill_(value)

    def recorded(self) -> Any:
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event

    def finish(self) -> None:
        torch.accelerator.synchronize()

    def page(self, number: int) -> torch.Tensor:
        return self._pages[number].cpu()


@pytest.fixture(params=["pretended", *(pytest.param(name, marks=pytest.mark.device) for name in ("cuda", "xpu"))])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PretendedDevice | RealDevice:
    if request.param == "pretended":
        return PretendedDevice(monkeypatch)
    if not torch.get_device_module(request.param).is_available():
        pytest.skip(f"no {request.param} device here")
    return RealDevice(request.param)


@pytest.fixture
def sender_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ours, on names in place of SGLang's classes."""
    base = ModuleType("sglang.srt.disaggregation.base.conn")
    vars(base).update({name: type(name, (), {}) for name in NAMES})
    base.KVPoll = SimpleNamespace(Failed=0, WaitingForInput=1, Transferring=2, Success=3)  # type: ignore[attr-defined]
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = None  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (base, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(OURS[-1]).FerrySender
    for name in OURS:
        sys.modules.pop(name, None)


class Offers:
    """Stands for the rank's agent: what it is told, and what was in the last page at that time."""

    def __init__(self, device: PretendedDevice | RealDevice) -> None:
        self._device = device
        self.said: list[tuple[tuple[int, ...], int, set[float]]] = []

    def promise(self, room: int, prompt: object) -> Any:
        return SimpleNamespace(ended="")

    def grow(self, room: int, tables: BlockTables, num_tokens: int, first: FirstToken | None = None) -> None:
        (pages,) = tables
        self.said.append((pages, num_tokens, set(self._device.page(pages[-1]).flatten().tolist())))


@pytest.fixture
def offers(device: PretendedDevice | RealDevice) -> Offers:
    return Offers(device)


@pytest.fixture
def sender(sender_class: Any, device: PretendedDevice | RealDevice, offers: Offers) -> Any:
    rows = SimpleNamespace(output_ids=torch.full((1, 16), FIRST.token_id))
    milestone = CacheDevice(device.device, device.device.type, device.device.type).milestone
    alone = SimpleNamespace(data_parallel_size=1, number=0)
    manager = SimpleNamespace(rank=offers, metadata=rows, milestone=milestone, tables=PlainTables(), ranks=alone)
    manager.wait_while_idle = lambda sender: False
    asked = {"multimodal_inputs": None, "input_embeds": None, "return_sampling_mask": False, "return_logprob": False}
    request = SimpleNamespace(origin_input_ids=PROMPT, extra_key=None, cache_salt=None, **asked)
    made = note_request(lambda queue, request: sender_class(manager, "127.0.0.1:1", 7), None, request)
    made.init(3, 0)
    return made


def test_pages_are_offered_when_the_forward_that_writes_them_has_run(device, sender, offers):
    device.write_late(2, 7)
    sender.send([1, 3, 2], [], len(PROMPT))
    sender.poll()
    assert offers.said == []
    device.finish()
    sender.poll()
    assert offers.said == [((1, 3, 2), len(PROMPT), {7.0})]


def test_chunks_are_offered_in_order_each_when_its_own_forward_has_run(device, sender, offers):
    device.write_late(1, 5)
    sender.send([1], None, PAGE_SIZE)
    device.write_late(2, 7)
    sender.send([3, 2], [], len(PROMPT) - PAGE_SIZE)
    sender.poll()
    assert offers.said == []
    device.finish()
    sender.poll()
    assert offers.said == [((1,), PAGE_SIZE, {5.0}), ((1, 3, 2), len(PROMPT), {7.0})]


def test_a_cached_prefix_waits_for_the_event_of_the_step_that_writes_it(device, sender, offers):
    device.write_late(1, 5)
    sender._early_send_wait_event = device.recorded()
    sender.send([1], None, PAGE_SIZE)
    assert offers.said == []
    device.finish()
    sender.poll()
    assert offers.said == [((1,), PAGE_SIZE, {5.0})]
    # What comes later waits for its own step.
    device.write_late(2, 7)
    sender.send([3, 2], [], len(PROMPT) - PAGE_SIZE)
    assert len(offers.said) == 1
    device.finish()
    sender.poll()
    assert offers.said[1:] == [((1, 3, 2), len(PROMPT), {7.0})]
