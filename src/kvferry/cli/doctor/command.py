"""Options of `kvferry doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import errors_as_messages
from kvferry.cli.options import Json, TokenFile, common


def doctor(
    peer: Annotated[str, common(help="host:port of a running engine's transfers: test every transport to it.")] = "",
    token_file: TokenFile = "",
    device: Annotated[
        str, typer.Option(help="Device of the engine: cpu, cuda, rocm, xpu or tpu, if not the one found.")
    ] = "",
    buffer_device: Annotated[str, typer.Option(help="Memory to register: cpu, or the device.")] = "",
    as_json: Json = False,
) -> None:
    """Check what this machine can do for transfers: what works, what is chosen and why, and what is wrong.

    Exit code: 0, 1 with warnings, 2 with errors.
    """
    with errors_as_messages("agent"):
        from kvferry.cli import environment
        from kvferry.cli.doctor import report

        token = token_file or environment.token_file()
        code = report.doctor(report.DoctorOptions(device, buffer_device, peer, token, as_json))
    raise typer.Exit(code)
