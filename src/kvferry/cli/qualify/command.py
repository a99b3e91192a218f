"""Options of `kvferry qualify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from kvferry.cli.options import Json, command_of, common, output


@dataclass(frozen=True, slots=True)
class QualifyOptions:
    """What to check; an empty `device` is the one that is found."""

    device: Annotated[str, common(help="Kind of device: cpu, cuda, rocm, xpu or tpu, if not the one found.")] = ""
    only: Annotated[list[str], common(help="Run this check, and no other that is not named as well; repeatable.")] = (
        field(default_factory=list)
    )
    page: Annotated[str, output(help="HTML file to write, without names of hosts, addresses or paths.")] = (
        "kvferry-qualify.html"
    )
    as_json: Json = False


@command_of(QualifyOptions)
def qualify(context: typer.Context, options: QualifyOptions) -> int:
    """Check within ten minutes whether kvferry is right and fast with this machine's devices, and say so on one page.

    Exit code: 0, 1 where something is slower than expected, 2 where something is wrong, 3 where nothing was checked.
    """
    from kvferry.cli.qualify import report

    return report.qualify(options)
