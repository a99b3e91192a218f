"""The benchmark of copies on a device, in Triton's interpreter: it is not to fail at first where a device is lent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "staging_device.py"
DEADLINE_S = 240.0


def test_it_runs_without_a_device_and_prints_json():
    pytest.importorskip("triton", reason="Triton is not installed")
    arguments = ["--device", "cpu", "--mebibytes", "1", "--repeats", "1", "--row-bytes", "65536"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert (told["device"], len(told["cases"])) == ("cpu", 9)
