"""Takes out of outcomes what names a machine or a person: hosts, addresses, paths, users.

An outcome has no field for any of them, but errors of drivers and libraries are texts, which may say anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvferry.qualify.outcome import Outcome

DOMAINS: Final = "local|localdomain|lan|internal|intranet|intra|corp|home|private|com|net|org|edu|gov"
IN_PATH: Final = r"[^\s:;,'\"<>()\[\]]"
INSTEAD: Final = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*:/{2,3}[^\s'\"<>,;)]+", re.IGNORECASE), "(URL)"),
    # Python puts names of files into quotes: they may have spaces.
    (re.compile(r"(['\"])(?:~\w*|\.{1,2})?/(?:(?!\1).)*\1"), r"\1(path)\1"),
    # From a slash that divides no two words, a home or a folder above, to the end of the word; or, since names of
    # folders may have spaces, to the end of one of the next words that has a slash, too.
    (
        re.compile(rf"(?:~\w*|\.{{1,2}}|(?<![\w/)\]-]))/{IN_PATH}+(?: (?:{IN_PATH}+ ){{0,2}}{IN_PATH}*/{IN_PATH}*)*"),
        "(path)",
    ),
    (re.compile(r"\w[\w.-]*(?:/[\w.-]+){2,}"), "(path)"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "(number)"),
    (re.compile(r"(?<!\w)(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE), "(address)"),
    # Libraries of CUDA have versions of four numbers.
    (
        re.compile(
            r"(?<![\w.])(?<!==)(?<!version )(?<!cudnn )(?<!cublas )(?<!cusparselt )(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?"
            r"(?!\.?\d)",
            re.IGNORECASE,
        ),
        "(address)",
    ),
    (
        re.compile(
            r"(?<!\w)\[?(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4})*::[0-9a-f:]*|::[0-9a-f][0-9a-f:]*"
            r"|(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4})\]?(?::\d+)?(?![\w:])",
            re.IGNORECASE,
        ),
        "(address)",
    ),
    (re.compile(r"\b(?:[a-z0-9-]+\.){2,}[a-z]{2,}\b(?::\d+)?", re.IGNORECASE), "(host)"),
    # Of two words with a dot between them most are modules and files.
    (re.compile(rf"\b[a-z0-9-]+\.(?:{DOMAINS})\b(?!\.\w)(?::\d+)?", re.IGNORECASE), "(host)"),
    (re.compile(r"\bip-\d+-\d+-\d+-\d+\b"), "(host)"),
    (re.compile(r"0x[0-9a-f]{4,}|\b(?=[a-f]*\d)[0-9a-f]{10,}\b", re.IGNORECASE), "(number)"),
)
MIN_NAME: Final = 2
"""A single letter is part of every text."""


def cleaner(names: Sequence[str]) -> Callable[[Outcome], Outcome]:
    """What replaces `names` (of this host and its user), paths and addresses in an outcome."""
    known = sorted({name for name in names if len(name) >= MIN_NAME}, key=len, reverse=True)
    own = [(re.compile(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", re.IGNORECASE), "(name)") for name in known]

    def text_without(text: str) -> str:
        # Names come last: one amid a path would hide from the pattern that the rest belongs to a path.
        for pattern, instead in (*INSTEAD, *own):
            text = pattern.sub(instead, text)
        return text

    def clean(outcome: Outcome) -> Outcome:
        facts = tuple((text_without(name), text_without(value)) for name, value in outcome.facts)
        return msgspec.structs.replace(outcome, words=text_without(outcome.words), facts=facts)

    return clean
