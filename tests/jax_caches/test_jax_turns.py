"""The engine's turns and copies: no step waits for a copy, and a copy ends when its device says so."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from mover_side import DEADLINE_S

from kvferry.errors import ConfigurationError
from kvferry.staging.jax_arrays import programs
from kvferry.staging.jax_arrays.held_arrays import HeldArrays
from kvferry.staging.jax_arrays.units import units_of
from kvferry.staging.thread_mover import ThreadMover

# Of a block of float32, in a step.
VALUE = 5.0


class Gate:
    """A copy waits for its device here, as if that were busy."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(DEADLINE_S)


class Behind:
    """What a program returns: for whoever waits for it, it is ready once the gate is open."""

    def __init__(self, gate: Gate, array: jax.Array) -> None:
        self._gate, self._array = gate, array

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        self._gate.pass_through()
        return np.asarray(self._array)

    def block_until_ready(self) -> None:
        self._gate.pass_through()
        self._array.block_until_ready()


@pytest.fixture
def gate(monkeypatch) -> Gate:
    """Before the end of every copy."""
    gate, take, put = Gate(), HeldArrays.take, HeldArrays.put
    monkeypatch.setattr(HeldArrays, "take", lambda *what: Behind(gate, take(*what)))
    monkeypatch.setattr(HeldArrays, "put", lambda *what: Behind(gate, put(*what)))
    return gate


def block_of(engine, number: int) -> tuple[int, int]:
    """Address and length of a block of the first array's first piece."""
    unit = units_of(engine.layouts[0], 0)[0]
    return engine.layouts[0].regions[0].address + number * unit, unit


def test_steps_begin_while_blocks_are_taken(engine, side, gate):
    """What is taken is what was there before these steps, which donate the array and write to these blocks."""
    one, (address, unit) = side(engine.caches), block_of(engine, 2)
    before = engine.pictures[0].at(address, unit).copy()
    one.start([address], [one.address], [unit])
    assert gate.reached.wait(DEADLINE_S)
    engine.step(2, VALUE)
    engine.step(2, VALUE + 1)
    gate.open()
    assert one.end() == ""
    assert (one.host[:unit] == before).all()
    engine.download()
    assert (engine.pictures[0].at(address, unit).view(np.float32) == VALUE + 1).all()


def test_steps_begin_while_blocks_are_put(engine, side, gate):
    one, (address, unit) = side(engine.caches), block_of(engine, 2)
    one.host[:unit] = np.arange(unit) % 251
    one.start([one.address], [address], [unit])
    assert gate.reached.wait(DEADLINE_S)
    engine.step(1, VALUE)
    engine.step(3, VALUE)
    gate.open()
    assert one.end() == ""
    engine.download()
    assert (engine.pictures[0].at(address, unit) == one.host[:unit]).all()
    for number in (1, 3):
        assert (engine.pictures[0].at(*block_of(engine, number)).view(np.float32) == VALUE).all()


def test_an_array_that_is_donated_elsewhere_while_it_is_copied(engine, side, gate):
    """What has begun goes well."""
    one, (address, unit) = side(engine.caches), block_of(engine, 2)
    one.start([address], [one.address], [unit])
    assert gate.reached.wait(DEADLINE_S)
    with engine.caches.turn() as turn:
        donated = turn.arrays[0]
    jax.jit(lambda array: array + 1, donate_argnums=0)(donated)
    gate.open()
    assert one.end() == ""
    assert (one.host[:unit] == engine.pictures[0].at(address, unit)).all()
    assert "was donated" in one.move([address], [one.address], [unit])


@pytest.mark.parametrize("is_put", [False, True])
def test_steps_begin_while_something_is_compiled(engine, side, monkeypatch, is_put):
    """Which happens in service only after the compiler has failed."""
    gate, compiled = Gate(), programs._compiled

    def slowly(wanted):
        gate.pass_through()
        return compiled(wanted)

    engine.caches._held.programs._compiled.clear()
    monkeypatch.setattr(programs, "_compiled", slowly)
    one, (address, unit) = side(engine.caches), block_of(engine, 2)
    one.start(*([one.address], [address]) if is_put else ([address], [one.address]), [unit])
    assert gate.reached.wait(DEADLINE_S)
    engine.step(1, VALUE)
    gate.open()
    assert one.end() == ""


def test_a_copy_has_ended_when_the_device_says_so_of_all_arrays(engine, side, monkeypatch):
    """Before that a slot is read and blocks are written, whatever became of the others."""
    put, waited = HeldArrays.put, []

    class Done:
        def __init__(self, done) -> None:
            self.done = done

        def block_until_ready(self) -> None:
            self.done.block_until_ready()
            waited.append(self.done)
            if len(waited) > 1:
                raise RuntimeError(f"INTERNAL: the device is gone, {len(waited)}")

    one, regions = side(engine.caches), engine.layouts[0].regions
    unit = units_of(engine.layouts[0], 0)[0]
    rows = [one.address] * 3, [region.address for region in regions[:3]], [unit] * 3
    with monkeypatch.context() as patch:
        patch.setattr(HeldArrays, "put", lambda *what: Done(put(*what)))
        assert "the device is gone" in one.move(*rows)
    assert len(waited) == 3
    assert one.move(*rows) == ""


def test_a_turn_within_a_turn_is_refused_and_the_first_goes_on(engine):
    with engine.caches.turn() as turn:
        with pytest.raises(ConfigurationError, match="a turn cannot be taken within a turn"), engine.caches.turn():
            pass
        assert len(turn.arrays) == len(engine.layouts[0].regions)
    with engine.caches.turn():
        pass


def test_a_mover_that_is_closed_leaves_no_thread(engine, side, gate):
    """And no copy: one that is under way ends first."""
    before = set(threading.enumerate())
    one, (address, unit) = side(engine.caches), block_of(engine, 2)
    assert isinstance(one.mover, ThreadMover)
    threads = set(threading.enumerate()) - before
    one.start([one.address], [address], [unit])
    assert gate.reached.wait(DEADLINE_S)
    closing = threading.Thread(target=one.mover.close)
    closing.start()
    gate.open()
    closing.join()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    assert len(one.mover.poll()) == 1
