"""What takes a GPU, NIXL and processes: fetches between device memories, and engines that compute there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DEADLINE_S = 280.0

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no cuda device here")
    pytest.importorskip("triton", reason="Triton is not installed")


def told_by(*command: str) -> dict[str, object]:
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    told: dict[str, object] = json.loads(found.stdout)
    return told


def test_every_way_between_device_memories_moves_every_byte():
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    sizes = ["--repeats", "1", "--pairs", "2-1", "--formats", "token-major", "--tokens", "256"]
    told = told_by("benchmarks/device_pair.py", *sizes)
    (row,) = told["rows"]  # type: ignore[misc]
    assert len(row["last"]) == 10


@pytest.mark.parametrize(("buffer_device", "staging_memory"), [("auto", "host"), ("auto", "device"), ("cpu", "host")])
def test_engines_that_compute_on_it_answer_as_one_does(buffer_device, staging_memory):
    blocks = ["--prefill-block-tokens", "16", "--decode-block-tokens", "32"]
    where = ["--device", "cuda", "--buffer-device", buffer_device, "--staging-memory", staging_memory]
    told = told_by("-m", "kvferry", "up", "--once", "a ferry crosses a river", "--json", *where, *blocks)
    assert told["equal"] is True
