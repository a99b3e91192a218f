"""Copies beside an engine's stream: in which order things are queued, and on devices that are here, that it is so."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvferry.plan.copies import Copies
from kvferry.plan.tiles import plain, tile_of
from kvferry.staging.device_mover import DeviceMover
from kvferry.staging.mover import Moved
from kvferry.transport.pieces import Pieces

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture
def side_streams(device, monkeypatch):
    """The module, with kernels that run on the device."""
    from kvferry.staging import side_stream

    monkeypatch.setattr(side_stream, "copy_tile", device.kernels.copy_tile)
    return side_stream


class RecordedModule:
    """What torch.cuda and torch.xpu have in common: remembers what is queued on which stream."""

    def __init__(self) -> None:
        self.story: list[tuple] = []
        self.current = "engine"
        self.is_done = False
        self.selected = "first"
        module = self

        class Stream:
            def __init__(self) -> None:
                self.made_on = module.current

            def wait_event(self, event) -> None:
                module.story.append(("wait", self, event))

            def synchronize(self) -> None:
                module.story.append(("synchronize", self))

        class Event:
            def record(self, stream) -> None:
                module.story.append(("record", stream, self))

            def query(self) -> bool:
                return module.is_done

        self.Stream, self.Event = Stream, Event

    def stream(self, stream):
        return self._with("current", stream)

    def device(self, device):
        return self._with("selected", device)

    @contextmanager
    def _with(self, name, value):
        before = getattr(self, name)
        setattr(self, name, value)
        yield
        setattr(self, name, before)


@pytest.fixture
def recorded(monkeypatch):
    """A module on which nothing runs, and the side streams that are made with it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvferry.staging import side_stream

    module = RecordedModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(
        side_stream, "copy_tile", lambda columns, launch: module.story.append(("copy", module.current, len(columns)))
    )
    return module, side_stream


def tile_at(start, num_rows=1):
    """Rows of 16 bytes that lie back to back."""
    offset = np.arange(num_rows, dtype=np.uint64) * np.uint64(16)
    return tile_of(
        Copies(offset + np.uint64(start), offset + np.uint64(2 * start), np.full(num_rows, 16, np.uint64), 1)
    )


def test_the_side_waits_for_the_engine_and_nobody_for_the_side(recorded):
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"), "engine stream")
    is_done = side.launch([tile_at(64)])
    own = module.story[1][1]
    assert own.made_on == "engine stream"
    ready, done = module.story[0][2], module.story[3][2]
    assert module.story == [
        ("record", "engine stream", ready),
        ("wait", own, ready),
        ("copy", own, 6),
        ("record", own, done),
    ]
    assert ready is not done
    assert not is_done()
    module.is_done = True
    assert is_done()
    side.finish()
    assert module.story[-1] == ("synchronize", own)


def test_another_device_than_the_threads_is_selected_before_its_streams_are(recorded, monkeypatch):
    """Torch would select the thread's own with the stream that was before, and so take memory of it."""
    module, side_stream = recorded
    where, selected = torch.device("meta", 3), []
    monkeypatch.setattr(side_stream.SideStream, "_pinned", lambda self, columns: columns)
    stream = module.stream
    monkeypatch.setattr(module, "stream", lambda one: selected.append(module.selected) or stream(one))
    side_stream.SideStream(where, "engine stream").launch([tile_at(64)])
    assert selected == [where, where]
    assert module.selected == "first"


def test_all_tiles_of_a_copy_are_done_together(recorded):
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"), "engine stream")
    is_done = side.launch([tile_at(64, 2), tile_at(256, 3)])
    assert [step[0] for step in module.story] == ["record", "wait", "copy", "copy", "record"]
    # Each begins at a multiple of 16 bytes.
    assert [step[2] for step in module.story[2:4]] == [8, 12]
    assert not is_done()
    module.is_done = True
    assert is_done()


def test_nothing_goes_on_when_a_later_tile_cannot_be_launched(recorded, monkeypatch):
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"), "engine stream")
    copy_tile = side_stream.copy_tile

    def fail_at_last(columns, launch):
        if launch.num_shifts == 3:
            raise RuntimeError("no kernel for it")
        copy_tile(columns, launch)

    monkeypatch.setattr(side_stream, "copy_tile", fail_at_last)
    with pytest.raises(RuntimeError, match="no kernel"):
        side.launch([tile_at(64), tile_at(256, 3)])
    assert [step[0] for step in module.story] == ["record", "wait", "copy", "synchronize"]


def test_a_mover_on_a_device(device, side_streams):
    """Head by head out of a cache into a dense arena, behind what the engine has just queued."""
    where = torch.device(device.name)
    cache = torch.zeros(4, 64, 256, dtype=torch.uint8, device=where)
    arena = torch.zeros(64, 4, 256, dtype=torch.uint8, device=where)
    memories = [(each.data_ptr(), each.numel()) for each in (cache, arena)]
    side = side_streams.SideStream(where, torch.get_device_module(where).current_stream())
    mover = DeviceMover(side, Pieces.of(memories))
    numbers = np.arange(256, dtype=np.uint64)
    rows = (
        numbers * np.uint64(256),
        numbers % np.uint64(64) * np.uint64(1024) + numbers // np.uint64(64) * np.uint64(256),
    )
    source, target = rows[0] + np.uint64(cache.data_ptr()), rows[1] + np.uint64(arena.data_ptr())
    cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8).to(where))
    mover.start("gather", plain(Copies(source, target, np.full(256, 256, np.uint64), 256)))
    ended: list[Moved] = []
    while mover.busy:
        ended += mover.poll()
    assert ended == [Moved("gather", "")]
    assert torch.equal(arena, cache.permute(1, 0, 2))
    if device.name != "cpu":
        mover.close()
