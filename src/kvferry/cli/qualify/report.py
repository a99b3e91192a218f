"""`kvferry qualify`: the verdict, a table, JSON, and a page that people can send."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvferry import __version__
from kvferry.cli import console
from kvferry.cli.qualify.checks import CHECKS, Check
from kvferry.cli.qualify.command import QualifyOptions
from kvferry.cli.qualify.run import not_asked_for, outcomes
from kvferry.cli.signals import end_as_ctrl_c
from kvferry.errors import ConfigurationError
from kvferry.extras import INCLUDED, MissingExtraError, how_to_install, missing_modules
from kvferry.qualify.expected import GPUS
from kvferry.qualify.outcome import Result
from kvferry.qualify.page import page
from kvferry.qualify.privacy import cleaner
from kvferry.qualify.verdict import Report, report_of
from kvferry.staging.device.table import devices, load_devices
from kvferry.transport.memory_kind import HOST

EXIT_CODES: Final = {Result.PASSED: 0, Result.SLOW: 1, Result.FAILED: 2, Result.SKIPPED: 3}
VENDORS: Final = dict.fromkeys(("rocm", "xpu"), ", after torch and its Triton from the index of that vendor's builds")
FIND: Final = "kvferry.qualify.find_device"
FIND_S: Final = 120.0
STYLES: Final = {Result.PASSED: "green", Result.SLOW: "yellow", Result.FAILED: "bold red", Result.SKIPPED: "dim"}


def qualify(options: QualifyOptions) -> int:
    """Run the checks, print what came of them, write the page; the exit code. Raises ConfigurationError for options
    that make no sense, before anything is run."""
    end_as_ctrl_c()
    checks, file = _checks(options.only), console.page_file(options.page)
    kind = _kind(options.device)
    _check_installed(kind)
    reached = "" if options.device else ": no accelerator is reached here"
    console.say(f"checking {kind} devices" if kind != HOST else f"checking memory of the host{reached}")
    began = time.monotonic()
    found = list(outcomes(checks, kind, console.say, cleaner(_names())))
    found += [not_asked_for(check, kind) for check in CHECKS if check not in checks]
    report = report_of(__version__, kind, found, time.monotonic() - began)
    if options.as_json:
        console.data(as_json(report))
    else:
        show(report, Console(markup=False, emoji=False, highlight=False))
    if file is not None:
        console.write_page(file, page(report))
    return EXIT_CODES[report.result]


def as_json(report: Report) -> dict[str, Any]:
    """What `--json` prints."""
    told: dict[str, Any] = msgspec.to_builtins(report)
    return told


def show(report: Report, out: Console) -> None:
    """Print the checks, their figures if there are any, and then the verdict."""
    table = Table(title="Checks", title_justify="left")
    for name in ("check", "result", "what was seen"):
        table.add_column(name, overflow="fold")
    for outcome in report.outcomes:
        table.add_row(outcome.check, outcome.result, outcome.words, style=STYLES[outcome.result])
    out.print(table)
    if any(outcome.figures for outcome in report.outcomes):
        out.print(_figures(report))
    out.print(report.verdict, style=STYLES[report.result], soft_wrap=True)


def _figures(report: Report) -> Table:
    table = Table(title="Figures", title_justify="left")
    table.add_column("")
    for name in ("GB/s", "share", "expected"):
        table.add_column(name, justify="right")
    for outcome in report.outcomes:
        for figure in outcome.figures:
            table.add_row(*figure.cells, style="yellow" if figure.is_slow else "")
    return table


def _kind(wanted: str) -> str:
    """The device to check: what is asked for, or the first that the libraries here reach. Raises ConfigurationError for
    one that nobody knows, MissingExtraError without torch."""
    load_devices()
    if wanted and wanted not in devices():
        raise ConfigurationError("unknown device", found=wanted, expected=" or ".join(devices()))
    if wanted:
        return wanted
    _check_installed(HOST)
    return _found_here()


def _found_here() -> str:
    """The device that a child process finds, which loads libraries for it. Raises ConfigurationError if it fails."""
    command = [sys.executable, "-m", FIND]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIND_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        what, hint = "the devices of this machine cannot be told", "name one with --device, such as cpu"
        raise ConfigurationError(what, found=type(error).__name__, hint=hint) from error
    return done.stdout.split()[-1]


def _checks(only: Sequence[str]) -> tuple[Check, ...]:
    """The checks to run. The first is always among them: it says what the machine is, which every report needs."""
    names = [check.name for check in CHECKS]
    if unknown := [name for name in only if name not in names]:
        raise ConfigurationError("no such check", found=", ".join(unknown), expected=", ".join(names))
    return tuple(check for at, check in enumerate(CHECKS) if not only or check.name in only or at == 0)


def _check_installed(kind: str) -> None:
    """Raises MissingExtraError where half of the checks would say so one by one."""
    needed = ["engine", "kernels"] if kind in GPUS else ["engine", "jax"] if kind == "tpu" else ["engine"]
    parts = [part for extra in needed for part in (*INCLUDED.get(extra, ()), extra)]
    if missing := [module for part in parts for module in missing_modules(part)]:
        command = how_to_install(",".join(needed)) + VENDORS.get(kind, "")
        raise MissingExtraError(f"the checks need {', '.join(dict.fromkeys(missing))}, not installed here: {command}")


def _names() -> tuple[str, ...]:
    """What this host and its user are called."""
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    return tuple(dict.fromkeys((host, host.partition(".")[0], user)))
