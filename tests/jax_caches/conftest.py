"""JAX's CPU platform with four devices; whoever has no JAX skips all of this."""

from __future__ import annotations

import os

import pytest

# Before JAX is imported, which happens when the tests here are collected.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

pytest.importorskip("jax", reason="JAX is not installed (make test-jax)")
