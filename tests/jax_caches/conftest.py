"""JAX's CPU platform with four devices. Without JAX only `test_missing_jax.py` is left: `make test-jax` brings it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before JAX is imported, which happens when the tests here are collected.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

others = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {"test_missing_jax.py"}
collect_ignore = [] if find_spec("jax") else sorted(others)


@pytest.fixture
def side() -> Iterator:
    """Makes movers of single ranks."""
    from mover_side import Side

    made = []

    def make(*what) -> Side:
        made.append(Side(*what))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def engine():
    """With its heads on two devices."""
    from jax_engine import JaxEngine
    from mover_side import model_of, shape_of

    return JaxEngine(model_of("float32"), shape_of(2), "float32")
