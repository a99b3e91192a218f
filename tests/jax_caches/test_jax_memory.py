"""How much memory a process has while slots are copied in and out of its cache, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from import_path import import_path
from peak_memory import ARRAY_BYTES, SLOT_BYTES

SCRIPT = Path(__file__).with_name("peak_memory.py")
# What a slot has on its way, on both sides of the copy, and what allocators keep of that.
MOST_BYTES = 4 * SLOT_BYTES
DEADLINE_S = 120.0


@pytest.mark.parametrize(("dtype", "num_copied"), [("float32", 0), ("int8", 0), ("bfloat16", 2), ("float8_e4m3fn", 2)])
def test_the_peak_is_the_cache_and_slots(dtype, num_copied):
    """And where XLA copies an array to write to it, that one, and the one before it while it is given back: of sixteen
    that make a cache of 1 GiB."""
    environment = os.environ | {"PYTHONPATH": import_path(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), dtype]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert int(done.stdout) <= MOST_BYTES + num_copied * ARRAY_BYTES
