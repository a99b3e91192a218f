"""Rows in and out of arrays of JAX: every bit, nothing beside them, no second array, and no compiler in service."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_engine import JaxEngine
from mover_side import NUM_BLOCKS, model_of, shape_of

from kvferry.errors import TransportError
from kvferry.jax_caches import FIRST_ADDRESS
from kvferry.layout import describe
from kvferry.staging.jax_arrays import programs
from kvferry.staging.jax_arrays.held_arrays import Place
from kvferry.staging.jax_arrays.units import calls_for, sizes_of, unit_for, units_of

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8]


def random_rows(dice, layout, unit, count):
    """Disjoint rows in the regions of a layout, and where each lies in the host, one after another."""
    places = []
    for region in layout.regions:
        first = int(dice.integers(0, 3))
        while first < region.size_bytes // unit - 4:
            length = int(dice.integers(1, 4))
            places.append((region.address + first * unit, length * unit))
            first += length + int(dice.integers(0, 5))
    chosen = [places[at] for at in dice.permutation(len(places))[:count]]
    inside, length = (np.array(each, np.uint64) for each in zip(*chosen, strict=True))
    return inside, np.cumsum(length) - length, length


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("format", ["token-major", "head-major"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_bit_of_any_rows_moves_and_no_other(side, dtype, format, rank):
    engine = JaxEngine(model_of(dtype), shape_of(2, format), dtype)
    num_compiled = engine.caches.num_compiled
    dice = np.random.default_rng(7)
    for picture in engine.pictures:
        for buffer in picture.buffers.values():
            buffer[:] = dice.integers(0, 256, len(buffer))
    engine.upload()
    one, layout = side(engine.caches, rank), engine.layouts[rank]
    block, vector, element = units_of(layout, 0)
    for unit, count in ((block, 3), (vector, 40), (vector, 1), (element, 40)):
        inside, outside, length = random_rows(dice, layout, unit, count)
        total = int(length.sum())
        assert one.move(inside, one.address + outside, length) == ""
        for at, to, size in zip(inside.tolist(), outside.tolist(), length.tolist(), strict=True):
            assert (one.host[to : to + size] == engine.pictures[rank].at(at, size)).all()

        expected = {region: buffer.copy() for region, buffer in engine.pictures[rank].buffers.items()}
        other = {region: buffer.copy() for region, buffer in engine.pictures[1 - rank].buffers.items()}
        one.host[:total] = dice.integers(0, 256, total)
        assert one.move(one.address + outside, inside, length) == ""
        engine.download()
        for at, to, size in zip(inside.tolist(), outside.tolist(), length.tolist(), strict=True):
            start = next(start for start, buffer in expected.items() if start <= at < start + len(buffer))
            expected[start][at - start : at - start + size] = one.host[to : to + size]
        assert all((buffer == expected[start]).all() for start, buffer in engine.pictures[rank].buffers.items())
        assert all((buffer == other[start]).all() for start, buffer in engine.pictures[1 - rank].buffers.items())
    assert engine.caches.num_compiled == num_compiled, "nothing is compiled in service"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_put_is_in_place(monkeypatch, dtype):
    """XLA's own account of each program: the array is donated, and beside it there is room for units, or, where the
    platform can only move integers, for one array more."""
    made = {}
    compiled = programs._compiled

    def noted(wanted):
        made[wanted] = compiled(wanted)
        return made[wanted]

    monkeypatch.setattr(programs, "_compiled", noted)
    engine = JaxEngine(model_of(dtype, num_layers=1), shape_of(num_blocks=512), dtype)
    piece_bytes = engine.layouts[0].regions[0].size_bytes
    for wanted, program in made.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == (piece_bytes if wanted.puts else 0)
        # Beside the units their numbers, too.
        units = wanted.num_units * (4 * wanted.unit_bytes + 8) + 4096
        array = piece_bytes if wanted.puts and wanted.kind.is_copied_by_puts else 0
        assert memory.temp_size_in_bytes <= units + array


def test_nothing_of_jax_compiles_while_rows_move(engine, side):
    """Told by JAX itself, which compiles for more than programs."""
    compiled, one, regions = [], side(engine.caches), engine.layouts[0].regions

    def note(event: str, _: float, **__: object) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for unit in units_of(engine.layouts[0], 0):
            for count in (1, 3, 18):
                inside, outside = regions[0].address + np.arange(count) * unit, one.address + np.arange(count) * unit
                assert one.move(inside, outside, [unit] * count) == ""
                assert one.move(outside, inside, [unit] * count) == ""
        assert not compiled
        jax.jit(lambda array: array + 1)(jnp.zeros(3)).block_until_ready()
        assert compiled, "the listener hears of what is compiled"
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_what_is_taken_is_in_pinned_memory_and_numpy_copies_it_no_more(engine):
    device = jax.devices()[1]
    assert "pinned_host" in {memory.kind for memory in device.addressable_memories()}
    unit = units_of(engine.layouts[1], 0)[0]
    taken = engine.caches._held.take(Place(1, 0), np.arange(3), unit)
    assert taken.sharding.memory_kind == "pinned_host"
    assert taken.devices() == {device}
    assert np.asarray(taken).ctypes.data == taken.unsafe_buffer_pointer()


def test_a_platform_without_pinned_memory(monkeypatch, side):
    monkeypatch.setattr(programs, "PINNED", "no such memory")
    engine = JaxEngine(model_of(jnp.float32), shape_of(2), jnp.float32)
    one, region, unit = side(engine.caches), engine.layouts[0].regions[0], units_of(engine.layouts[0], 0)[0]
    assert engine.caches._held.take(Place(0, 0), np.arange(3), unit).sharding.memory_kind == "device"
    assert one.move([region.address], [one.address], [unit]) == ""
    assert (one.host[:unit] == engine.pictures[0].at(region.address, unit)).all()


def test_a_platform_that_names_pinned_memory_and_cannot_write_there(monkeypatch):
    """As JAX 0.8 on CPUs."""
    where, host_of = jax.sharding.SingleDeviceSharding(jax.devices()[0]), programs._host_of.__wrapped__

    def refused(_: object) -> None:
        raise jax.errors.JaxRuntimeError("NOT_FOUND: No registered implementation")

    with monkeypatch.context() as patch:
        patch.setattr(jnp, "negative", refused)
        assert host_of(where, "pinned_host") is where
    assert host_of(where, "pinned_host").memory_kind == "pinned_host"


def test_what_is_put_lies_where_it_was(side):
    engine = JaxEngine(model_of(jnp.float32), shape_of(), jnp.float32)
    region = engine.layouts[0].regions[1]
    # What came from numpy may still be numpy's memory, which JAX does not write to.
    engine.step(0, 1.0)
    with engine.caches.turn() as turn:
        before = [array.unsafe_buffer_pointer() for array in turn.arrays]
        old = turn.arrays
    one = side(engine.caches)
    unit = units_of(engine.layouts[0], 1)[0]
    assert one.move([one.address], [region.address], [unit]) == ""
    with engine.caches.turn() as turn:
        assert [array.unsafe_buffer_pointer() for array in turn.arrays] == before
    assert [array.is_deleted() for array in old] == [False, True, False, False]


def test_more_units_than_one_program_takes(side):
    engine = JaxEngine(model_of(jnp.int8, 1), shape_of(num_blocks=5000), jnp.int8)
    region, unit = engine.layouts[0].regions[0], units_of(engine.layouts[0], 0)[1]
    num_units = sizes_of(unit)[-1] + 7
    assert num_units * unit < region.size_bytes
    one = side(engine.caches)
    one.host[: num_units * unit] = np.arange(num_units * unit) % 251
    assert one.move([one.address], [region.address + unit], [num_units * unit]) == ""
    engine.download()
    assert (engine.pictures[0].at(region.address + unit, num_units * unit) == one.host[: num_units * unit]).all()


def test_steps_of_the_engine_go_on_between_copies(side):
    """Whoever writes last into a block is whom it belongs to; here each has its own."""
    engine = JaxEngine(model_of(jnp.float32), shape_of(), jnp.float32)
    one, layout = side(engine.caches), engine.layouts[0]
    unit = units_of(layout, 0)[0]
    for number in range(20):
        engine.step(2 * number % NUM_BLOCKS, float(number))
        one.host[: 4 * unit] = number
        at = [region.address + (2 * number % NUM_BLOCKS + 1) * unit for region in layout.regions]
        assert one.move(one.address + np.arange(4) * unit, at, [unit] * 4) == ""
    engine.download()
    for region in layout.regions:
        blocks = engine.pictures[0].at(region.address, region.size_bytes).reshape(NUM_BLOCKS, unit)
        for block in range(NUM_BLOCKS):
            last = max(number for number in range(20) if 2 * number % NUM_BLOCKS == block // 2 * 2)
            own = np.full(unit, last, np.uint8) if block % 2 else np.full(unit // 4, last, np.float32).view(np.uint8)
            assert (blocks[block] == own).all(), block


def test_an_array_with_more_elements_than_programs_can_number_is_cut_into_larger_units():
    (layout,) = describe(model_of(jnp.float32, 1), shape_of(1, num_blocks=1 << 26), FIRST_ADDRESS)
    assert layout.regions[0].size_bytes == 1 << 34
    assert units_of(layout, 0) == (256, 32, 16)


@pytest.mark.parametrize(
    ("unit_bytes", "num_units", "calls"),
    [
        (4096, 1, [1]),
        (4096, 17, [16, 1]),
        (4096, 40, [40]),
        (4096, 300, [256, 44]),
        (4096, 10_000, [4096, 4096, 1024, 784]),
        (256, 40_000, [16384, 16384, 4096, 3136]),
        (1, 17, [17]),
        (4 << 20, 9, [4, 4, 1]),
        (64 << 20, 2, [1, 1]),
    ],
)
def test_calls_of_few_sizes(unit_bytes, num_units, calls):
    found = list(calls_for(num_units, unit_bytes))
    assert [part.stop - part.start for part in found] == calls
    assert [part.start for part in found] == [sum(calls[:number]) for number in range(len(calls))]


def test_the_largest_unit_that_fits_is_taken():
    columns = [np.array(each, np.uint64) for each in ([64, 128], [64, 192])]
    assert unit_for(*columns, (64, 16)) == 64
    assert unit_for(columns[0] + np.uint64(16), columns[1], (64, 16)) == 16
    with pytest.raises(TransportError, match="multiples of 16 bytes"):
        unit_for(columns[0] + np.uint64(8), columns[1], (64, 16))


@pytest.mark.parametrize(
    ("format", "units"),
    [
        ("token-major", (256, 32, 4)),
        ("head-major", (256, 32, 4)),
        ("interleaved", (256, 32, 4)),
        ("packed", (32, 4)),
        ("block-major", (256, 32, 4)),
    ],
)
def test_units_are_a_states_blocks_what_nobody_divides_and_elements(format, units):
    (layout,) = describe(model_of(jnp.float32), shape_of(1, format), FIRST_ADDRESS)
    assert units_of(layout, 0) == units
