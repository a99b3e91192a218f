"""What came of one check: whether it passed, figures beside what is expected of them, and the reason. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Result(StrEnum):
    """`slow`: all bytes are right, but a figure lies below what is expected."""

    PASSED = "passed"
    SLOW = "slow"
    FAILED = "failed"
    SKIPPED = "skipped"


class Figure(msgspec.Struct, frozen=True):
    """One thing that was measured. `share` is that of a limit, which `of` names; below `least` it counts as slow, and
    `expected` is what others have measured. 0 stands for no limit, and for no expectation."""

    name: str
    gigabytes_per_s: float
    share: float = 0.0
    of: str = ""
    expected: float = 0.0
    least: float = 0.0

    @property
    def is_slow(self) -> bool:
        return self.share < self.least

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The figure in words: name, rate, share of what, and what is expected."""
        share = f"{self.share:.0%} of {self.of}" if self.of else ""
        return self.name, f"{self.gigabytes_per_s:.2f}", share, f"{self.expected:.0%}" if self.expected else ""


class Outcome(msgspec.Struct, frozen=True):
    """What came of the check called `check`. `words` says what was seen, why it failed, or why it was skipped. `facts`
    are names and values. Where `applies` is false the check has nothing to say of the kind of device. `left_out` names
    parts of a check that could not be tried here; `words` says why."""

    check: str
    result: Result
    words: str
    figures: tuple[Figure, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    applies: bool = True
    left_out: tuple[str, ...] = ()


def passed(
    check: str,
    words: str,
    figures: tuple[Figure, ...] = (),
    facts: tuple[tuple[str, str], ...] = (),
    left_out: tuple[str, ...] = (),
) -> Outcome:
    """The outcome of a check that found nothing wrong. It counts as slow if a figure is."""
    slow = [figure for figure in figures if figure.is_slow]
    if slow:
        told = "; ".join(f"{each.name}: {each.share:.0%} of {each.of}, expected {each.expected:.0%}" for each in slow)
        return Outcome(check, Result.SLOW, f"{words}; slower than expected: {told}", figures, facts, left_out=left_out)
    return Outcome(check, Result.PASSED, words, figures, facts, left_out=left_out)


def failed(check: str, words: str) -> Outcome:
    """The outcome of a check that failed. `words` says what is wrong."""
    return Outcome(check, Result.FAILED, words)


def skipped(check: str, words: str) -> Outcome:
    """The outcome of a check that was skipped. `words` says why it cannot be checked here."""
    return Outcome(check, Result.SKIPPED, words)
