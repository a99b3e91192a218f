"""Every mover keeps its contract: on a thread, on a device, and to memory that nobody can reach."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from host_devices import FAR_ADDRESS, FarDevice, far_mover
from reference_copy import Bytes, copy

from kvferry.errors import IllegalEventError, TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import Tile, plain, rows_of
from kvferry.staging import host_mover, thread_mover
from kvferry.staging.device.launches import MAX_ROW_BYTES
from kvferry.staging.device.mover import DeviceMover
from kvferry.staging.host_mover import HostMover, host_regions
from kvferry.staging.mover import CLOSED, Moved, Mover
from kvferry.staging.thread_mover import GIVEN_UP, ThreadMover
from kvferry.transport.base import Memory

SIZE = 4 * MAX_ROW_BYTES
DEADLINE_S = 30.0


def memory_of(array: np.ndarray) -> Memory:
    return Memory(array.ctypes.data, array.nbytes, -1)


class ManualLauncher:
    """A device that copies when it is told to, by the kernels' specification. `fails` is how it then fails."""

    def __init__(self, memories: list[np.ndarray]) -> None:
        self._bytes = [Bytes(each.ctypes.data, torch.from_numpy(each)) for each in memories]
        self.is_held = False
        self.fails = ""
        self._waiting: list[tuple[Sequence[Tile], list[bool]]] = []

    def launch(self, tiles: Sequence[Tile]) -> Callable[[], bool]:
        assert tiles, "devices refuse to launch nothing"
        assert all(tiles), "devices refuse to launch nothing"
        done: list[bool] = []
        self._waiting.append((tiles, done))

        def is_done() -> bool:
            if self.fails:
                raise RuntimeError(self.fails)
            if not self.is_held:
                self.finish()
            return bool(done)

        return is_done

    def finish(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        for tiles, done in self._waiting:
            for tile in tiles:
                copy(tile.copies(), self._bytes, self._bytes)
            done.append(True)
        self._waiting.clear()


class Case:
    """A mover between `cache` (at `address`) and `arena`."""

    def __init__(self, kind: str) -> None:
        dice = np.random.default_rng(7)
        self.cache = dice.integers(0, 256, SIZE, dtype=np.uint8)
        self.arena = np.zeros(SIZE, np.uint8)
        self.address = self.cache.ctypes.data
        self.rung = threading.Event()
        self.mover = self._make(kind)

    def _make(self, kind: str) -> Mover:
        if kind == "far":
            device = FarDevice(SIZE)
            device.contents[:] = self.cache
            self.cache, self.address = device.contents, device.memory.address
            return far_mover(device, [memory_of(self.arena)], self.rung.set)
        pieces = host_regions([memory_of(self.cache), memory_of(self.arena)])
        if kind == "host":
            return HostMover(pieces, self.rung.set)
        self.rung.set()
        return DeviceMover(ManualLauncher([self.cache, self.arena]), pieces)

    def gather(self, rows: list[tuple[int, int, int]]) -> tuple[Tile, ...]:
        """Rows (offset in the cache, offset in the arena, length)."""
        source, target, length = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
        base = np.uint64(self.address), np.uint64(self.arena.ctypes.data)
        return plain(Copies(source + base[0], target + base[1], length, len(rows)))

    def scatter(self, rows: list[tuple[int, int, int]]) -> tuple[Tile, ...]:
        """The same rows backwards."""
        there = rows_of(self.gather(rows))
        return plain(Copies(there.target, there.source, there.length, there.pieces))

    def ends(self) -> list[Moved]:
        """Everything that ends until nothing is open any more."""
        ended: list[Moved] = []
        while self.mover.busy:
            assert self.rung.wait(DEADLINE_S)
            if self.mover.__class__ is HostMover:
                self.rung.clear()
            ended += self.mover.poll()
        return ended


@pytest.fixture(params=["host", "far", "device"])
def case(request) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.mover.close()


ROWS = [(5000, 0, 256), (0, 256, 3), (9000, 300, MAX_ROW_BYTES + 77), (70, 259, 1)]


@pytest.mark.parametrize("kind", ["host", "far"])
def test_memory_of_another_process_can_be_lent_for_one_copy(kind):
    case, theirs = Case(kind), np.zeros(1000, np.uint8)
    (there,) = plain(
        Copies(*(np.array([value], np.uint64) for value in (case.address + 70, theirs.ctypes.data, 300)), 1)
    )
    assert case.mover.reaches_peer_memory
    case.mover.start("lent", [there], theirs[:300])
    assert case.ends() == [Moved("lent", "")]
    assert (theirs[:300] == case.cache[70:370]).all()
    case.mover.start("not lent", [there])
    case.mover.start("too little lent", [there], theirs[:299])
    assert all("is outside" in moved.error for moved in case.ends())
    assert not theirs[300:].any()
    case.mover.close()


@pytest.mark.parametrize("kind", ["host", "far"])
def test_what_was_lent_is_let_go_of_when_its_copy_has_ended(kind):
    case, theirs = Case(kind), np.zeros(1000, np.uint8)
    lent = weakref.ref(theirs)
    (there,) = plain(
        Copies(*(np.array([value], np.uint64) for value in (case.address + 70, theirs.ctypes.data, 300)), 1)
    )
    case.mover.start("lent", [there], theirs)
    del theirs
    assert case.ends() == [Moved("lent", "")]
    assert lent() is None
    case.mover.close()


def test_memory_of_another_process_is_not_lent_to_a_device(case):
    """Nobody has pinned it for that."""
    assert case.mover.reaches_peer_memory is (not isinstance(case.mover, DeviceMover))


def test_what_is_gathered_can_be_scattered_again(case):
    before = case.cache.copy()
    case.mover.start("gather", case.gather(ROWS))
    assert case.ends() == [Moved("gather", "")]
    for start, goal, length in ROWS:
        assert np.array_equal(case.arena[goal : goal + length], before[start : start + length])
        case.cache[start : start + length] = 0
    case.mover.start("scatter", case.scatter(ROWS))
    assert case.ends() == [Moved("scatter", "")]
    assert np.array_equal(case.cache, before)


def test_each_key_ends_once_and_may_be_used_again(case):
    for _ in range(2):
        for number in range(20):
            case.mover.start(number, case.gather([(number, 100 * number, 100)]))
        assert sorted(case.ends()) == [Moved(number, "") for number in range(20)]
        assert case.mover.poll() == []
        assert not case.mover.busy


def test_nothing_to_copy_ends_too(case):
    case.mover.start("nothing", ())
    assert case.mover.busy
    assert case.ends() == [Moved("nothing", "")]
    case.mover.start("empty", case.gather([(3, 5, 0)]))
    assert case.ends() == [Moved("empty", "")]


def test_a_key_in_use_is_refused(case):
    case.mover.start("key", ())
    with pytest.raises(IllegalEventError, match="twice"):
        case.mover.start("key", ())
    assert case.ends() == [Moved("key", "")]


@pytest.mark.parametrize("rows", [[(0, 0, 8), (SIZE - 4, 8, 5)], [(0, SIZE, 1)], [(0, 0, SIZE + 1)], [(-1, 0, 1)]])
def test_rows_that_leave_the_memories_end_with_a_reason_and_copy_nothing(case, rows):
    signed = np.array(rows, np.int64).astype(np.uint64)
    copies = case.gather(signed.tolist())
    case.mover.start("wild", copies)
    case.mover.start("good", case.gather([(16, 16, 16)]))
    ends = dict(case.ends())
    assert ends["good"] == ""
    assert "is outside the registered memory of this process" in ends["wild"]
    assert not case.arena[:16].any()


def test_a_copy_that_waits_for_ever_is_given_up_and_ends_once(monkeypatch):
    monkeypatch.setattr(thread_mover, "CLOSE_S", 0.1)
    begun, goes_on, notified = threading.Event(), threading.Event(), threading.Event()

    def hangs(*_):
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        yield

    mover = ThreadMover(hangs, notified.set)
    mover.start("stuck", ())
    assert begun.wait(DEADLINE_S)
    mover.start("behind it", ())
    mover.close()
    assert mover.poll() == [Moved("behind it", CLOSED), Moved("stuck", GIVEN_UP)]
    # A second call gives it no more time, or this would end only with the copy.
    monkeypatch.setattr(thread_mover, "CLOSE_S", threading.TIMEOUT_MAX)
    mover.close()
    assert any(thread.is_alive() for thread in mover._threads)
    assert mover.poll() == []
    goes_on.set()
    for thread in mover._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert (mover.poll(), mover.busy, notified.is_set()) == ([], False, False)


def test_after_close_everything_has_ended(case):
    case.mover.start("before", case.gather([(0, 0, 64)]))
    case.mover.close()
    case.mover.start("after", case.gather([(0, 64, 64)]))
    ended = case.mover.poll()
    assert sorted(key for key, _ in ended) == ["after", "before"]
    assert dict(ended)["after"] == CLOSED
    assert not case.mover.busy
    assert not case.arena[64:].any()
    case.mover.close()


def test_a_copy_that_is_closed_in_the_middle_stops_at_its_next_step(monkeypatch):
    case, begun, may_go = Case("host"), threading.Event(), threading.Event()

    def steps(*_columns):
        begun.set()
        assert may_go.wait(DEADLINE_S)
        yield
        raise AssertionError("it went on")

    monkeypatch.setattr(host_mover, "copy_tiles", steps)
    case.mover.start("long", case.gather([(0, 0, 64)]))
    case.mover.start("next", case.gather([(0, 0, 64)]))
    assert begun.wait(DEADLINE_S)
    closer = threading.Thread(target=case.mover.close)
    closer.start()
    ended: list[Moved] = []
    while not case.mover._is_closed:
        ended += case.mover.poll()
    may_go.set()
    closer.join(DEADLINE_S)
    assert [*ended, *case.mover.poll()] == [Moved("next", CLOSED), Moved("long", CLOSED)]


def test_a_defect_in_a_copy_ends_that_copy_alone(monkeypatch):
    case = Case("host")
    with monkeypatch.context() as patch:
        patch.setattr(host_mover, "copy_tiles", lambda *_: 1 // 0)
        case.mover.start("bad", case.gather([(0, 0, 64)]))
        assert case.ends() == [Moved("bad", "the copy failed: ZeroDivisionError: integer division or modulo by zero")]
    case.mover.start("good", case.gather([(0, 0, 64)]))
    assert case.ends() == [Moved("good", "")]
    case.mover.close()


def test_memories_that_overlap_are_refused():
    array = np.zeros(100, np.uint8)
    with pytest.raises(TransportError, match="overlap"):
        host_regions([memory_of(array), memory_of(array[50:])])


def test_a_device_ends_copies_when_it_is_done_and_not_before():
    case = Case("device")
    launcher = case.mover._launcher
    launcher.is_held = True
    case.mover.start("slow", case.gather([(0, 0, 64)]))
    assert case.mover.poll() == []
    assert case.mover.busy
    launcher.is_held = False
    assert case.mover.poll() == [Moved("slow", "")]


@pytest.mark.parametrize("when", ["poll", "close"])
def test_a_device_that_fails_ends_its_copies(when):
    case = Case("device")
    case.mover.start("one", case.gather([(0, 0, 64)]))
    case.mover._launcher.fails = "an illegal memory access"
    if when == "close":
        case.mover.close()
    assert case.mover.poll() == [Moved("one", "the device failed: an illegal memory access")]
    assert not case.mover.busy


@pytest.mark.parametrize("when", ["launch", "poll"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("out of memory"), "out of memory"),
        (FileNotFoundError("no compiler"), "FileNotFoundError('no compiler')"),
        (AssertionError("libcuda.so cannot found!"), "AssertionError('libcuda.so cannot found!')"),
        (KeyError("sm_42"), "KeyError('sm_42')"),
    ],
)
def test_a_launch_that_fails_in_whatever_way_ends_its_copy_alone(monkeypatch, when, error, words):
    """Compilers and drivers raise many things: none may end the agent's thread."""
    case = Case("device")

    def fail(*_tiles):
        raise error

    monkeypatch.setattr(case.mover._launcher, "launch", fail if when == "launch" else lambda _tiles: fail)
    case.mover.start("one", case.gather([(0, 0, 64)]))
    assert case.mover.poll() == [Moved("one", f"the device failed: {words}")]


def test_far_memory_cannot_be_touched_by_a_program():
    code = f"import ctypes; ctypes.string_at({FAR_ADDRESS}, 1)"
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=DEADLINE_S)
    assert ended.returncode == -signal.SIGSEGV
