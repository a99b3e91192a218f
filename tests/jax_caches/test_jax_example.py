"""The example of docs/jax.md runs as its docstring says."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/jax_cache.py"


def test_the_example_moves_its_cache():
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "100 tokens from 2 devices to 1: right: True" in done.stdout
