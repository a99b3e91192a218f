"""The server of another project as a process: started, awaited, announced, and ended with all that it has started."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from kvferry import SharedToken, read_token
from kvferry.cli import console
from kvferry.cli.http_get import get
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.joining import joined
from kvferry.cli.server import http
from kvferry.cli.watchdog import watchdog
from kvferry.errors import ConfigurationError

POLL_S = 0.25
# SGLang computes a token before it says that it is healthy.
ANSWER_S = 20.0
# Less than our own parent gives us before it kills us: nobody else would end the engine then.
STOP_S = 8.0
NO_TLS = "a proxy that ends TLS in front: the router and kvferry speak HTTP with an engine"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """What starts the server of an engine, and how it shows that it can serve.

    `ready_path` answers 200 then. `hint` is for a server that ends before. `facts` are announced beside its name, its
    model and its URL.
    """

    engine: str
    command: list[str]
    environment: Mapping[str, str]
    url: str
    ready_path: str
    hint: str
    facts: Mapping[str, str] = field(default_factory=dict)


def serve_engine(options: ServeOptions, engine: EngineProcess) -> int:
    """Run it until it ends or we are told to end; returns its exit code, 0 when we were told.

    Raises ConfigurationError when it ends early or is not ready in time.
    """
    return asyncio.run(_run(options, engine))


async def _run(options: ServeOptions, engine: EngineProcess) -> int:
    token, told, is_urgent = read_token(options.token_file), asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        """The first SIGTERM lets it finish what is open; SIGINT, and whatever comes after, end it at once."""
        if told.is_set() or number == signal.SIGINT:
            is_urgent.set()
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    # A group of its own: Ctrl-C reaches it through us only, and what it leaves behind can be ended with it. Not a
    # session: Linux schedules sessions as wholes, and lets one that rarely runs wait for a tenth of a second and more.
    process = await asyncio.create_subprocess_exec(
        *engine.command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, env=engine.environment
    )
    ends = [process.wait(), told.wait(), *([http.stdin_closed()] if options.as_child else [])]
    ending = asyncio.create_task(_first(ends))
    with ExitStack() as watched:
        try:
            watched.enter_context(watchdog(process.pid))
            # Whoever has started us as a child waits as long as it likes: for a download, an hour.
            await _ready(engine, process, ending, math.inf if options.as_child else options.start_timeout)
            await _serving(options, engine, token, ending)
            return process.returncode or 0
        finally:
            ending.cancel()
            # A parent that has died may be started again, and want the same devices: nothing is finished for it.
            await _stop(process, options.drain_timeout if told.is_set() else 0.0, is_urgent)


async def _serving(
    options: ServeOptions, engine: EngineProcess, token: SharedToken, ending: asyncio.Task[None]
) -> None:
    """Say that it serves, unless it was told to end before that. Returns when it is to end."""
    if ending.done():
        return
    _announce(options, engine)
    async with joined(options.join, engine.url, token):
        await ending


def key_in(variable: str, options: ServeOptions, engine: str, hint: str = "") -> dict[str, str]:
    """The key that clients need, if there is one, as an environment variable: everybody on this host can read command
    lines. Raises ConfigurationError for several, of which an engine takes one there."""
    keys = options.http_access.api_keys
    if len(keys) > 1:
        raise ConfigurationError(f"{engine} takes one --api-key from kvferry", found=f"{len(keys)} keys", hint=hint)
    return dict(zip([variable], keys, strict=False))


def _announce(options: ServeOptions, engine: EngineProcess) -> None:
    name, model = options.engine_id, options.served_name
    words = f"{name}: {model} at {engine.url}/v1, served by {engine.engine}"
    console.announce(options.as_json, words, engine_id=name, model=model, url=engine.url, **engine.facts)


async def _first(ends: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Returns when one of them has."""
    tasks = [asyncio.create_task(end) for end in ends]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _ready(engine: EngineProcess, process: Process, ending: asyncio.Task[None], within_s: float) -> None:
    """Returns when the server answers, or when we were told to end. Raises ConfigurationError when it has ended, or
    does neither in time."""
    deadline = time.monotonic() + within_s
    while True:
        asking = asyncio.create_task(asyncio.to_thread(_is_healthy, engine.url + engine.ready_path))
        await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is not None:
            found = f"exit code {process.returncode}"
            raise ConfigurationError(f"{engine.engine} has exited", found=found, hint=engine.hint)
        if ending.done() or asking.result():
            return
        if time.monotonic() > deadline:
            what, hint = f"{engine.engine} did not become ready in time", "give a large model more: --start-timeout"
            raise ConfigurationError(what, expected=f"within {within_s:g} s", hint=hint)
        await asyncio.wait({ending}, timeout=POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        get(url, ANSWER_S)
    except (OSError, ValueError):
        return False
    return True


async def _stop(process: Process, drain_s: float, is_urgent: asyncio.Event) -> None:
    """Politely, with `drain_s` for what is open unless it `is_urgent`, then by force; nothing of its group survives."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await _first([process.wait(), is_urgent.wait()])
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
