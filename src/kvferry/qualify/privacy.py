"""Takes out of a report what names a machine or a person: hosts, addresses, paths, users.

A report has no field for any of them, but errors of drivers and libraries are texts, which may say anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvferry.qualify.outcome import Outcome
from kvferry.qualify.verdict import Report

PATH: Final = re.compile(r"(?<![\w.:/])(?:~|file:/{2})?/(?:[^\s/:;,'\"<>()\[\]]+/)+[^\s:;,'\"<>()\[\]]*")
IPV4: Final = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\d.])")
IPV6: Final = re.compile(
    r"(?<![\w:])\[?(?:(?:[0-9a-f]{1,4}:)*:[0-9a-f:]*|(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4})\]?(?::\d+)?(?![\w:])",
    re.IGNORECASE,
)
MAC: Final = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)
POINTER: Final = re.compile(r"0x[0-9a-f]{5,}", re.IGNORECASE)
MIN_NAME: Final = 3
"""Shorter names of hosts and users are parts of words."""


def without_names(report: Report, names: Sequence[str]) -> Report:
    """The same report, with `names` (of this host and its user), paths and addresses replaced."""

    def clean(text: str) -> str:
        for pattern, instead in ((PATH, "(path)"), (MAC, "(address)"), (IPV4, "(address)"), (IPV6, "(address)")):
            text = pattern.sub(instead, text)
        text = POINTER.sub("(pointer)", text)
        for name in names:
            if len(name) >= MIN_NAME:
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "(name)", text, flags=re.IGNORECASE)
        return text

    outcomes = tuple(
        Outcome(
            each.check,
            each.result,
            clean(each.words),
            each.figures,
            tuple((clean(name), clean(value)) for name, value in each.facts),
            each.seconds,
        )
        for each in report.outcomes
    )
    return Report(report.format, report.kvferry, report.device, report.verdict, report.result, outcomes, report.seconds)
