"""Prefill engines, decode engines and a router as child processes of one command."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from kvferry.cli import console
from kvferry.cli.processes import Child, Command
from kvferry.errors import ConfigurationError

__all__ = ["Fleet", "FleetOptions"]

READY_S = 240.0
MAX_RESTARTS = 20


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Which engines to start. `engine_arguments` are common to all; the block sizes are tokens per block."""

    num_prefill: int
    num_decode: int
    engine_arguments: tuple[str, ...]
    prefill_block_tokens: int
    decode_block_tokens: int
    cache_tokens: int
    port: int


class Fleet:
    """Starts everything, restarts an engine that has died, and leaves nothing running."""

    def __init__(self, options: FleetOptions, logs: Path) -> None:
        self._options = options
        self._logs = logs
        self._engines: list[Child] = []
        self._routers: list[Child] = []
        self._num_restarts = 0
        self.model = ""
        self.url = ""
        self.prefill_urls: tuple[str, ...] = ()
        self.decode_urls: tuple[str, ...] = ()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._routers, *self._engines]:
            child.stop()

    def start(self) -> None:
        """Start the engines side by side, then the router. Raises ConfigurationError when one of them cannot."""
        options = self._options
        prefill = [self._command("prefill", i, options.prefill_block_tokens) for i in range(options.num_prefill)]
        decode = [self._command("decode", i, options.decode_block_tokens) for i in range(options.num_decode)]
        self._engines = [Child(command) for command in (*prefill, *decode)]
        deadline = time.monotonic() + READY_S
        urls = []
        for index, child in enumerate(self._engines):
            ready = child.wait_until_ready(deadline)
            console.say(f"{child.command.name} is ready at {ready['url']} (process {child.pid})")
            urls.append(str(ready["url"]))
            self.model = str(ready["model"])
            self._engines[index].command = _at_port(child.command, urlsplit(urls[-1]).port or 0)
        self.prefill_urls = tuple(urls[: options.num_prefill])
        self.decode_urls = tuple(urls[options.num_prefill :])
        self._start_router(deadline)

    def mend(self) -> None:
        """Start engines again that have ended; the router finds them at their old addresses."""
        for index, child in enumerate(self._engines):
            if child.running:
                continue
            child.stop()
            self._num_restarts += 1
            if self._num_restarts > MAX_RESTARTS:
                raise ConfigurationError("engines keep dying", hint=f"their output is in {self._logs}")
            console.say(f"{child.command.name} has died; starting it again")
            self._engines[index] = Child(child.command)
            self._engines[index].wait_until_ready(time.monotonic() + READY_S)
            console.say(f"{child.command.name} is ready again (process {self._engines[index].pid})")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.command.name: child.pid for child in (*self._engines, *self._routers)}

    @property
    def routing(self) -> bool:
        """Whether the router still runs."""
        return all(child.running for child in self._routers)

    def _command(self, role: str, number: int, block_tokens: int) -> Command:
        name = f"{role}-{number}"
        num_blocks = -(-self._options.cache_tokens // block_tokens)
        sizes = ("--block-tokens", str(block_tokens), "--num-blocks", str(num_blocks))
        arguments = ("serve", "--engine-id", name, *self._options.engine_arguments, *sizes)
        return Command(name, (*arguments, "--port", "0"), self._logs / f"{name}.log")

    def _start_router(self, deadline: float) -> None:
        engines = [("--prefill", url) for url in self.prefill_urls] + [("--decode", url) for url in self.decode_urls]
        arguments = [word for pair in engines for word in pair]
        command = ("route", *arguments, "--port", str(self._options.port))
        self._routers = [Child(Command("router", command, self._logs / "router.log"))]
        self.url = str(self._routers[0].wait_until_ready(deadline)["url"])
        console.say(f"router is ready at {self.url}/v1")


def _at_port(command: Command, port: int) -> Command:
    return replace(command, arguments=(*command.arguments[:-1], str(port)))
