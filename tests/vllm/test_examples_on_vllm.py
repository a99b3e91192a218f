"""The examples with vLLM run as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHIN_S = 800.0
RUNS = (
    ("vllm_pair.py",),
    ("across_engines.py",),
    pytest.param(("across_engines.py", "--prefill", "transformers", "--decode", "vllm"), marks=pytest.mark.full),
    ("mixed_tp.py",),
    pytest.param(("mixed_tp.py", "--prefill-tp", "1", "--decode-tp", "2"), marks=pytest.mark.full),
    pytest.param(("mixed_tp.py", "--decode-block-tokens", "64"), marks=pytest.mark.full),
)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_an_example_moves_a_cache_and_gets_the_same_answer(running, words):
    running.stop()
    script, *options = words
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^x-kvferry-path +disaggregated$", done.stdout, re.MULTILINE)
    assert re.search(r"^x-kvferry-cache +received$", done.stdout, re.MULTILINE)
    assert "equal to the decode engine's answer without a transfer" in done.stdout
    counted = re.search(r"^vLLM counted ([\d,]+) transferred bytes$", done.stdout, re.MULTILINE)
    assert script != "vllm_pair.py" or int(counted[1].replace(",", "")) > 0
