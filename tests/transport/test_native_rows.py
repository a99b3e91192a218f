"""The loops of machine code copy what numpy copies, refuse what would leave memory, and are never waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.plan.programs.tiles import Tile
from kvferry.transport.registered_memory import LocatedRows, Regions
from kvferry.transport.rowcopy import with_numpy
from kvferry.transport.rowcopy.copier import (
    BackgroundCompilation,
    Copier,
    compile_in_background,
    current,
    wait_until_compiled,
)
from kvferry.transport.rowcopy.gather_scatter import copy_tiles

native_rows = pytest.importorskip("kvferry.transport.rowcopy.with_numba", reason="numba is not installed")
ROWS = native_rows.compile_rows(on_disk=False)
LARGE = native_rows.IN_CACHE_BYTES + 1
SMALL = 20_000
LENGTHS = st.one_of(st.integers(0, 70), st.sampled_from([64, 128, 192, 256, 4096]), st.integers(0, 5000))


@st.composite
def rows(draw: st.DrawFn) -> tuple[LocatedRows, LocatedRows, np.ndarray]:
    """Rows between three source and two target views at any alignment; targets of a size for either way to write."""
    lengths = np.array(draw(st.lists(LENGTHS, max_size=60)), np.int64)
    dice = np.random.default_rng(draw(st.integers(0, 1000)))
    skip = draw(st.sampled_from([0, 16, 63]))
    sources = tuple(dice.integers(0, 256, SMALL, dtype=np.uint8)[draw(st.integers(0, 64)) :] for _ in range(3))
    start = np.cumsum(lengths + dice.integers(0, 2, len(lengths)) * skip) - lengths
    size = draw(st.sampled_from([0, LARGE])) + int(lengths.sum() + skip * len(lengths)) + 1
    targets = tuple(np.full(size + 64, 0xEE, np.uint8)[draw(st.integers(0, 64)) :] for _ in range(2))
    order = dice.permutation(len(lengths))
    length = lengths[order]
    offset = (dice.random(len(length)) * (SMALL - 64 - length)).astype(np.int64)
    pieces = dice.integers(0, 3, len(length)), dice.integers(0, 2, len(length))
    starts = draw(st.sampled_from([(), (3, 10**12, 1 << 40)]))
    source = LocatedRows(sources, pieces[0], offset + np.array(starts or (0, 0, 0))[pieces[0]], starts)
    return source, LocatedRows(targets, pieces[1], start[order]), length


def copied(copy, source: LocatedRows, target: LocatedRows, length: np.ndarray) -> tuple[list[np.ndarray], int]:
    """What lies in copies of the target's views afterwards, and the bytes that were reported."""
    # Aligned as they were: an array of numpy's own begins wherever it likes.
    views = []
    for view in target.views:
        room = np.full(view.size + 128, 0xEE, np.uint8)
        first = (address(view) - address(room)) % 64
        views.append(room[first : first + view.size])
    num_bytes = sum(copy(source, LocatedRows(tuple(views), target.view_index, target.offset), length))
    return views, num_bytes


def address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


@settings(max_examples=150, deadline=None)
@given(rows())
def test_machine_code_and_numpy_leave_the_same_bytes(drawn: tuple[LocatedRows, LocatedRows, np.ndarray]) -> None:
    found, num_bytes = copied(ROWS.copy, *drawn)
    wanted, _ = copied(with_numpy.copy, *drawn)
    assert all(map(np.array_equal, found, wanted))
    assert num_bytes == int(drawn[2].sum())


def side(view: np.ndarray, *offsets: int) -> LocatedRows:
    return LocatedRows((view,), np.zeros(len(offsets), np.int64), np.array(offsets, np.int64))


def test_a_long_row_gives_control_back_and_short_ones_take_few_steps() -> None:
    source = np.arange(3 * native_rows.STEP_BYTES + 10, dtype=np.uint8)
    target = np.zeros_like(source)
    steps = list(ROWS.copy(side(source, 0, 7, 7), side(target, 0, 7, 7), np.array([7, source.size - 7, 0])))
    assert sum(steps) == source.size
    assert max(steps) < 2 * native_rows.STEP_BYTES
    assert len(steps) >= 3
    assert np.array_equal(source, target)
    many = np.arange(1000) * 16
    assert len(list(ROWS.copy(side(source, *many), side(target, *many), np.full(1000, 16)))) == 1


def test_more_rows_than_are_addressed_at_once() -> None:
    num_rows = 2 * native_rows.PART_ROWS + 5
    source = np.random.default_rng(3).integers(0, 256, (num_rows, 8), dtype=np.uint8)
    target = np.zeros(num_rows * 4, np.uint8)
    offsets = np.arange(num_rows)
    assert sum(ROWS.copy(side(source.ravel(), *(offsets * 8)), side(target, *(offsets * 4)), np.full(num_rows, 4))) > 0
    assert np.array_equal(target.reshape(-1, 4), source[:, :4])


@pytest.mark.parametrize("length", [64, 256, 4096])
@pytest.mark.parametrize("skip", [0, 1])
def test_rows_of_whole_lines(length: int, skip: int) -> None:
    """Into a target that is too large for the cache: lines alone, and none of them is left out or written twice."""
    num_rows = LARGE // length
    source = np.random.default_rng(4).integers(0, 256, num_rows * length + skip, dtype=np.uint8)
    target = aligned(2 * num_rows * length)
    near, far = np.arange(num_rows) * 2 * length, np.arange(num_rows) * length + skip
    lengths = np.full(num_rows, length)
    assert sum(ROWS.copy(side(source, *far), side(target, *near), lengths)) == num_rows * length
    found = target.reshape(num_rows, 2, length)
    assert np.array_equal(found[:, 0].ravel(), source[skip:])
    assert (found[:, 1] == 0xEE).all()


def aligned(num_bytes: int) -> np.ndarray:
    """Where a line of the processor's cache begins."""
    room = np.full(num_bytes + 64, 0xEE, np.uint8)
    first = -address(room) % 64
    return room[first : first + num_bytes]


@pytest.mark.parametrize("num_rows", [0, 3])
def test_rows_of_nothing(num_rows: int) -> None:
    view, zeros = np.zeros(4, np.uint8), np.zeros(num_rows, np.int64)
    assert sum(ROWS.copy(LocatedRows((view,), zeros, zeros + 4), LocatedRows((view,), zeros, zeros), zeros)) == 0


@pytest.mark.parametrize(
    ("piece", "offset", "length"),
    [(0, 95, 6), (0, -1, 2), (0, 0, 101), (0, 0, -1), (2, 0, 1), (-1, 0, 1), (0, 1 << 62, 1)],
)
@pytest.mark.parametrize("starts", [(), (7, 5000)])
@pytest.mark.parametrize("is_target", [True, False])
def test_a_row_outside_its_view_is_refused(
    piece: int, offset: int, length: int, starts: tuple[int, ...], is_target: bool
) -> None:
    """Whoever calls has checked it; but machine code would write anywhere."""
    views = (np.zeros(100, np.uint8), np.zeros(100, np.uint8))
    first = starts[0] if starts else 0
    bad = LocatedRows(views, np.array([0, piece]), np.array([first, first + offset]), starts)
    good = LocatedRows((np.zeros(1000, np.uint8),), np.zeros(2, np.int64), np.array([0, 0]))
    with pytest.raises((TransportError, ValueError, IndexError)):
        sum(ROWS.copy(*((good, bad) if is_target else (bad, good)), np.array([1, length])))
    assert not views[0].any()


@st.composite
def tiles(draw: st.DrawFn) -> tuple[Tile, np.ndarray, np.ndarray]:
    """Out of a target that is filled with one number, back to back in some order and at any alignment."""
    dice = np.random.default_rng(draw(st.integers(0, 1000)))
    num_starts, length = draw(st.integers(0, 6)), np.array(draw(st.lists(LENGTHS, max_size=8)), np.uint64)
    source = dice.integers(0, 256, SMALL, dtype=np.uint8)
    room = int(length.sum()) + draw(st.integers(0, 70))
    target = np.full(num_starts * room + 100, 0xEE, np.uint8)
    shift = np.cumsum(length) - length
    start = dice.permutation(num_starts).astype(np.uint64) * np.uint64(room) + np.uint64(draw(st.integers(0, 99)))
    from_start, from_shift = dice.integers(0, SMALL // 2, num_starts), dice.integers(0, SMALL // 2 - 5000, len(length))
    # Most of a sum may be in either part, and shifts may be backwards.
    lift = np.uint64(draw(st.sampled_from([0, 1 << 40])))
    columns = from_start.astype(np.uint64) + lift, start - lift, from_shift.astype(np.uint64) - lift, shift + lift
    return Tile(*columns, length).shifted(address(source), address(target)), source, target


def memory(*views: np.ndarray) -> Regions:
    return Regions.of([(address(view), view.size) for view in views], views)


@settings(max_examples=150, deadline=None)
@given(tiles(), st.sampled_from(["numba", "numpy"]))
def test_a_tile_leaves_what_its_rows_leave(drawn: tuple[Tile, np.ndarray, np.ndarray], name: str) -> None:
    tile, source, target = drawn
    wanted, rows = target.copy(), tile.copies()
    for start, goal, length in zip(rows.source, rows.target, rows.length, strict=True):
        begins = int(start) - address(source), int(goal) - address(target)
        wanted[begins[1] : begins[1] + int(length)] = source[begins[0] : begins[0] + int(length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.transport.rowcopy.gather_scatter.current", lambda: COPIERS[name])
        for _ in copy_tiles(memory(source, target), [tile]):
            pass
    assert np.array_equal(target, wanted)


COPIERS = {
    "numba": Copier("numba", "", ROWS.copy, ROWS.copy_tile),
    "numpy": Copier("numpy", "", with_numpy.copy),
}


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("kvferry.transport.rowcopy.gather_scatter.current", lambda: COPIERS[request.param])
    return request.param


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(("width", "length"), [(1, 3 << 20), (3, 3 << 20), (5, 1_000_003), (2, 9 << 20)])
def test_a_tile_gives_control_back_and_goes_on_where_it_was(width: int, length: int) -> None:
    """In the middle of a start as well; and rows that are longer than a step are cut."""
    num_starts = 4
    source = np.random.default_rng(9).integers(0, 256, (num_starts, width, length), dtype=np.uint8)
    target = np.zeros_like(source)
    start = np.arange(num_starts, dtype=np.uint64) * np.uint64(width * length)
    shift = np.arange(width, dtype=np.uint64) * np.uint64(length)
    tile = Tile(start, start[::-1].copy(), shift, shift[::-1].copy(), np.full(width, length, np.uint64))
    steps = list(copy_tiles(memory(source.ravel(), target.ravel()), [tile.shifted(address(source), address(target))]))
    assert len(steps) >= source.size // (2 * native_rows.STEP_BYTES)
    assert np.array_equal(source, target[::-1, ::-1])


@pytest.mark.parametrize("is_target", [True, False])
def test_a_tile_that_leaves_memory_is_refused_and_none_is_copied(copier: str, is_target: bool) -> None:
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
    start, shift = np.array([0, 500], np.uint64), np.array([0, 490], np.uint64)
    good, wild = (
        Tile(start, start, shift, shift, np.array([8, size], np.uint64)).shifted(address(source), address(target))
        for size in (1, 11)
    )
    there = memory(source, target[:995]) if is_target else memory(source[:995], target)
    with pytest.raises(
        TransportError, match=rf"row {3 if copier == 'numba' else 7} is outside the registered memory of this process"
    ):
        list(copy_tiles(there, [good, wild]))
    assert not target.any()


@pytest.mark.usefixtures("copier")
def test_memory_that_is_shown_elsewhere_is_copied_where_it_is() -> None:
    """Addresses of a device that the host cannot use: its pieces are seen in other places."""
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    far = Regions.of([(1 << 55, 100), (1 << 56, 100)], [source, target])
    assert not far.is_in_place
    assert memory(source, target).is_in_place
    zero = np.zeros(1, np.uint64)
    for _ in copy_tiles(far, [Tile(zero, zero, zero, zero, zero + np.uint64(100)).shifted(1 << 55, 1 << 56)]):
        pass
    assert np.array_equal(source, target)


def odd(values: np.ndarray) -> np.ndarray:
    """Read-only and at an odd address, as columns out of a frame are."""
    found = np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1)
    assert not (found.flags.aligned and found.flags.writeable)
    return found


@pytest.mark.parametrize("num_rows", [1, 10])
def test_columns_of_another_kind(num_rows: int) -> None:
    """Of another type, with gaps, read-only, at odd addresses: nothing is translated again, and nothing is refused."""
    source, target = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8)
    offsets = np.arange(0, 2 * num_rows, dtype=np.int64)[::2]
    zeros = np.broadcast_to(np.int64(0), (num_rows,))
    one, other = LocatedRows((source,), zeros, odd(offsets)), LocatedRows((target,), odd(zeros), offsets)
    for length in (np.full(num_rows, 2, np.int32), odd(np.full(num_rows, 2))):
        target.fill(0)
        sum(ROWS.copy(one, other, length))
        assert target[: 2 * num_rows].tolist() == list(range(2 * num_rows))
    assert len(ROWS.advance.signatures) == len(ROWS.resolve.signatures) == len(ROWS.advance_tile.signatures) == 1


def test_prepared_once_and_for_all() -> None:
    compile_in_background()
    assert wait_until_compiled(60)
    assert (current().name, current().reason) == ("numba", "")
    compile_in_background()
    assert current().name == "numba"


def test_numpy_copies_until_then_and_nobody_waits() -> None:
    go, asked = threading.Event(), []

    def make(on_disk: bool) -> Copier:
        asked.append(on_disk)
        go.wait(60)
        return Copier("numba", "", ROWS.copy)

    preparation = BackgroundCompilation(make)
    preparation.start()
    preparation.start()
    assert preparation.copier.name == "numpy"
    go.set()
    assert preparation.wait(60)
    assert preparation.copier.name == "numba"
    assert asked == [True]


def test_a_cache_that_cannot_be_used_is_done_without() -> None:
    asked = []

    def make(on_disk: bool) -> Copier:
        asked.append(on_disk)
        if on_disk:
            raise RuntimeError("cannot cache function: no locator available")
        return Copier("numba", "", ROWS.copy)

    preparation = BackgroundCompilation(make)
    preparation.start()
    assert preparation.wait(60)
    assert (preparation.copier.name, asked) == ("numba", [True, False])


def test_without_numba_numpy_stays_and_says_why() -> None:
    def make(on_disk: bool) -> Copier:
        raise ModuleNotFoundError("No module named 'numba'")

    preparation = BackgroundCompilation(make)
    preparation.start()
    assert preparation.wait(60)
    assert preparation.copier.name == "numpy"
    assert "No module named 'numba'" in preparation.copier.reason
    assert preparation.copier.copy is with_numpy.copy
