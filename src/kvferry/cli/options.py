"""Options of several commands, the panels of `--help`, and which options were given."""

from __future__ import annotations

import shlex
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from kvferry.errors import ConfigurationError

HERE = "127.0.0.1"


class FailurePolicy(StrEnum):
    """What becomes of a request whose cache does not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


# What most people need stands first, in the panel that typer calls Options.
common = typer.Option
cache = partial(typer.Option, rich_help_panel="Advanced: model and cache")
moving = partial(typer.Option, rich_help_panel="Advanced: cache transfer")
addresses = partial(typer.Option, rich_help_panel="Advanced: addresses")
times = partial(typer.Option, rich_help_panel="Advanced: time limits, in seconds")
access = partial(typer.Option, rich_help_panel="Advanced: access")
output = partial(typer.Option, rich_help_panel="Advanced: output")

Model = Annotated[str, common(help="Model folder or Hugging Face name; tiny is built on this machine.")]
Engine = Annotated[str, common(help="transformers (built in), or vllm; pass vLLM's own options after --.")]
Digest = Annotated[str, moving(help="How much of a received cache is verified: sampled, full or off.")]
Transport = Annotated[str, common(help="auto, shm, cma, tcp or nixl.")]
Strategy = Annotated[str, moving(help="How caches are copied: auto, direct, scatter or pack.")]
TransferDirection = Annotated[
    str, moving(help="pull (the decode engine reads), push (the prefill engine writes) or auto.")
]
Host = Annotated[str, common(help="Address to listen on.")]
TokenFile = Annotated[str, common(help="File with the shared token; else KVFERRY_TOKEN_FILE.")]
ApiKey = Annotated[list[str], access(help="API key that clients need; repeatable. Else KVFERRY_API_KEY.")]
AllowedOrigins = Annotated[list[str], access(help="Web origin that browsers may come from, or *; repeatable.")]
AllowedMethods = Annotated[list[str], access(help="HTTP method for those origins; repeatable.")]
AllowedHeaders = Annotated[list[str], access(help="Request header for those origins; repeatable.")]
AllowCredentials = Annotated[bool, access("--allow-credentials", help="Those origins may send cookies.")]
Drain = Annotated[float, times(min=0.0, max=86400.0, help="Limit for open requests and leases after SIGTERM.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Child = Annotated[bool, typer.Option("--as-child", hidden=True, help="Exit when standard input closes.")]


def check_unused(context: typer.Context, names: tuple[str, ...], beside: str) -> None:
    """Raises ConfigurationError for an option that would do nothing beside another."""
    given = [f"--{name.replace('_', '-')}" for name in names if is_given(context, name)]
    if given:
        hint = "leave one of them out"
        raise ConfigurationError(f"these options have no effect {beside}", found=", ".join(given), hint=hint)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line; otherwise its default applies."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_words(context: typer.Context, without: tuple[str, ...]) -> str:
    """The command line without some of its options, quoted for a shell."""
    words = ["kvferry", str(context.info_name)]
    for name, value in context.params.items():
        if name not in without and is_given(context, name):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
