"""The engine of the tutorial, for real: two processes of it, and between it and transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing.servers import running

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4


def run(*arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cache_moves_between_two_processes():
    said = run()
    assert said["equal"]
    assert said["bytes"] == 100 * BYTES_PER_TOKEN


def test_a_cache_moves_from_transformers_and_back():
    with running(("serve", "--port", "0")) as (url,):
        said = run(f"{url}/v1")
    assert said["equal"]
    assert said["bytes"] > 0
    assert said["text"]
