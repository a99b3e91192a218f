"""A command that is the first process of a container: the kernel keeps signals from it that it does not handle."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import DEADLINE_S, eventually

WHY_NOT = "" if os.geteuid() == 0 and shutil.which("unshare") else "a namespace of processes needs root and unshare"


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_it_ends_at_sigterm_before_it_serves(tiny_model):
    words = [sys.executable, "-m", "kvferry", "serve", "--port", "0", "--model", str(tiny_model)]
    # Its parent ends with it, and says how it has.
    parent = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", *words], stdout=subprocess.PIPE)
    try:
        eventually(
            lambda: any(handles_sigterm(child.pid) for child in psutil.Process(parent.pid).children()), "it is up"
        )
        (first,) = psutil.Process(parent.pid).children()
        first.send_signal(signal.SIGTERM)
        assert parent.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert parent.stdout.read() == b""
    finally:
        parent.kill()
        parent.stdout.close()


def handles_sigterm(pid: int) -> bool:
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
