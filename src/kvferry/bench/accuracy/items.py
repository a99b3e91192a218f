"""What both servers are asked: prompts, one JSON object a line. Pure.

`{"prompt": "The ferry leaves at", "name": "ferry-1", "reference": " noon every day.", "answer": "noon"}`: only `prompt`
is needed. `reference` is a text that could follow, of which both servers say how likely it is; `answer` is what a right
answer begins with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import ConfigurationError

MAX_ITEMS = 10_000
EXAMPLE = '{"prompt": "…"} on each line, and if you like "name", "reference" and "answer"'


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt. `name` is the number of its line where the file gives none."""

    prompt: Annotated[str, Meta(min_length=1)]
    name: str = ""
    reference: str = ""
    answer: str = ""

    @property
    def has_answer(self) -> bool:
        """Whether it is known what a right answer begins with."""
        return bool(self.answer.strip())


def read_items(lines: Iterable[str]) -> tuple[Item, ...]:
    """The prompts in lines of JSON, one object each. Raises ConfigurationError that names the line."""
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=Item)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"line {number} of the prompts is wrong", found=str(error), expected=EXAMPLE
            ) from None
        items.append(item if item.name else msgspec.structs.replace(item, name=str(number)))
    names = Counter(item.name for item in items)
    if twice := next((name for name, count in names.items() if count > 1), ""):
        raise ConfigurationError("two prompts have the same name", found=twice, expected="a name of its own for each")
    if not 0 < len(items) <= MAX_ITEMS:
        raise ConfigurationError("no prompts, or too many", found=str(len(items)), expected=f"1 to {MAX_ITEMS}")
    return tuple(items)


def shipped_items() -> tuple[Item, ...]:
    """The prompts of kvferry: 4 to 7,000 tokens each of questions, stories, code and tables, in several languages."""
    return read_items(
        resources.files("kvferry.bench.accuracy").joinpath("prompts.jsonl").read_text("utf-8").splitlines()
    )
