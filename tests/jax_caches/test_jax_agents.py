"""Engines with arrays of JAX on several devices, torch engines in memory of the host, and real agents between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import agents_of_engine
import jax
import msgspec
import pytest
from agents_of_engine import DEADLINE_S, NUM_TOKENS, TIMING, AgentsOfEngine, model_of
from import_path import import_path
from jax_engine import JaxEngine
from torch_engine import TorchEngine

from kvferry.layout import EngineShape
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.wire.messages import Reference

# Blocks that no request has: the engine writes to them all the time.
OTHER_BLOCK = 4
ENGINES = {"jax": JaxEngine, "torch": TorchEngine}
SCRIPT = Path(__file__).with_name("torch_process.py")


@pytest.fixture
def make_side() -> Iterator:
    made: list[AgentsOfEngine] = []

    def make(
        engine_id: str, kind: str, tensor_parallel: int, dtype: str, format: str = "", model=None
    ) -> AgentsOfEngine:
        """Engines of JAX have a block's tokens first (NHD), those of torch its heads (HND)."""
        block_tokens, num_blocks = (4, 16) if engine_id == "p0" else (6, 9)
        format = format or ("token-major" if kind == "jax" else "head-major")
        shape = EngineShape(tensor_parallel, 1, block_tokens, num_blocks, format=format)
        made.append(AgentsOfEngine(engine_id, ENGINES[kind](model or model_of(dtype), shape, dtype)))
        return made[-1]

    yield make
    for side in made:
        side.close()


class Steps:
    """Steps of an engine, one after the other, each of which donates the whole cache."""

    def __init__(self, engines: Sequence[JaxEngine]) -> None:
        self._engines, self._stopping, self.error = engines, threading.Event(), ""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for engine in self._engines:
                    engine.rewrite(OTHER_BLOCK)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.error = repr(error)


WAYS = [
    ("jax", 4, "torch", 2, "bfloat16"),
    ("jax", 2, "torch", 4, "int8"),
    ("jax", 3, "torch", 2, "float32"),
    ("torch", 4, "jax", 2, "float8_e4m3fn"),
    ("torch", 2, "jax", 4, "bfloat16"),
    ("torch", 3, "jax", 2, "int8"),
    ("jax", 3, "jax", 4, "bfloat16"),
    ("jax", 1, "jax", 2, "float8_e4m3fn"),
]


def named(way: tuple[str, int, str, int, str]) -> str:
    return "{} {} to {} {}, {}".format(*way)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_cache_moves_while_engines_compute(make_side, way):
    source, source_ranks, target, target_ranks, dtype = way
    one = make_side("p0", source, source_ranks, dtype)
    other = make_side("d0", target, target_ranks, dtype, "head-major" if source == "jax" else "token-major")
    engines = [side.engine for side in (one, other) if isinstance(side.engine, JaxEngine)]
    references = one.lease()
    num_compiled = [engine.caches.num_compiled for engine in engines]
    with Steps(engines) as steps:
        other.fetch(references[0], one.addresses)
        reports = [notice.report for notice in other.heard(Fetched)]
        one.heard(LeaseEnded)
    assert steps.error == ""
    assert {report.tokens for report in reports} == {NUM_TOKENS}
    other.check()
    for number in range(4):
        expected = one.engine.read(number, one.table, NUM_TOKENS)
        assert (other.engine.read(number, other.table, NUM_TOKENS) == expected).all()
    assert [engine.caches.num_compiled for engine in engines] == num_compiled


@pytest.mark.parametrize(("source", "target"), [(("jax", 4), ("torch", 2)), (("torch", 1), ("jax", 4))])
def test_devices_with_the_same_heads_all_get_them(make_side, source, target):
    """Of a mesh in which arrays are replicated: two heads are on four devices."""
    model = model_of("int8", 2)
    one, other = make_side("p0", *source, "int8", model=model), make_side("d0", *target, "int8", model=model)
    reference, *_ = one.lease()
    other.fetch(reference, one.addresses)
    other.heard(Fetched)
    one.heard(LeaseEnded)
    other.check()
    expected = one.engine.read(0, one.table, NUM_TOKENS)
    assert (other.engine.read(0, other.table, NUM_TOKENS) == expected).all()


def started(*arguments: str) -> subprocess.Popen[str]:
    """A torch engine in another process."""
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"PYTHONPATH": import_path(SCRIPT.parents[1])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_torch_engine_in_another_process_fetches_from_arrays(make_side):
    one = make_side("p0", "jax", 4, "bfloat16")
    reference, *_ = one.lease()
    with started("fetch", "2", "bfloat16") as other:
        offer = {"reference": msgspec.to_builtins(reference), "addresses": one.addresses}
        other.communicate(json.dumps(offer), timeout=2 * DEADLINE_S)
    assert other.returncode == 0, "it has checked every byte"
    one.heard(LeaseEnded)


def test_arrays_get_what_a_torch_engine_in_another_process_has(make_side):
    other = make_side("d0", "jax", 2, "bfloat16")
    with started("lease", "3", "bfloat16") as one:
        offer = json.loads(one.stdout.readline())
        other.fetch(msgspec.convert(offer["reference"], Reference), tuple(offer["addresses"]))
        other.heard(Fetched)
        one.communicate(timeout=2 * DEADLINE_S)
    assert one.returncode == 0
    other.check()


def test_arrays_that_are_gone_cost_the_cache_and_not_the_engine(make_side):
    """The request fails with the reason; when the engine has put its arrays right, the next one is served."""
    one, other = make_side("p0", "jax", 2, "float32"), make_side("d0", "torch", 1, "float32")
    reference = one.lease()[0]
    with one.engine.caches.turn() as turn:
        jax.jit(lambda array: array + 1, donate_argnums=0)(turn.arrays[0])
    other.fetch(reference, one.addresses)
    (failed,) = other.heard(FetchFailed)
    assert "was donated" in str(failed.error)
    other.heard(BlocksReleased)
    one.heard(LeaseEnded)
    reference = one.lease()[0]
    other.fetch(reference, one.addresses)
    other.heard(Fetched)
    other.check()


def compile_for(seconds: float) -> None:
    """What an engine does in its first steps, in the middle of its turn."""
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        number += 1
        jax.jit(lambda array, by=number: array * by).lower(jax.ShapeDtypeStruct((number,), "float32")).compile()


@pytest.mark.parametrize("compiles", ["p0", "d0"])
def test_an_engine_that_compiles_for_several_leases_loses_none(make_side, monkeypatch, compiles):
    """Its agents have threads of their own: they renew and answer, and copies go on when its turn has ended."""
    monkeypatch.setattr(agents_of_engine, "TIMING", replace(TIMING, lease_s=1.0, heartbeat_s=0.25))
    source, target = make_side("p0", "jax", 2, "float32"), make_side("d0", "jax", 1, "float32")
    reference = source.lease()[0]
    busy = {"p0": source, "d0": target}[compiles]
    with busy.engine.caches.turn():
        target.fetch(reference, source.addresses)
        compile_for(3.0)
    target.heard(Fetched)
    target.check()
