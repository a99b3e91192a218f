"""Child processes that run commands of ours: started, awaited until they announce themselves, restarted, ended."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvferry.cli.environment import all_variables
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

STOP_S = 10.0


class Child:
    """One running child. It ends by itself when this process dies: its standard input closes then.

    `arguments` are those of `kvferry`, its subcommand first; what it says on stderr goes to `log`. `variables` are
    added to this process's environment.
    """

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        log: Path,
        port: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.arguments, self.log, self.variables = name, arguments, log, variables
        subcommand, *others = arguments
        # Ours come first: what follows `--` belongs to the engine.
        ours = ("--json", "--as-child", *(("--port", str(port)) if port is not None else ()))
        try:
            # Whoever cleans /tmp up may have taken the folder of a fleet that has run for long.
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = log.open("ab")
        except OSError as error:
            found, hint = f"{log}: {os_error_text(error)}", "name another folder with --log-dir"
            raise ConfigurationError("cannot write a log", found=found, hint=hint) from error
        with output as stderr:
            # What others have said there before is not its own.
            self._began_at = stderr.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry", subcommand, *ours, *others],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**all_variables(), **variables} if variables else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def has_spoken(self, within_s: float = 0.0) -> bool:
        """Whether the child announces itself, or has ended, after waiting so long for it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            return bool(selector.select(within_s))

    def wait_until_ready(self, deadline: float) -> dict[str, Any]:
        """What the child announces when it can serve. `deadline` is on the monotonic clock.

        Raises ConfigurationError, with the child's own words, when it ends or is not ready in time.
        """
        if not self.has_spoken(max(0.0, deadline - time.monotonic())):
            raise self._failed("did not become ready in time")
        line = self._output.readline()
        if not line:
            # It closes its output a moment before it has said its last word.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            raise self._failed("has exited")
        announced: dict[str, Any] = json.loads(line)
        return announced

    @property
    def _output(self) -> IO[bytes]:
        if self._process.stdout is None:
            raise ConfigurationError(f"{self.name} was started without an output")
        return self._process.stdout

    @property
    def ending(self) -> str:
        """How a child that does not run any more has ended."""
        code = self._process.poll()
        if code is None:
            return "it is still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def terminate(self) -> None:
        """Ask the child to end at once; `stop` waits for it. A signal alone would let it finish what is open."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()

    def drain(self, within_s: float) -> None:
        """Let the child finish what is open, and end; by force when that takes longer."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.stop()

    def stop(self, within_s: float = STOP_S) -> None:
        """Make sure that the child ends, by force when that takes longer. Safe to call twice."""
        self.terminate()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _failed(self, what: str) -> ConfigurationError:
        """The child's own error, if it has told one; else the end of its output."""
        said = b""
        with suppress(OSError):
            said = self.log.read_bytes()[self._began_at :]
        lines = said.decode(errors="replace").strip().splitlines()
        told = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        if not told:
            telling = [line.strip() for line in lines if line.strip(" ^~")]
            shown = " | ".join(telling[-5:])
            hint = f"its full output is in {self.log}"
            return ConfigurationError(f"{self.name} {what} ({self.ending})", found=shown, hint=hint)
        parts = dict(line.strip().split(":", 1) for line in lines[told[-1] :] if ":" in line)
        texts = {name: parts.get(name, "").strip() for name in ("found", "expected", "hint")}
        if told[-1]:
            # Somebody else had something to say before: vLLM, of which the child only knows that it has ended.
            texts["hint"] = "; ".join(filter(None, (texts["hint"], f"its full output is in {self.log}")))
        return ConfigurationError(f"{self.name}: {parts['error'].strip()}", **texts)
