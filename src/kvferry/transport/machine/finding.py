"""A finding about this machine or a transport: its severity, what was found, and what would fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import FerryError


class Severity(StrEnum):
    """`note`: worth knowing. `warning`: it works, but slower or less safely than it could. `error`: it does not."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `expected` may be empty where nothing is wrong; every other finding has a `hint`."""

    severity: Severity
    what: str
    found: str
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        rest = (("found", self.found), ("expected", self.expected), ("hint", self.hint))
        return "; ".join([self.what, *(f"{name}: {text}" for name, text in rest if text)])


def finding_of(error: FerryError, severity: Severity = Severity.ERROR) -> Finding:
    """An error as a finding."""
    return Finding(severity, error.what, error.found, error.expected, error.hint)


def worst(findings: Iterable[Finding]) -> Severity:
    """The most severe of all; `ok` for none."""
    order = tuple(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
