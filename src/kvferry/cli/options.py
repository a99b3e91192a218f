"""Options that several commands have, and the panels in which `--help` shows options together."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

__all__ = [
    "HERE",
    "Child",
    "Digest",
    "Drain",
    "Engine",
    "FailurePolicy",
    "Host",
    "Json",
    "Model",
    "Strategy",
    "TokenFile",
    "Transport",
    "TransferDirection",
    "addresses",
    "cache",
    "moving",
    "output",
    "routers",
    "times",
]

HERE = "127.0.0.1"


class FailurePolicy(StrEnum):
    """What becomes of a request whose cache does not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


cache = partial(typer.Option, rich_help_panel="Model and cache")
moving = partial(typer.Option, rich_help_panel="How caches move")
addresses = partial(typer.Option, rich_help_panel="Addresses")
times = partial(typer.Option, rich_help_panel="Time limits, in seconds")
routers = partial(typer.Option, rich_help_panel="Joining routers")
output = partial(typer.Option, rich_help_panel="Output")

Model = Annotated[str, cache(help="Folder or Hugging Face name; `tiny` is made on this machine.")]
Engine = Annotated[str, cache(help="transformers (built in) or vllm; options of vLLM go behind --.")]
Digest = Annotated[str, moving(help="What a decode engine compares: sampled, full (every byte) or off.")]
Transport = Annotated[str, moving(help="auto, shm, cma, tcp or nixl.")]
Strategy = Annotated[str, moving(help="How a decode engine gets caches: auto, direct, scatter or pack.")]
TransferDirection = Annotated[
    str, moving(help="Who moves caches: pull (the decode engine), push (the prefill engine), or auto.")
]
Host = Annotated[str, addresses(help="Address to listen on.")]
TokenFile = Annotated[str, addresses(help="The token that all engines share; else KVFERRY_TOKEN_FILE.")]
Drain = Annotated[float, times(min=0.0, max=86400.0, help="What open requests and leases have after SIGTERM.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Child = Annotated[bool, typer.Option("--as-child", hidden=True, help="End when standard input closes.")]
