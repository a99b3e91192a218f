"""`kvferry up --engine sglang`: the whole job on real servers, and the whole model's answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from sglang_servers import CPU_FLAGS, environment

WITHIN_S = 800.0


def test_once_answers_and_proves(running):
    running.stop()
    command = [sys.executable, "-m", "kvferry", "up", "--engine", "sglang", "--decode-block-tokens", "64"]
    command += ["--once", "The ferry leaves at dawn", "--max-tokens", "8", "--json", "--", *CPU_FLAGS]
    variables = {**os.environ, **environment(), "SGLANG_CPU_OMP_THREADS_BIND": "0"}
    # It is for servers that are started without kvferry.
    del variables["KVFERRY_SGLANG_CONFIG"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["equal"], facts["path"], facts["text"] != "") == (True, "disaggregated", True)
    assert (facts["tokens_received"], facts["tokens_computed"]) == (facts["prompt_tokens"], 0)
