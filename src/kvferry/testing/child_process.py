"""Another process, with which lines are exchanged."""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Self

from kvferry.errors import TransportError


class ChildProcess:
    """A process that is started at once. Use it as a context manager: it is killed at the end."""

    def __init__(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        stderr: IO[bytes] | None = None,
    ) -> None:
        """`pass_fds` are open files of this process that the other one inherits; `stderr` gets what it says on its
        standard error, which is ours otherwise."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0, pass_fds=pass_fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def write_line(self, line: bytes) -> None:
        """Write a line to its standard input. A process that has ended reads none, which `read_line` tells."""
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + b"\n")

    def read_line(self, within_s: float) -> bytes:
        """The next line of its standard output. Raises TransportError when there is none in time, or it has ended.

        It answers line by line: two lines that come at once would be lost.
        """
        pipe = self._process.stdout
        if pipe is None or not select.select([pipe], [], [], within_s)[0]:
            raise TransportError("the other process does not answer", expected=f"a line within {within_s:g} s")
        if line := pipe.readline():
            return line
        raise TransportError("the other process has ended", found=f"exit code {self._process.wait()}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def close_input(self) -> None:
        """Tell a process that ends with its standard input to end."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, within_s: float) -> None:
        """Wait until it has ended; after so many seconds it is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
