"""Copies beside an engine's stream: in which order things are queued, and on devices that are here, that it is so."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain, tile_of
from kvferry.staging.device.mover import DeviceMover
from kvferry.staging.mover import Moved
from kvferry.transport.registered_memory import Regions

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


class RecordedModule:
    """What torch.cuda and torch.xpu have in common: remembers what is queued on which stream."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.current = "engine"
        self.is_done = False
        self.selected = "first"
        module = self

        class Stream:
            def __init__(self) -> None:
                self.made_on = module.selected

            def query(self) -> bool:
                return module.is_done

        class Event:
            def record(self, stream) -> None:
                module.calls.append(("record", stream, self))

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
    from kvferry.staging.device import side_stream

    module = RecordedModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(
        side_stream, "copy_tile", lambda columns, launch: module.calls.append(("copy", module.current, len(columns)))
    )
    return module, side_stream


def tile_at(start, num_rows=1):
    """Rows of 16 bytes that lie back to back."""
    offset = np.arange(num_rows, dtype=np.uint64) * np.uint64(16)
    return tile_of(
        Copies(offset + np.uint64(start), offset + np.uint64(2 * start), np.full(num_rows, 16, np.uint64), 1)
    )


def test_nobody_waits_for_the_side_and_the_side_for_nobody(recorded):
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"))
    is_done = side.launch([tile_at(64)])
    (_, own, _), (_, _, done) = module.calls
    assert own is not module.current
    assert module.calls == [("copy", own, 6), ("record", own, done)]
    assert not is_done()
    module.is_done = True
    assert is_done()
    side.finish()


def test_copies_that_do_not_end_are_waited_for_in_vain_but_not_for_ever(recorded, monkeypatch):
    """As on a device whose engine hangs in a collective."""
    _, side_stream = recorded
    monkeypatch.setattr(side_stream, "FINISH_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not ended within 0\.01 s"):
        side_stream.SideStream(torch.device("cpu")).finish()


def test_another_device_than_the_threads_is_selected_before_its_streams_are(recorded, monkeypatch):
    """Torch would select the thread's own with the stream that was before, and so take memory of it."""
    module, side_stream = recorded
    where, selected = torch.device("meta", 3), []
    made_on = []
    monkeypatch.setattr(module, "Stream", lambda: made_on.append(module.selected))
    monkeypatch.setattr(side_stream, "_pinned", lambda columns, device: columns)
    stream = module.stream
    monkeypatch.setattr(module, "stream", lambda one: selected.append(module.selected) or stream(one))
    side_stream.SideStream(where).launch([tile_at(64)])
    assert made_on == selected == [where]
    assert module.selected == "first"


def test_all_tiles_of_a_copy_are_done_together(recorded):
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"))
    is_done = side.launch([tile_at(64, 2), tile_at(256, 3)])
    assert [step[0] for step in module.calls] == ["copy", "copy", "record"]
    # Each begins at a multiple of 16 bytes.
    assert [step[2] for step in module.calls[:2]] == [8, 12]
    assert not is_done()
    module.is_done = True
    assert is_done()


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), AssertionError("no kernel"), KeyError("no kernel")])
def test_a_copy_whose_later_tile_cannot_be_launched_ends_when_the_others_have(recorded, monkeypatch, error):
    """Whatever compilers raise; and nobody waits for the tiles that run."""
    module, side_stream = recorded
    side = side_stream.SideStream(torch.device("cpu"))
    copy_tile = side_stream.copy_tile

    def fail_at_last(columns, launch):
        if launch.num_shifts == 3:
            raise error
        copy_tile(columns, launch)

    monkeypatch.setattr(side_stream, "copy_tile", fail_at_last)
    is_done = side.launch([tile_at(64), tile_at(256, 3)])
    assert [step[0] for step in module.calls] == ["copy", "record"]
    assert not is_done()
    module.is_done = True
    with pytest.raises(type(error), match="no kernel"):
        is_done()


def test_a_mover_on_a_device(device, side_streams):
    """Head by head out of a cache into a dense arena."""
    where = torch.device(device.name)
    cache = torch.zeros(4, 64, 256, dtype=torch.uint8, device=where)
    arena = torch.zeros(64, 4, 256, dtype=torch.uint8, device=where)
    memories = [(each.data_ptr(), each.numel()) for each in (cache, arena)]
    side = side_streams.SideStream(where)
    mover = DeviceMover(side, Regions.of(memories))
    numbers = np.arange(256, dtype=np.uint64)
    rows = (
        numbers * np.uint64(256),
        numbers % np.uint64(64) * np.uint64(1024) + numbers // np.uint64(64) * np.uint64(256),
    )
    source, target = rows[0] + np.uint64(cache.data_ptr()), rows[1] + np.uint64(arena.data_ptr())
    cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8).to(where))
    if device.name != "cpu":
        torch.get_device_module(where).synchronize()
    mover.start("gather", plain(Copies(source, target, np.full(256, 256, np.uint64), 256)))
    ended: list[Moved] = []
    while mover.busy:
        ended += mover.poll()
    assert ended == [Moved("gather", "")]
    assert torch.equal(arena, cache.permute(1, 0, 2))
    if device.name != "cpu":
        mover.close()
