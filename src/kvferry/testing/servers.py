"""`kvferry` commands as servers that end with whoever started them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from kvferry.errors import ConfigurationError, TransportError
from kvferry.system import os_error_text
from kvferry.testing.child_process import ChildProcess

READY_S = 600.0
STOP_S = 30.0


@contextmanager
def running(*commands: Sequence[str], prefix: Sequence[str] = (), ready_s: float = READY_S) -> Iterator[list[str]]:
    """Start `kvferry` commands side by side, such as `("serve", "--port", "0")`, and give the URL of each once all can
    serve, within `ready_s` seconds. They end with the block; also with this process, however it ends.

    `prefix` is a program that starts them, such as one that enters a network namespace. Raises ConfigurationError, with
    the last words of the command, when one has ended or cannot serve in time.
    """
    with ExitStack() as stack:
        # Entered first, to be left last: all are asked to end before one is waited for.
        waiting = stack.enter_context(ExitStack())
        servers = [_started(command, prefix, stack, waiting) for command in commands]
        deadline = time.monotonic() + ready_s
        yield [server.url(deadline) for server in servers]


@dataclass(frozen=True, slots=True)
class _Server:
    command: Sequence[str]
    process: ChildProcess
    log: IO[bytes]

    def url(self, deadline: float) -> str:
        """What the command's only line says."""
        try:
            line = self.process.read_line(max(0.0, deadline - time.monotonic()))
        except TransportError as error:
            self.log.seek(0)
            words = self.log.read().decode(errors="replace").strip()
            raise _not_started(self.command, words[-1500:] or error.what) from None
        try:
            return str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError):
            raise _not_started(self.command, line.decode(errors="replace")) from None


def _not_started(command: Sequence[str], found: str) -> ConfigurationError:
    return ConfigurationError(f"this did not start: kvferry {' '.join(command)}", found=found)


def _started(command: Sequence[str], prefix: Sequence[str], closing: ExitStack, waiting: ExitStack) -> _Server:
    subcommand, *options = command
    # As a child it ends when its standard input closes: also when this process is killed.
    words = [*prefix, sys.executable, "-m", "kvferry", subcommand, "--json", "--as-child", *options]
    log: IO[bytes] = waiting.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    try:
        process = ChildProcess(words, stderr=log)
    except OSError as error:
        raise _not_started(command, os_error_text(error)) from error
    waiting.callback(process.wait, STOP_S)
    closing.callback(process.close_input)
    return _Server(command, process, log)
