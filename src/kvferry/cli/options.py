"""Options that several commands have, and the panels in which `--help` shows options together."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

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
