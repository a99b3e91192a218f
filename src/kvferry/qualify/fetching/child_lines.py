"""What a child process says, a line at a time, with a deadline."""

from __future__ import annotations

import select
import subprocess

from kvferry.errors import TransportError


def read_line(process: subprocess.Popen[bytes], within_s: float) -> bytes:
    """The next line of its standard output. Raises TransportError when there is none in time, or it has ended.

    The process must have been started without a buffer: a line that is read to its end leaves nothing behind here.
    """
    pipe = process.stdout
    if pipe is None or not select.select([pipe], [], [], within_s)[0]:
        raise TransportError("the other process does not answer", expected=f"a line within {within_s:g} s")
    if line := pipe.readline():
        return line
    raise TransportError("the other process has ended", found=f"exit code {process.wait()}")
