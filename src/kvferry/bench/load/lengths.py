"""How many tokens: a number or a range, as the command line says it."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `low` to `high`, both included, each as likely as the other."""

    low: int
    high: int

    def draw(self, chooser: random.Random) -> int:
        return chooser.randint(self.low, self.high)


def lengths_named(text: str) -> Lengths:
    """`512` or `256-1024`. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text.strip(), re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigurationError("invalid number of tokens", found=text, expected="such as 512 or 256-1024")
    return Lengths(low, high)
