"""Output of commands: messages and errors on stderr, one JSON object per line on stdout, pages in files."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console

from kvferry.errors import ConfigurationError, FerryError
from kvferry.extras import MissingExtraError, missing_extra
from kvferry.system import os_error_text

PAGES = (".html", ".htm")

stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Messages for people: progress, warnings, errors."""


_through: list[Callable[[str], None]] = []


def say(text: str) -> None:
    """Print one line of progress on stderr, or send it where `redirect_messages` has set."""
    for through in _through:
        through(text)
    if not _through:
        stderr.print(text, markup=False, soft_wrap=True)


def redirect_messages(*through: Callable[[str], None]) -> None:
    """Send messages to these functions instead of stderr; without any, to stderr again."""
    _through[:] = through


def data(value: Mapping[str, Any]) -> None:
    """Write one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def announce(as_json: bool, text: str, **facts: str) -> None:
    """Say that a server is ready: by `text` for people, or by a JSON object with `facts` for programs."""
    if as_json:
        data({"event": "ready", **facts})
    else:
        say(text)


def flush_or_discard(*outputs: TextIO) -> None:
    """Write what is left in their buffers, or nothing more where that fails, as to a terminal that is closed.

    Python would try once more when it ends, and exit with code 120.
    """
    for output in outputs:
        try:
            output.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)


def print_error(error: FerryError) -> None:
    """Print what is wrong, what was found, what was expected and what to do."""
    if _through:
        say(f"error: {error}")
        return
    stderr.print(f"error: {error.what}", style="bold red", markup=False, soft_wrap=True)
    for name, text in (("found", error.found), ("expected", error.expected), ("hint", error.hint)):
        if text:
            stderr.print(f"  {name + ':':<10}{text}", markup=False, soft_wrap=True)


def fail(error: FerryError) -> NoReturn:
    """Print the error, and exit with code 2."""
    print_error(error)
    raise typer.Exit(2)


@contextmanager
def errors_as_messages(extras: str = "") -> Iterator[None]:
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


def page_file(path: str) -> Path | None:
    """The HTML file that a command is asked to write, if it is; to be called before anything is computed or measured.

    Raises ConfigurationError when the file is not HTML, or cannot be written where it is to be.
    """
    if not path:
        return None
    page, folder = Path(path), Path(path).absolute().parent
    if page.suffix.lower() not in PAGES:
        what, hint = "the page must be an HTML file", "for another format, open the page in a browser and print it"
        raise ConfigurationError(what, found=path, expected="a name that ends in .html", hint=hint)
    # Not the method of `Path`, which raises OSError for a name that is too long.
    if not os.path.isdir(folder):
        raise ConfigurationError("the folder does not exist", found=str(folder), hint="create the folder first")
    if trouble := _why_unwritable(page):
        what, hint = "the page cannot be written", "name another file"
        raise ConfigurationError(what, found=f"{path}: {trouble}", hint=hint)
    return page


def _why_unwritable(page: Path) -> str:
    """Why there can be no such file, in words; empty where there can be one."""
    where = page
    try:
        if stat.S_ISDIR(page.stat().st_mode):
            return "a folder"
    except FileNotFoundError:
        where = page.absolute().parent
    except OSError as error:
        return os_error_text(error)
    return "" if os.access(where, os.W_OK) else os.strerror(errno.EACCES)


def write_page(page: Path, text: str) -> None:
    """Write the page, and say so. Raises ConfigurationError when that fails."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        found = f"{page}: {os_error_text(error)}"
        raise ConfigurationError("cannot write the page", found=found, hint="name a file in a folder") from error
    say(f"wrote {page}")
