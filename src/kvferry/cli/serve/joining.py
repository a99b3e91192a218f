"""How an engine process joins routers: told on the command line, done beside whatever else the process does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry import SharedToken, read_token
from kvferry.cli.serve.command import JoinOptions
from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.http.registration import KEY_PURPOSE


def registrar_of(join: JoinOptions, url: str, token: SharedToken) -> Registrar:
    """Who tells routers of the engine at `url`."""
    key = token.derived(KEY_PURPOSE) if token else b""
    return Registrar(RegistrarConfig(tuple(join.register), join.advertise_url or url, tuple(join.role), key))


@contextmanager
def joined(join: JoinOptions, url: str, token_file: str) -> Iterator[None]:
    """For an engine that is another process: routers are told of it from a thread, and of its leaving at the end.

    Raises ConfigurationError for a token that cannot be used.
    """
    if not join.register:
        yield
        return
    registrar, loop = registrar_of(join, url, read_token(token_file)), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(registrar.run(),), name="registrar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(registrar.leave)
        thread.join()
        loop.close()
