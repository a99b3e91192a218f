"""`kvferry qualify` with real engines; and what its check of answers must find."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos_support import Process, running
from conftest import DEADLINE_S

from kvferry.cli.qualify import answers
from kvferry.qualify.outcome import Result

SPOILING = Path(__file__).parents[1] / "spoiling_serve.py"


@pytest.mark.slow
def test_a_machine_without_a_device_is_checked_to_the_end(tmp_path):
    command = [sys.executable, "-m", "kvferry", "qualify", "--json", "--page", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S * 10, check=False)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert "No accelerator was checked: this says nothing of devices." in told["verdict"]
    results = {each["check"]: each["result"] for each in told["outcomes"]}
    assert len(results) == 10
    skipped = {"UCX settings", "kernels", "copy rates", "transports in device memory", "arrays of JAX"}
    assert {name for name, result in results.items() if result == "skipped"} == skipped
    assert (results["answers"], results["restart"]) == ("passed", "passed")


def test_caches_that_are_noise_do_not_pass_for_right_answers(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "NUM_PROMPTS", 4)
    common = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--engine-id")
    source = Process(tmp_path / "p0.log", *common, "p0", script=SPOILING)
    target = Process(tmp_path / "d0.log", *common, "d0")
    source.gate.write_text("valid")
    with running(source, target):
        router = Process(tmp_path / "router.log", "route", "--prefill", source.url, "--decode", target.url)
        with running(router):
            fleet = SimpleNamespace(model="tiny", url=router.url, decode_urls=(target.url,))
            found = answers.check(fleet)
    assert found.result is Result.FAILED
    assert "of 4 answers differ" in found.words
