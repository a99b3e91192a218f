"""The benchmarks of vLLM servers find all that they need, which nobody wants to find out when a machine is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 240.0


@pytest.mark.parametrize("name", ["accuracy.py", "vllm_pd.py", "vllm_early.py"])
def test_it_starts(name):
    command = [sys.executable, str(BENCHMARKS / name), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.returncode == 0, found.stderr
