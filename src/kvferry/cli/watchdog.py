"""A process that outlives this one for a moment, however this one ends, and kills what it would leave behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Nothing is written to its input, which ends with the process that holds the other end.
PROGRAM = """
import contextlib, os, signal, sys
sys.stdin.read()
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


@contextmanager
def watchdog(group: int) -> Iterator[None]:
    """While this is open, the end of this process is that of a process group, whose leader has the process id `group`.
    Servers of other projects do not notice that whoever has started them was killed: they keep port and device."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(group)]
    # A group of its own: what a terminal sends to ours does not end it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as process:
        try:
            yield
        finally:
            process.kill()
