"""`kvferry up --engine vllm`: the whole job on real vLLM, and what it says about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from servers import ENVIRONMENT
from tiny_models import model_folder

WITHIN_S = 600.0


def test_once_answers_proves_and_tells_what_moved(running):
    running.stop()
    command = [
        sys.executable,
        "-m",
        "kvferry.cli.main",
        "up",
        "--engine",
        "vllm",
        "--model",
        str(model_folder("llama")),
    ]
    command += ["--decode-block-tokens", "64", "--once", "The ferry leaves at dawn", "--json"]
    result = subprocess.run(
        # How much memory each may take is for `kvferry up` to say.
        [*command, "--", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("of the memory") == 2
    facts = json.loads(result.stdout)
    assert (facts["equal"], facts["path"], facts["recomputed"]) == (True, "disaggregated", "")
    assert (facts["tokens_received"], facts["tokens_computed"]) == (facts["prompt_tokens"] - 1, 1)
    assert facts["bytes"] > 0
    assert facts["transport"] in ("cma", "tcp", "nixl")
    assert "wire" in facts["phases_s"]
    assert facts.keys().isdisjoint({"strategy", "choice"})
