"""The examples that need no vLLM run as their docstrings say, and leave nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from conftest import eventually

WITHIN_S = 240.0
EXAMPLES = Path(__file__).parents[2] / "examples"
# Whatever an example starts has it in its environment, and is found by it.
MARK = "KVFERRY_TEST_OF_EXAMPLES"
WITHOUT_VLLM = ("across_engines.py", "--prefill", "transformers", "--decode", "transformers")


def why_no_hosts() -> str:
    if os.geteuid():
        return "hosts in namespaces need root"
    if not all(map(shutil.which, ("ip", "unshare", "mount"))):
        return "hosts in namespaces need the programs ip, unshare and mount"
    probe = ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NO_HOSTS = why_no_hosts()


@pytest.fixture
def mark(monkeypatch) -> str:
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    return os.environ[MARK]


def left_behind(mark: str) -> list[str]:
    """The command lines of processes that an example has started, this one not among them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def check_transfer(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^x-kvferry-path +disaggregated$", done.stdout, re.MULTILINE)
    assert re.search(r"^x-kvferry-cache +received$", done.stdout, re.MULTILINE)
    assert re.search(r"^tokens_computed +1$", done.stdout, re.MULTILINE)
    assert "equal to the decode engine's answer without a transfer" in done.stdout


def test_across_engines_without_vllm(mark):
    check_transfer(run(*WITHOUT_VLLM))
    assert left_behind(mark) == []


def test_an_engine_that_cannot_start_ends_the_example_with_its_own_words(mark):
    done = run(*WITHOUT_VLLM, "--model", "./absent")
    assert done.returncode == 1
    assert "cannot load the model './absent'" in done.stderr
    assert left_behind(mark) == []


@pytest.mark.slow
def test_nothing_outlives_an_example_that_is_killed(mark):
    words = [sys.executable, str(EXAMPLES / WITHOUT_VLLM[0]), *WITHOUT_VLLM[1:]]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as example:
        try:
            # It comes when both engines can serve.
            eventually(lambda: any(" route " in line for line in left_behind(mark)), "the router starts")
        finally:
            example.kill()
    eventually(lambda: left_behind(mark) == [], "the engines have ended")


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS)
def test_two_hosts(mark):
    done = run("two_hosts.py")
    check_transfer(done)
    assert re.search(r"^transport +(tcp|nixl)$", done.stdout, re.MULTILINE)
    moved = int(re.search(r"^bytes +(\d+)$", done.stdout, re.MULTILINE)[1])
    sent = int(re.search(r"sent over the cable from the first host: ([\d,]+)", done.stdout)[1].replace(",", ""))
    assert sent > moved > 0
    assert left_behind(mark) == []
