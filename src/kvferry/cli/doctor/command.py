"""Options of `kvferry doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import friendly
from kvferry.cli.options import Json, TokenFile, addresses

__all__ = ["doctor"]


def doctor(
    peer: Annotated[str, addresses(help="host:port of a running engine's transfers, to test the way to it.")] = "",
    token_file: TokenFile = "",
    device: Annotated[str, typer.Option(help="Where the engine computes: cpu, cuda, rocm, xpu, tpu; else found.")] = "",
    buffer_device: Annotated[str, typer.Option(help="Whose memory is registered: cpu, or the device.")] = "",
    as_json: Json = False,
) -> None:
    """Say what this machine can do for transfers, what is chosen and why, and what is wrong.

    Exit code 0 when nothing is, 1 with warnings, 2 with errors.
    """
    with friendly("agent"):
        from kvferry.cli import environment
        from kvferry.cli.doctor import report

        token = token_file or environment.token_file()
        code = report.doctor(report.DoctorOptions(device, buffer_device, peer, token, as_json))
    raise typer.Exit(code)
