"""The check of arrays of JAX in `kvferry qualify`, on JAX's CPU platform; and with programs that are wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kvferry.qualify.checks import arrays_of_jax
from kvferry.qualify.outcome import Result
from kvferry.staging.jax_arrays.programs import Programs


@pytest.fixture(autouse=True)
def _one_type(monkeypatch):
    monkeypatch.setattr(arrays_of_jax, "DTYPES", (jnp.int8,))
    monkeypatch.setattr(arrays_of_jax, "NUM_LAYERS", 1)


def test_arrays_that_are_right_pass():
    found = arrays_of_jax.check(jax.devices()[:2])
    assert (found.result, found.words) == (
        Result.PASSED,
        "1,024 tokens of int8 on 2 of its devices, both ways: every byte is right",
    )
    assert [figure.name for figure in found.figures] == ["int8, to the host", "int8, from the host"]


@pytest.mark.parametrize(("name", "way"), [("take", "to the host"), ("put", "from the host")])
def test_units_of_another_place_are_wrong_bytes(monkeypatch, name, way):
    right = getattr(Programs, name)

    def shifted(self, piece, numbers, *rest):
        return right(self, piece, numbers[::-1].copy(), *rest)

    monkeypatch.setattr(Programs, name, shifted)
    found = arrays_of_jax.check(jax.devices()[:1])
    assert (found.result, found.words) == (Result.FAILED, f"int8: wrong bytes {way}")


def test_what_is_compiled_in_service_is_a_failure(monkeypatch):
    monkeypatch.setattr("kvferry.staging.jax_arrays.held_arrays.HeldArrays.prepare", lambda self: None)
    found = arrays_of_jax.check(jax.devices()[:1])
    assert (found.result, "programs were compiled in service" in found.words) == (Result.FAILED, True)


def test_without_a_tpu_it_says_what_is_there():
    found = arrays_of_jax.run("tpu")
    assert (found.result, found.words.startswith("JAX has cpu devices")) == (Result.SKIPPED, True)
