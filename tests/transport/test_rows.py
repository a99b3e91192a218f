"""Rows are copied like a loop of memmoves would copy them, whatever their sizes and pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.transport import registered_memory
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import LocatedRows, Regions, Registry
from kvferry.transport.rowcopy.gather_scatter import gather, scatter, stream_chunks
from kvferry.transport.rowcopy.with_numpy import BIT_BYTES, LONG_ROW_BYTES, MAX_NUM_LENGTHS
from kvferry.transport.rowcopy.with_numpy import copy as copy_rows

SIZE = 3 * LONG_ROW_BYTES
LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(LONG_ROW_BYTES - 2, LONG_ROW_BYTES + 2))


@st.composite
def sides(draw: st.DrawFn) -> tuple[LocatedRows, LocatedRows, np.ndarray]:
    """Rows between three source and two target pieces; targets follow one another with gaps."""
    lengths = draw(st.lists(LENGTHS, max_size=MAX_NUM_LENGTHS * 2))
    dice = np.random.default_rng(draw(st.integers(0, 1000)))
    source = tuple(dice.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(3))
    gaps = dice.integers(0, 3, len(lengths))
    start = np.cumsum(np.array(lengths, np.int64) + gaps) - np.array(lengths, np.int64)
    size = int(start[-1] + lengths[-1]) if lengths else 1
    target = tuple(np.full(size, 0xEE, np.uint8) for _ in range(2))
    order = dice.permutation(len(lengths))
    length = np.array(lengths, np.int64)[order]
    offset = (dice.random(len(length)) * (SIZE - length)).astype(np.int64)
    pieces = dice.integers(0, 3, len(length)), dice.integers(0, 2, len(length))
    return LocatedRows(source, pieces[0], offset), LocatedRows(target, pieces[1], start[order]), length


def expected(source: LocatedRows, target: LocatedRows, length: np.ndarray) -> list[np.ndarray]:
    views = [view.copy() for view in target.views]
    for i, size in enumerate(length.tolist()):
        start, goal = source.offset[i], target.offset[i]
        views[target.view_index[i]][goal : goal + size] = source.views[source.view_index[i]][start : start + size]
    return views


@settings(max_examples=150)
@given(sides())
def test_rows_arrive_and_nothing_else_changes(rows: tuple[LocatedRows, LocatedRows, np.ndarray]) -> None:
    _source, target, length = rows
    wanted = expected(*rows)
    assert sum(copy_rows(*rows)) >= int(length.sum())
    assert all(map(np.array_equal, target.views, wanted))


@settings(max_examples=50)
@given(sides())
def test_gather_then_scatter_is_a_copy(rows: tuple[LocatedRows, LocatedRows, np.ndarray]) -> None:
    source, target, length = rows
    wanted = expected(*rows)
    buffer = np.full(int(length.sum()) + 5, 0x11, np.uint8)
    gather(source, length, buffer)
    assert (buffer[-5:] == 0x11).all()
    scatter(buffer, target, length)
    assert all(map(np.array_equal, target.views, wanted))


def test_a_long_row_gives_control_back() -> None:
    source, target = np.arange(3 * BIT_BYTES, dtype=np.uint8), np.zeros(3 * BIT_BYTES, np.uint8)
    zero = np.zeros(1, np.int64)
    steps = list(
        copy_rows(LocatedRows((source,), zero, zero), LocatedRows((target,), zero, zero), np.array([source.size]))
    )
    assert steps == [BIT_BYTES] * 3
    assert np.array_equal(source, target)


def test_short_rows_take_few_steps() -> None:
    num_rows = 10_000
    source, target = np.zeros(16 * num_rows, np.uint8), np.zeros(16 * num_rows, np.uint8)
    offset, zero = np.arange(num_rows) * 16, np.zeros(num_rows, np.int64)
    for length in (np.full(num_rows, 16), np.arange(num_rows) % 16 + 1):
        steps = list(copy_rows(LocatedRows((source,), zero, offset), LocatedRows((target,), zero, offset), length))
        assert len(steps) < 20


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(100, 300))
def test_chunks_are_all_rows_in_order_and_bounded(lengths: list[int], size: int) -> None:
    length = np.array(lengths, np.int64)
    chunks = list(stream_chunks(length, size))
    assert np.concatenate([length[chunk] for chunk in chunks]).tolist() == lengths
    assert all(int(length[chunk].sum()) < size + 100 for chunk in chunks)


VIEWS = [np.zeros(size, np.uint8) for size in (100, 50, 10)]
PIECES = Regions.of([(1000, 100), (1100, 50), (5000, 10)], VIEWS)
ONE_PIECE = Regions.of([(1000, 100)], VIEWS[:1])


@example(PIECES, [(1110, 20), (1149, 1)])
@given(st.sampled_from([PIECES, ONE_PIECE]), st.lists(st.tuples(st.integers(900, 1200), st.integers(0, 200))))
def test_rows_lie_in_one_piece_or_the_first_that_does_not_is_named(
    pieces: Regions, rows: list[tuple[int, int]]
) -> None:
    columns = np.array([row[0] for row in rows], np.uint64), np.array([row[1] for row in rows], np.uint64)
    extents = list(zip(pieces.address.tolist(), pieces.size_bytes.tolist(), strict=True))
    inside = [
        [i for i, (start, size) in enumerate(extents) if start <= address and address + length <= start + size]
        for address, length in rows
    ]
    if not all(inside):
        wanted = f"^row {next(i for i, found in enumerate(inside) if not found)} is outside"
        for ask in (pieces.check, pieces.locate, pieces.located):
            with pytest.raises(TransportError, match=wanted):
                ask(*columns, "somebody")
        return
    pieces.check(*columns, "somebody")
    assert all(piece in found for piece, found in zip(pieces.locate(*columns, "somebody"), inside, strict=True))
    side = pieces.located(*columns, "somebody")
    begins = zip(side.view_index.tolist(), side.view_offsets.tolist(), strict=True)
    assert [side.starts[piece] + begin for piece, begin in begins] == [address for address, _ in rows]
    by_start = dict(zip(pieces.address.tolist(), pieces.views, strict=True))
    assert all(by_start[start] is view for start, view in zip(side.starts, side.views, strict=True))
    assert side.subset(slice(1, None)).view_offsets.tolist() == side.view_offsets[1:].tolist()


@pytest.mark.parametrize("pieces", [PIECES, ONE_PIECE])
@pytest.mark.parametrize("address", [0, 999, 1151, 4990, 5011, 2**63, 2**64 - 1])
@pytest.mark.parametrize("length", [1, 2**63, 2**64 - 1])
def test_sums_that_overflow_are_outside(pieces: Regions, address: int, length: int) -> None:
    with pytest.raises(TransportError):
        pieces.check(np.array([address], np.uint64), np.array([length], np.uint64), "somebody")


def test_a_length_that_wraps_around_is_outside() -> None:
    with pytest.raises(TransportError):
        PIECES.check(np.array([1050], np.uint64), np.array([2**64 - 10], np.uint64), "somebody")


def test_the_first_bad_row_is_named() -> None:
    address = np.array([1000, 1000, 999], np.uint64)
    with pytest.raises(TransportError, match=r"row 1 is outside .* of somebody; found: 101 bytes at 0x3e8"):
        PIECES.check(address, np.array([100, 101, 1], np.uint64), "somebody")


@pytest.mark.parametrize(
    "extents", [[(10, 10), (19, 1)], [(10, 10), (10, 10)], [(0, 5)], [(5, 0)], [((1 << 64) - 1, 1)], [(1 << 64, 1)]]
)
def test_pieces_are_disjoint_and_exist(extents: list[tuple[int, int]]) -> None:
    with pytest.raises(TransportError):
        Regions.of(extents)


def test_no_more_pieces_are_described_than_a_peer_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_memory, "MAX_REGIONS", 2)
    registry, buffer = Registry(), np.zeros(300, np.uint8)
    first, second, third = (Memory(int(buffer.ctypes.data) + 100 * n, 100, -1) for n in range(3))
    registry.add(first)
    registry.add(second)
    registry.check_describable()
    registry.add(third)
    with pytest.raises(TransportError, match=r"found: 3; .*register fewer, larger pieces"):
        registry.check_describable()
    registry.remove(first)
    registry.check_describable()
    assert registry.memories == (second, third)


def test_nothing_registered_holds_no_row() -> None:
    none = Regions.of(())
    empty = np.empty(0, np.uint64)
    assert len(none.located(empty, empty, "somebody").view_index) == 0
    with pytest.raises(TransportError, match="no registered memory"):
        none.check(np.array([1], np.uint64), np.array([1], np.uint64), "somebody")


SHIFTS = st.lists(st.tuples(st.integers(-300, 300), st.integers(0, 120)), max_size=4)


@example(PIECES, [1010, 1060], [(0, 20), (20, 20)])
@example(PIECES, [1010, 5000], [(0, 5), (5, 5)])
@example(PIECES, [1150, 1150], [(-100, 20), (-50, 50)])
@example(PIECES, [5], [(2**63, 1)])
@example(PIECES, [2**63], [(0, 1)])
@example(PIECES, [2**64 - 4096], [(4096 + 1010, 1)])
@example(PIECES, [2**64 - 4096], [(8192, 2**20)])
@example(Regions.of(()), [1000], [(0, 1)])
@given(st.sampled_from([PIECES, ONE_PIECE]), st.lists(st.integers(900, 1200), max_size=4), SHIFTS)
def test_sums_are_refused_like_the_rows_that_they_are(
    pieces: Regions, start: list[int], shifts: list[tuple[int, int]]
) -> None:
    starts = np.array(start, np.uint64)
    shift = np.array([each % 2**64 for each, _ in shifts], np.uint64)
    length = np.array([size for _, size in shifts], np.uint64)

    def answer(ask: Callable[..., None], *columns: np.ndarray) -> str:
        try:
            ask(*columns, "somebody")
        except TransportError as error:
            return str(error)
        return ""

    rows = np.add.outer(starts, shift).ravel(), np.tile(length, len(starts))
    assert answer(pieces.check_tile, starts, shift, length) == answer(pieces.check, *rows)


def test_what_lies_together_is_looked_at_once_for_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have a piece of memory for each layer."""
    pieces = Regions.of([(1000 * layer, 500) for layer in range(1, 40)])
    starts = np.array([1000 * layer + 7 for layer in range(1, 40)], np.uint64)
    shift, looked = np.arange(0, 400, 4, dtype=np.uint64), []
    look = Regions._search

    def counted(self: Regions, address: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, int]:
        looked.append(len(address))
        return look(self, address, length)

    monkeypatch.setattr(Regions, "_search", counted)
    pieces.check_tile(starts, shift, np.full(100, 4, np.uint64), "somebody")
    assert looked == [39]
    with pytest.raises(TransportError, match="row 92 is outside"):
        pieces.check_tile(starts[1:] - np.uint64(1000), shift, np.full(100, 4, np.uint64) << np.uint64(5), "somebody")
