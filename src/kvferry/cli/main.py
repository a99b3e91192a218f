"""The `kvferry` command."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kvferry import __version__
from kvferry.cli.bench.command import app as bench
from kvferry.cli.console import flush_or_discard, print_error
from kvferry.cli.doctor.command import doctor
from kvferry.cli.plan.command import plan
from kvferry.cli.qualify.command import qualify
from kvferry.cli.route.command import route
from kvferry.cli.serve.command import serve
from kvferry.cli.simulate.command import app as simulate
from kvferry.cli.top.command import top
from kvferry.cli.up.command import up
from kvferry.errors import ConfigurationError
from kvferry.system import allow_many_descriptors, os_error_text

UTF8 = "set PYTHONIOENCODING=utf-8, or a locale with UTF-8"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Move a request's KV cache from the engine that computed it to the engine that needs it.",
)
# What follows -- is for another program.
app.command(context_settings={"allow_extra_args": True})(up)
app.command(context_settings={"allow_extra_args": True})(serve)
app.command()(route)
app.command()(top)
app.command()(plan)
app.command()(doctor)
app.command()(qualify)
app.add_typer(bench, name="bench")
app.add_typer(simulate, name="simulate")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Move a request's KV cache from the engine that computed it to the engine that needs it."""
    if show:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    if os.getpid() == 1:
        # In a container: the kernel keeps the signals from process 1 that it has no handler for.
        signal.signal(signal.SIGTERM, _end)
    allow_many_descriptors()
    # Whoever started us may have closed them, in this order.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except UnicodeEncodeError as error:
        found = f"its encoding is {error.encoding}"
        print_error(ConfigurationError("the encoding of the output lacks some characters", found=found, hint=UTF8))
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        flush_or_discard(sys.stdout)
        # It may be this very output that cannot.
        with suppress(OSError):
            print_error(ConfigurationError("the output cannot be written", found=os_error_text(error)))
        raise SystemExit(2) from None
    finally:
        flush_or_discard(sys.stdout, sys.stderr)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
