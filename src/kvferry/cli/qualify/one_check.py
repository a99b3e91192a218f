"""One check, in a process of its own: `python -m kvferry.cli.qualify.one_check MODULE KIND FILE` writes its outcome."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import msgspec

from kvferry.errors import FerryError
from kvferry.extras import MissingExtraError, missing_extra
from kvferry.qualify.outcome import Outcome, failed, skipped
from kvferry.transport.ucx.environment import silence_libraries

# What all checks of devices need, if nothing else is known.
EXTRAS = "engine,kernels"


def outcome_of(module: str, kind: str) -> Outcome:
    """What the check says; whatever it raises is a failure, but for a library that is not installed."""
    try:
        checked: Outcome = import_module(module).run(kind)
    except ModuleNotFoundError as error:
        if missing := missing_extra(error, EXTRAS):
            return skipped("", str(missing))
        return failed("", f"{type(error).__name__}: {error}")
    except MissingExtraError as error:
        return skipped("", str(error))
    except FerryError as error:
        return failed("", str(error))
    except Exception as error:  # noqa: BLE001 - the top of a process: drivers and compilers raise anything
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            return skipped("", f"not enough memory is free: {error}")
        return failed("", f"{type(error).__name__}: {error}")
    return checked


def main(arguments: list[str]) -> None:
    """Write to a file, as libraries say things on standard output."""
    module, kind, file = arguments
    silence_libraries()
    Path(file).write_bytes(msgspec.json.encode(outcome_of(module, kind)))


if __name__ == "__main__":
    main(sys.argv[1:])
