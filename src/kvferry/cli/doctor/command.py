"""Options of `kvferry doctor`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from kvferry.cli import environment
from kvferry.cli.options import Json, TokenFile, check_unused, command_of, common, is_given, option_of
from kvferry.errors import ConfigurationError

NOT_BESIDE_VLLM_ARGS = ("peer", "token_file", "device", "buffer_device")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What to look at; `device` and `buffer_device` are empty for what is found."""

    peer: Annotated[str, common(help="host:port of a running engine's transfers: test every transport to it.")] = ""
    token_file: TokenFile = ""
    device: Annotated[
        str, typer.Option(help="Device of the engine: cpu, cuda, rocm, xpu or tpu, if not the one found.")
    ] = ""
    buffer_device: Annotated[str, typer.Option(help="Memory to register: cpu, or the device.")] = ""
    vllm_args: Annotated[
        str, typer.Option(help="Arguments of a vllm serve with NixlConnector: print those for kvferry instead.")
    ] = ""
    as_json: Json = False


@command_of(DoctorOptions, "agent")
def doctor(context: typer.Context, options: DoctorOptions) -> int:
    """Check what this machine can do for transfers: what works, what is chosen and why, and what is wrong.

    Exit code: 0, 1 with warnings, 2 with errors.
    """
    for name, expected in (("peer", "host:port"), ("vllm_args", "the arguments of a vllm serve")):
        if is_given(context, name) and not context.params[name].strip():
            raise ConfigurationError(f"{option_of(name)} is empty", expected=expected)
    if options.vllm_args:
        check_unused(context, NOT_BESIDE_VLLM_ARGS, "beside --vllm-args")
        from kvferry.cli.doctor import vllm_arguments

        return vllm_arguments.tell(options.vllm_args, options.as_json)
    from kvferry.cli.doctor import report

    return report.doctor(replace(options, token_file=options.token_file or environment.token_file()))
