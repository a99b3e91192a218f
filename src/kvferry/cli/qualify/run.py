"""Runs checks one after another, each in a process of its own that is ended when it takes too long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvferry.cli.qualify.checks import Check
from kvferry.cli.watchdog import watchdog
from kvferry.qualify.outcome import Outcome, Result, failed, skipped

TOTAL_S: Final = 600.0
LEAST_S: Final = 5.0
"""No check begins with less time than this left."""
STOP_S: Final = 10.0
LAST_WORDS: Final = 300
MOST_READ: Final = 10_000
"""The end of a log of which the last words are taken. To clean a long word takes time with the square of its length."""
NOT_ENDED: Final = "it has not ended"
NOT_ASKED_FOR: Final = "left out by --only"

Tell = Callable[[str], None]
Clean = Callable[[Outcome], Outcome]


def outcomes(
    checks: Sequence[Check], kind: str, tell: Tell, clean: Clean, total_s: float = TOTAL_S
) -> Iterator[Outcome]:
    """Run all checks within `total_s` altogether, and yield each outcome after `clean`. Where the machine itself is not
    fit, nothing else is tried."""
    deadline = time.monotonic() + total_s
    unfit, over = "", f"the {total_s / 60:.3g} minutes are over"
    for number, check in enumerate(checks, 1):
        tell(f"[{number}/{len(checks)}] {check.name} …")
        found = clean(_outcome(check, kind, unfit, deadline - time.monotonic(), over, clean))
        if check is checks[0] and found.result is Result.FAILED:
            unfit = f"{check.name}: {found.words}"
        tell(f"    {found.result}: {found.words}")
        yield found


def not_asked_for(check: Check, kind: str) -> Outcome:
    """The outcome of a check that is not run, so that nobody takes its absence for a pass."""
    return _not_for(check, kind) or skipped(check.name, NOT_ASKED_FOR)


def _not_for(check: Check, kind: str) -> Outcome | None:
    if reason := check.not_for.get(kind, ""):
        return msgspec.structs.replace(skipped(check.name, reason), applies=False)
    return None


def _outcome(check: Check, kind: str, unfit: str, left_s: float, over: str, clean: Clean) -> Outcome:
    if silent := _not_for(check, kind):
        return silent
    if unfit or left_s < LEAST_S:
        return skipped(check.name, unfit or over)
    found = _timed(check, kind, min(check.limit_s, left_s), clean)
    is_cut_off = found.words.startswith(NOT_ENDED) and left_s < check.limit_s
    return skipped(check.name, over) if is_cut_off else found


def _timed(check: Check, kind: str, limit_s: float, clean: Clean) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-qualify-") as folder:
        found = _run(check, kind, limit_s, Path(folder), clean)
    return msgspec.structs.replace(found, check=check.name, seconds=round(time.monotonic() - began, 1))


def _run(check: Check, kind: str, limit_s: float, folder: Path, clean: Clean) -> Outcome:
    told, log = folder / "outcome.json", folder / "log"
    command = [sys.executable, "-m", "kvferry.cli.qualify.one_check", check.module, kind, str(told)]
    with log.open("wb") as output:
        # A group of its own, with whatever the check starts.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with watchdog(process.pid):
                process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return failed(check.name, f"{NOT_ENDED} within {limit_s:.0f} s: does the device hang?")
        finally:
            _end(process)
    if told.exists():
        return msgspec.json.decode(told.read_bytes(), type=Outcome)
    return failed(check.name, f"its process has ended ({_ending(process.returncode)}): {_last_words(log, clean)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a check and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # What hangs inside a driver is not ended by anything; it is left behind.
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_words(log: Path, clean: Clean) -> str:
    """The end of what it has said. It is cleaned before it is cut: half of a path or a name is none for `clean`."""
    text = " ".join(_last_lines(log).split())
    return clean(failed("", text)).words[-LAST_WORDS:] or "it has said nothing"


def _last_lines(log: Path) -> str:
    """Whole lines from the end of a log, of `MOST_READ` bytes at most."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - MOST_READ - 1, 0))
        end = file.read()
    if size > MOST_READ:
        # The first line is cut.
        ended = re.search(rb"[\r\n]", end)
        end = end[ended.end() :] if ended else b"(a line too long to be shown)"
    return end.decode("utf-8", errors="replace")
