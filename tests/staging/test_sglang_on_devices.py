"""Pages that an SGLang prefill has handed over are offered once the device has written them, and no sooner. Pages that
an SGLang decode has reserved are fetched into once the device writes there no more.

Both run without SGLang: names stand for its base classes. Without a device, a test's own events stand for one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from plain_tables import PlainTables

from kvferry import FirstToken, Prompt, RemoteEngine, TokenRange
from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang.construction import note_request
from kvferry.connectors.sglang.prefill_engines import Lookup
from kvferry.connectors.sglang.rank import Fetching
from kvferry.devices import CacheDevice
from kvferry.errors import ConfigurationError

PAGE_SIZE, ROW_BYTES, PROMPT = 16, 256, list(range(40))
FIRST = FirstToken(17)
# Steps of a stream that take a second and more, where what a test does meanwhile takes microseconds.
CYCLES, PRODUCTS, SIDE = 3_000_000_000, 200, 8192
OURS = [f"kvferry.connectors.sglang.{name}" for name in ("manager", "sender", "receiver")]
NAMES = ("BaseKVSender", "BaseKVReceiver", "BaseKVManager", "BaseKVBootstrapServer", "KVTransferMetric")


class PretendedDevice:
    """Events of streams that a test lets run."""

    current_stream, forward_stream = "the current one", "the forward's"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self._events = torch.device("cuda:0"), list[Any]()
        self._pages = torch.zeros(4, PAGE_SIZE, ROW_BYTES)
        self._waiting = list[tuple[int, int]]()
        module = SimpleNamespace(Event=self.event, current_stream=lambda device: self.current_stream)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def event(self) -> Any:
        made = SimpleNamespace(is_done=False, stream=None)
        made.record, made.query = lambda stream: self._record(made, stream), lambda: made.is_done
        return made

    def _record(self, event: Any, stream: str) -> None:
        event.stream = stream
        self._events.append(event)

    def write_late(self, page: int, value: int) -> None:
        self._waiting.append((page, value))

    def write_late_in_forward(self, page: int, value: int) -> None:
        self._waiting.append((page, value))

    def finish_only(self, stream: str) -> None:
        for each in self._events:
            each.is_done = each.is_done or each.stream == stream

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
        self.current_stream, self.forward_stream = (
            self._module.current_stream(self.device),
            self._module.Stream(self.device),
        )
        torch.accelerator.synchronize()

    def write_late_in_forward(self, page: int, value: int) -> None:
        with self._module.stream(self.forward_stream):
            self.write_late(page, value)

    def finish_only(self, stream: Any) -> None:
        stream.synchronize()

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
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our classes, on names in place of SGLang's."""
    base = ModuleType("sglang.srt.disaggregation.base.conn")
    vars(base).update({name: type(name, (), {}) for name in NAMES})
    base.KVPoll = SimpleNamespace(  # type: ignore[attr-defined]
        Failed=0, Bootstrapping=1, WaitingForInput=2, Transferring=3, Success=4
    )
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = None  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (base, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    manager, sender, receiver = map(importlib.import_module, OURS)
    yield SimpleNamespace(
        manager=manager.FerryManager, sender=sender.FerrySender, receiver=receiver.FerryReceiver, poll=base.KVPoll
    )
    for name in OURS:
        sys.modules.pop(name, None)


class Offers:
    """Stands for the rank's agent: what it is told, and what was in the last page at that time."""

    def __init__(self, device: PretendedDevice | RealDevice) -> None:
        self._device, self.engines = device, self
        self.said: list[tuple[tuple[int, ...], int, set[float]]] = []

    def promise(self, room: int, prompt: object) -> Any:
        return SimpleNamespace(ended="")

    def grow(self, room: int, tables: BlockTables, num_tokens: int, first: FirstToken | None = None) -> None:
        self._note(tables, num_tokens)

    def find(self, place: str, number: int) -> Lookup:
        return Lookup(RemoteEngine("p0", "epoch-1", ("tcp://127.0.0.1:1",)))

    def tell(self, lookup: Lookup, told: Callable[[RemoteEngine], None]) -> None:
        """Nothing is kept alive here."""

    def fetch(
        self, room: int, engine: RemoteEngine, tables: BlockTables, tokens: TokenRange, prompt: Prompt
    ) -> Fetching:
        self._note(tables, len(tokens))
        return Fetching("q0")

    def _note(self, tables: BlockTables, num_tokens: int) -> None:
        (pages,) = tables
        self.said.append((pages, num_tokens, set(self._device.page(pages[-1]).flatten().tolist())))


@pytest.fixture
def offers(device: PretendedDevice | RealDevice) -> Offers:
    return Offers(device)


@pytest.fixture
def manager(connector: Any, device: PretendedDevice | RealDevice, offers: Offers) -> Any:
    made = object.__new__(connector.manager)
    made.rank, made.metadata = offers, SimpleNamespace(output_ids=torch.full((1, 16), FIRST.token_id))
    made.milestone = CacheDevice(device.device, device.device.type, device.device.type).milestone
    made.ranks, made.tables = SimpleNamespace(data_parallel_size=1, number=0), PlainTables()
    made.kv_args, made._receivers, made._waiting = SimpleNamespace(page_size=PAGE_SIZE), {}, WeakKeyDictionary()
    made._is_idle = lambda: False
    made._scheduler = SimpleNamespace(enable_overlap=True, forward_stream=device.forward_stream)
    return made


def made_for_a_request(make: Any) -> Any:
    asked = {"multimodal_inputs": None, "input_embeds": None, "return_sampling_mask": False, "return_logprob": False}
    more = {"extra_key": None, "cache_salt": None, "disagg_prefill_dp_rank": None}
    request = SimpleNamespace(origin_input_ids=PROMPT, **asked, **more)
    return note_request(lambda queue, request: make(), None, request)


@pytest.fixture
def sender(connector: Any, manager: Any) -> Any:
    made = made_for_a_request(lambda: connector.sender(manager, "127.0.0.1:1", 7))
    made.init(3, 0)
    return made


@pytest.fixture
def receiver(connector: Any, manager: Any) -> Any:
    made = made_for_a_request(lambda: connector.receiver(manager, "127.0.0.1:1", 7))
    made.init(0)
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


def test_a_chunk_of_a_pipeline_is_offered_when_its_forward_has_run(device, manager, sender, offers):
    """A pipeline computes on a stream of its own, and hands a chunk over when it has begun to compute it."""
    manager._scheduler.enable_overlap = False
    device.write_late_in_forward(2, 7)
    sender.send([1, 3, 2], [], len(PROMPT))
    device.finish_only(device.current_stream)
    sender.poll()
    assert offers.said == []
    device.finish()
    sender.poll()
    assert offers.said == [((1, 3, 2), len(PROMPT), {7.0})]


def test_pages_of_a_step_that_is_done_do_not_wait_for_the_step_after_it(device, sender, offers):
    """A scheduler that overlaps its steps hands pages over when it has the results of the step that wrote them."""
    device.write_late_in_forward(3, 7)
    sender.send([1, 2], [], len(PROMPT))
    device.finish_only(device.current_stream)
    sender.poll()
    assert [said[:2] for said in offers.said] == [((1, 2), len(PROMPT))]
    device.finish()


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


def test_a_fetch_begins_when_the_forward_that_still_writes_to_its_pages_has_run(connector, device, receiver, offers):
    """SGLang gives away the pages of a request that has ended while the next step still writes to one of them."""
    device.write_late_in_forward(2, 7)
    receiver.send_metadata([1, 3, 2], 0, [], 0)
    # The stream on which SGLang schedules has nothing to do with that.
    device.finish_only(device.current_stream)
    assert (receiver.poll(), offers.said) == (connector.poll.Transferring, [])
    device.finish()
    receiver.poll()
    receiver.poll()
    assert offers.said == [((1, 3, 2), len(PROMPT), {7.0})]


def test_a_fetch_begins_when_what_the_scheduler_itself_has_begun_has_run(connector, device, receiver, offers):
    device.write_late(2, 7)
    receiver.send_metadata([1, 3, 2], 0, [], 0)
    device.finish_only(device.forward_stream)
    assert (receiver.poll(), offers.said) == (connector.poll.Transferring, [])
    device.finish()
    receiver.poll()
    assert offers.said == [((1, 3, 2), len(PROMPT), {7.0})]


@pytest.mark.parametrize("end", ["abort", "ensure_abort_notified"])
def test_a_request_that_ends_before_its_pages_are_free_fetches_nothing(connector, device, receiver, offers, end):
    device.write_late_in_forward(2, 7)
    receiver.send_metadata([1, 3, 2], 0, [], 0)
    getattr(receiver, end)()
    device.finish()
    assert (receiver.poll(), receiver.is_over, offers.said) == (connector.poll.Failed, True, [])


def test_nothing_is_fetched_where_sglang_does_not_say_on_which_stream_it_computes(connector, manager, receiver, offers):
    del manager._scheduler.forward_stream
    receiver.send_metadata([1, 3, 2], 0, [], 0)
    assert (receiver.poll(), offers.said) == (connector.poll.Failed, [])
    with pytest.raises(ConfigurationError, match="overlaps its steps and has no forward_stream"):
        receiver.failure_exception()
