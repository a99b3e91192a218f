"""What a command says when nobody can read what it has to say."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = [sys.executable, "-m", "kvferry.cli.main", "plan", "--prefill", "tp=1", "--decode", "tp=2", "--tokens", "64"]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_full_disk_is_one_clear_message(arguments):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(PLAN + arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the output cannot be written")
    assert "Traceback" not in ended.stderr


def test_a_terminal_that_is_closed_is_no_defect():
    terminal, end = pty.openpty()
    os.close(terminal)
    try:
        ended = subprocess.run(PLAN, stdout=end, stderr=end, check=False)
    finally:
        os.close(end)
    assert ended.returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_outputs_that_are_closed_from_the_start_are_no_failure(closed):
    words = " ".join(PLAN)
    ended = subprocess.run(["sh", "-c", f"{words} {closed}"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_output_of_few_characters_is_one_clear_message():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(PLAN, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "its encoding is ascii" in ended.stderr
    assert "Traceback" not in ended.stderr
