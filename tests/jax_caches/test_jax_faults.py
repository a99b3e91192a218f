"""Arrays that are gone, layouts that do not fit, compilers and devices that fail: a copy fails, the next does not."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax_engine import rewritten
from mover_side import model_of, shape_of

from kvferry import jax_caches
from kvferry.errors import ConfigurationError
from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches, device_name
from kvferry.layout import describe
from kvferry.staging.device import table
from kvferry.staging.jax_arrays import units
from kvferry.staging.jax_arrays.programs import Programs
from kvferry.staging.jax_arrays.units import units_of


def test_an_array_that_was_donated_and_not_handed_back(engine, side):
    """That request fails, and the next goes well once the engine has put it right."""
    one, region = side(engine.caches), engine.layouts[0].regions[0]
    unit = units_of(engine.layouts[0], 0)[0]
    with engine.caches.turn() as turn:
        lost = jax.jit(lambda array: array + 1, donate_argnums=0)(turn.arrays[0])
    for source, target in ((region.address, one.address), (one.address, region.address)):
        error = one.move([source], [target], [unit])
        assert "was donated" in error
        assert "donate arrays of the cache only inside turn()" in error
    with engine.caches.turn() as turn:
        turn.arrays = (lost, *turn.arrays[1:])
    assert one.move([region.address], [one.address], [unit]) == ""


def test_an_array_that_is_donated_twice(engine, side):
    """By a step that hands nothing back, and by the next: JAX says so to the engine, which mends it. JAX 0.10 would end
    the process instead, where an array is on several devices."""
    with engine.caches.turn() as turn:
        rewritten(turn.arrays, jnp.int32(0))
    with pytest.raises(RuntimeError, match="deleted"):
        engine.rewrite(0)
    one, region, unit = side(engine.caches), engine.layouts[0].regions[0], units_of(engine.layouts[0], 0)[0]
    assert "was donated" in one.move([region.address], [one.address], [unit])
    engine.upload()
    engine.rewrite(0)
    assert one.move([region.address], [one.address], [unit]) == ""


def test_an_array_stands_in_one_place(engine):
    with pytest.raises(ConfigurationError, match="array 2 is array 0 once more"), engine.caches.turn() as turn:
        turn.arrays = (*turn.arrays[:2], turn.arrays[0], *turn.arrays[3:])
    with engine.caches.turn() as turn, pytest.raises(ConfigurationError, match="once more"):
        JaxCaches([turn.arrays[0]] * 4, engine.layouts)
    engine.rewrite(0)


@pytest.mark.parametrize("has_put_before", [False, True])
def test_a_piece_that_is_lost_in_a_copy(engine, side, monkeypatch, has_put_before):
    """Of an array on two devices: the request fails, others go on, and the engine leaves a new array in its place."""
    one, regions = side(engine.caches), engine.layouts[0].regions
    unit = units_of(engine.layouts[0], 0)[0]
    if has_put_before:
        assert one.move([one.address], [regions[0].address], [unit]) == ""

    def gone(array):
        array.delete()
        raise RuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "put", lambda *_: gone)
        assert "the device is gone" in one.move([one.address], [regions[0].address], [unit])
    assert "was donated" in one.move([one.address], [regions[0].address], [unit])
    assert one.move([regions[1].address], [one.address], [unit]) == ""
    with engine.caches.turn() as turn:
        assert [array.is_deleted() for array in turn.arrays] == [True, False, False, False]
        with pytest.raises(RuntimeError, match="deleted"):
            rewritten(turn.arrays, jnp.int32(0))
    engine.upload()
    assert one.move([one.address], [regions[0].address], [unit]) == ""
    engine.rewrite(0)


def test_a_step_that_fails_leaves_the_arrays_as_they_were(engine, side):
    with pytest.raises(ZeroDivisionError), engine.caches.turn():
        raise ZeroDivisionError
    one, region = side(engine.caches), engine.layouts[0].regions[0]
    assert one.move([region.address], [one.address], [units_of(engine.layouts[0], 0)[0]]) == ""


def test_other_arrays_are_not_taken_for_the_cache(engine):
    with pytest.raises(ConfigurationError, match="array 1"), engine.caches.turn() as turn:
        turn.arrays = (turn.arrays[0], turn.arrays[1][:1], *turn.arrays[2:])
    with pytest.raises(ConfigurationError, match="3 arrays"), engine.caches.turn() as turn:
        turn.arrays = turn.arrays[:3]
    engine.step(0, 1.0)


def elsewhere(array: jax.Array, other: str) -> jax.Array:
    """The same array in memory of the host, or with its elements in another order."""
    if other == "pinned_host":
        return jax.device_put(array, array.sharding.with_memory_kind(other))
    return jax.device_put(array, Format(Layout(major_to_minor=(0, 2, 1, 3)), array.sharding))


PLACES = [("pinned_host", "pinned_host"), ("another order", r"major_to_minor=\(0, 2, 1, 3\)")]


@pytest.mark.parametrize(("other", "found"), PLACES)
def test_an_array_that_lies_where_programs_do_not_take_it_does_not_follow(engine, other, found):
    with pytest.raises(ConfigurationError, match=f"array 1: .*{found}"), engine.caches.turn() as turn:
        turn.arrays = (turn.arrays[0], elsewhere(turn.arrays[1], other), *turn.arrays[2:])
    engine.step(0, 1.0)


@pytest.mark.parametrize(("other", "found"), PLACES)
def test_an_array_that_lies_where_programs_do_not_take_it_is_refused_at_the_start(engine, other, found):
    with engine.caches.turn() as turn:
        arrays = turn.arrays[0], elsewhere(turn.arrays[1], other), *turn.arrays[2:]
        with pytest.raises(ConfigurationError, match=f"do not take array 1 .*found: memory .*{found}.*expected: "):
            JaxCaches(arrays, engine.layouts)


@pytest.mark.parametrize(
    ("layouts", "what"),
    [
        (describe(model_of(jnp.float32), shape_of(1), FIRST_ADDRESS), "mesh"),
        (describe(model_of(jnp.float32, 3), shape_of(2), FIRST_ADDRESS), "one array for each region"),
        (describe(model_of(jnp.float32), shape_of(2), 1 << 40), "have no addresses"),
    ],
    ids=["another mesh", "more layers", "addresses of the host"],
)
def test_layouts_that_do_not_fit(engine, layouts, what):
    with engine.caches.turn() as turn, pytest.raises(ConfigurationError, match=what):
        JaxCaches(turn.arrays, layouts)


def test_an_array_of_more_blocks_than_programs_can_number(engine, monkeypatch):
    monkeypatch.setattr(units, "MAX_UNITS", 2)
    with engine.caches.turn() as turn, pytest.raises(ConfigurationError, match="array 0 consists of too many blocks"):
        JaxCaches(turn.arrays, engine.layouts)


def test_rows_that_nobody_can_copy(engine, side):
    one, region = side(engine.caches), engine.layouts[0].regions[0]
    end = region.address + engine.layouts[0].regions[-1].size_bytes * 4
    assert "multiples of" in one.move([region.address + 1], [one.address], [4])
    assert "outside the registered memory" in one.move([end + 4096], [one.address], [32])
    assert "outside the registered memory" in one.move([region.address], [one.address + len(one.host)], [32])
    assert "both sides" in one.move([region.address], [region.address + 4096], [32])
    assert "both sides" in one.move([one.address], [one.address + 4096], [32])


def test_a_compiler_that_fails_costs_one_copy_only(engine, side, monkeypatch):
    one, region = side(engine.caches), engine.layouts[0].regions[0]
    unit = units_of(engine.layouts[0], 0)[0]
    engine.caches._held.programs._compiled.clear()
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "take", lambda *_, **__: 1 // 0)
        assert "cannot be compiled" in one.move([region.address], [one.address], [unit])
    assert one.move([region.address], [one.address], [unit]) == ""


def test_a_device_that_fails_during_a_copy(engine, side, monkeypatch):
    one, region = side(engine.caches), engine.layouts[0].regions[0]
    unit = units_of(engine.layouts[0], 0)[0]

    def vanished(*_):
        raise RuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(np, "asarray", vanished)
        error = one.move([region.address], [one.address], [unit])
    assert "the device is gone" in error
    assert one.move([region.address], [one.address], [unit]) == ""


def test_platforms_have_the_names_of_devices(engine, monkeypatch):
    """A package that brings a platform of JAX makes it known like any device."""

    def on(platform: str, version: str = "") -> SimpleNamespace:
        return SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))

    names = [device_name(on("gpu", "PJRT C API\nrocm 70100")), device_name(on("gpu", "PJRT C API\ncuda 13000"))]
    assert [*names, device_name(on("tpu")), device_name(on("abacus"))] == ["rocm", "cuda", "tpu", "abacus"]
    monkeypatch.setattr(jax_caches, "device_name", lambda _: "abacus")
    with pytest.raises(ConfigurationError, match="unknown device"):
        engine.caches.cache(0)
    monkeypatch.setattr(table, "_registered", {})
    monkeypatch.setattr(jax_caches, "load_devices", lambda: table.register_device("abacus", ("cpu",)))
    assert engine.caches.cache(0).device == "abacus"
