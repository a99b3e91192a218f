"""JAX's CPU platform with four devices. Without JAX only `test_missing_jax.py` is left: `make test-jax` brings it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

# Before JAX is imported, which happens when the tests here are collected.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

others = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {"test_missing_jax.py"}
collect_ignore = [] if find_spec("jax") else sorted(others)
