"""How commands talk to people: words and errors on stderr, one JSON object per line on stdout for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from kvferry.errors import FerryError
from kvferry.extras import MissingExtraError, missing_extra

words = Console(stderr=True, highlight=False, markup=False)
"""Everything that is meant for a person to read while they wait."""


_through: list[Callable[[str], None]] = []


def say(text: str) -> None:
    """One line for the person who waits, or for whoever reads what `say_through` was given."""
    for through in _through:
        through(text)
    if not _through:
        words.print(text, markup=False, soft_wrap=True)


def say_through(*through: Callable[[str], None]) -> None:
    """Where nobody but a program reads stderr, what is said goes through these from now on; through none, to people."""
    _through[:] = through


def data(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def tell(error: FerryError) -> None:
    """What is wrong, what was found, what was expected and what to do."""
    if _through:
        say(f"error: {error}")
        return
    words.print(f"error: {error.what}", style="bold red", markup=False, soft_wrap=True)
    for name, text in (("found", error.found), ("expected", error.expected), ("hint", error.hint)):
        if text:
            words.print(f"  {name + ':':<10}{text}", markup=False, soft_wrap=True)


def fail(error: FerryError) -> NoReturn:
    """Tell it, and end with exit code 2."""
    tell(error)
    raise typer.Exit(2)


@contextmanager
def friendly(extras: str = "") -> Iterator[None]:
    """A user's mistake ends with a message, not with a traceback; so does a library of the command's `extras` (with
    commas) that is not installed."""
    try:
        yield
    except MissingExtraError as error:
        # The public API does not know which command needs it.
        cause = error.__cause__
        fail((isinstance(cause, ModuleNotFoundError) and missing_extra(cause, extras)) or error)
    except FerryError as error:
        fail(error)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, extras)
        if missing is None:
            raise
        fail(missing)
