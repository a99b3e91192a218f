"""Prefill engines, decode engines and a router as child processes of one command."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvferry.cli import console
from kvferry.cli.child_processes import STOP_S, Child
from kvferry.cli.server import listening
from kvferry.cli.up.machine_share import Share
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side

HOST = "127.0.0.1"
READY_S = 240.0
POLL_S = 0.05
# More deaths than this within that time mean that starting again does not help.
MAX_RESTARTS = 20
RESTARTS_WITHIN_S = 300.0
# Who has not come up again is tried again after that, then after twice as long each time: its port or its memory may be
# somebody else's for a while.
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Which engines to start. `engine_arguments` are common to all; `passed` comes last on their command lines, for the
    programs that are the engines. Some engines serve in one role, as long as they run (`has_roles`). Where engines
    share a machine, `shares` says what each gets of it, prefill engines first.

    The block sizes are tokens per block, `cache_tokens` what a cache holds; 0 leaves either to the engine. All must be
    ready within `ready_s`.
    """

    num_prefill: int
    num_decode: int
    engine_arguments: tuple[str, ...]
    prefill_block_tokens: int
    decode_block_tokens: int
    cache_tokens: int
    port: int
    ready_s: float = READY_S
    has_roles: bool = False
    passed: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()


StartChild = Callable[[str, tuple[str, ...], Path, int, Mapping[str, str] | None], Child]
"""What starts a child, as `Child` itself does here: of its name, arguments, log, port and variables."""


@dataclass(slots=True)
class _Restart:
    """A child that has died is started again no sooner than `at`. Once it was, it `is_started`, and is to be ready by
    the `deadline`. `delay_s` is how long it was waited last. What was told to end may take until `ended_by`."""

    at: float
    delay_s: float = 0.0
    ended_by: float = 0.0
    is_started: bool = False
    deadline: float = 0.0


class Fleet:
    """Starts everything, starts again what has died, and leaves nothing running."""

    def __init__(self, options: FleetOptions, logs: Path, start_child: StartChild = Child) -> None:
        self._options = options
        self._logs = logs
        self._start_child = start_child
        self._children: list[Child] = []
        self._died_at: list[float] = []
        self._restarts: dict[int, _Restart] = {}
        self._ports: dict[str, int] = {}
        self.model = ""
        self.url = ""
        self.prefill_urls: tuple[str, ...] = ()
        self.decode_urls: tuple[str, ...] = ()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.stop()

    def start(self) -> None:
        """Start the engines side by side, then the router. Raises ConfigurationError when one of them cannot."""
        options = self._options
        # The router comes last; to say only then that its port is taken would be unkind.
        listening.listen(HOST, options.port).close()
        # One by one into the list: what has been started is ended, whatever happens.
        prefill = (Side.PREFILL, options.num_prefill, options.prefill_block_tokens)
        for side, num_engines, block_tokens in (
            prefill,
            (Side.DECODE, options.num_decode, options.decode_block_tokens),
        ):
            for number in range(num_engines):
                self._children.append(self._engine(side, number, block_tokens))
        deadline = time.monotonic() + options.ready_s
        urls = [self._await(child, deadline) for child in self._children]
        self.prefill_urls = tuple(urls[: options.num_prefill])
        self.decode_urls = tuple(urls[options.num_prefill :])
        self._children.append(self._router())
        self.url = self._await(self._children[-1], deadline)

    def restart_exited(self) -> None:
        """Start again what has died, at its old address, and wait for nothing: what is left serves meanwhile. To be
        called again and again. Raises ConfigurationError when engines keep exiting."""
        now = time.monotonic()
        for index, child in enumerate(self._children):
            if index not in self._restarts and not child.running:
                console.say(f"{child.name} has exited ({child.ending}, see {child.log}); restarting it")
                self._count_death(now)
                self._restarts[index] = _Restart(now)
        for index, restart in list(self._restarts.items()):
            if restart.is_started:
                self._look_at(index, restart, now)
            elif now >= restart.at:
                self._start_again(index, restart, now)

    def restart_and_wait(self) -> None:
        """Start again what has died, until everything serves. Raises ConfigurationError when that takes too long."""
        deadline = time.monotonic() + self._options.ready_s
        self.restart_exited()
        while self._restarts:
            if time.monotonic() > deadline:
                names = ", ".join(self._children[index].name for index in self._restarts)
                what = f"{names} did not come up again in time"
                raise ConfigurationError(what, hint=f"their output is in {self._logs}")
            time.sleep(POLL_S)
            self.restart_exited()

    def _count_death(self, now: float) -> None:
        """Raises ConfigurationError when there are too many."""
        self._died_at = [*(at for at in self._died_at if now - at < RESTARTS_WITHIN_S), now]
        if len(self._died_at) > MAX_RESTARTS:
            raise ConfigurationError("the engines keep exiting", hint=f"their output is in {self._logs}")

    def _start_again(self, index: int, restart: _Restart, now: float) -> None:
        child = self._children[index]
        if child.running and now < restart.ended_by:
            return
        child.stop(within_s=0.0)
        port = self._ports[child.name]
        self._children[index] = self._start_child(child.name, child.arguments, child.log, port, child.variables)
        restart.is_started, restart.deadline = True, now + self._options.ready_s

    def _look_at(self, index: int, restart: _Restart, now: float) -> None:
        """Whether a child that was started again can serve, or has to be tried once more."""
        child = self._children[index]
        if now < restart.deadline and not child.has_spoken():
            return
        try:
            self._await(child, now)
        except ConfigurationError as error:
            # It may hang, and has an engine to end.
            child.terminate()
            delay_s = min(max(FIRST_DELAY_S, 2 * restart.delay_s), MAX_DELAY_S)
            console.say(f"{error}; trying it again in {delay_s:g} s")
            self._restarts[index] = _Restart(now + delay_s, delay_s, now + STOP_S)
        else:
            del self._restarts[index]

    @property
    def names(self) -> str:
        """What is running, in words."""
        return ", ".join(child.name for child in self._children if child.running) or "nothing"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.pid for child in self._children}

    def _await(self, child: Child, deadline: float) -> str:
        """The URL of a child that can serve; from now on it is started again at the same port."""
        ready = child.wait_until_ready(deadline)
        url = str(ready["url"])
        console.say(f"{child.name} is ready at {url} (process {child.pid})")
        self.model = str(ready.get("model", self.model))
        self._ports[child.name] = urlsplit(url).port or 0
        return url

    def _engine(self, side: Side, number: int, block_tokens: int) -> Child:
        name, sizes = f"{side}-{number}", sizes_of(block_tokens, self._options.cache_tokens)
        role = ("--role", side) if self._options.has_roles else ()
        share = self._options.shares[len(self._children)] if self._options.shares else Share()
        passed = (*share.arguments, *self._options.passed)
        behind = ("--", *passed) if passed else ()
        arguments = ("serve", "--engine-id", name, *role, *sizes, *self._options.engine_arguments, *behind)
        if share.words:
            console.say(f"{name} {share.words}")
        return self._start_child(name, arguments, self._log(name), 0, share.environment)

    def _router(self) -> Child:
        engines = [("--prefill", url) for url in self.prefill_urls] + [("--decode", url) for url in self.decode_urls]
        words = [word for pair in engines for word in pair]
        return self._start_child("router", ("route", *words), self._log("router"), self._options.port, None)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def sizes_of(block_tokens: int, cache_tokens: int) -> tuple[str, ...]:
    """The options of `kvferry serve` for these sizes; without those that the engine is to choose itself (0)."""
    if not block_tokens:
        return ()
    number = ("--num-blocks", str(-(-cache_tokens // block_tokens))) if cache_tokens else ()
    return ("--block-tokens", str(block_tokens), *number)
