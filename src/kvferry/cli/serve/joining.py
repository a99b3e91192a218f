"""How an engine process joins routers: told on the command line, done beside whatever else the process does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import ConfigurationError
from kvferry.http.registration import KEY_PURPOSE, Side


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Which routers this engine tells that it is there, for which roles, and under which URL if not the one it has."""

    routers: tuple[str, ...] = ()
    roles: tuple[Side, ...] = ()
    url: str = ""

    def __post_init__(self) -> None:
        if self.routers and not self.roles:
            raise ConfigurationError(
                "--register needs a role", found="--register without --role", expected="--role prefill or --role decode"
            )
        if not self.routers and (self.roles or self.url):
            found = "--role" if self.roles else "--advertise-url"
            raise ConfigurationError("this option needs --register", found=found, expected="--register URL as well")
        for url in (*self.routers, *([self.url] if self.url else [])):
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError("invalid URL", found=url, expected="such as http://10.0.0.5:8000")


NOWHERE = JoinOptions()


@contextmanager
def joined(join: JoinOptions, url: str, token_file: str) -> Iterator[None]:
    """For an engine that is another process: routers are told of it from a thread, and of its leaving at the end.

    Raises ConfigurationError for a token that cannot be used.
    """
    if not join.routers:
        yield
        return
    from kvferry.agent.control.shared_token import read_token
    from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig

    token = read_token(token_file)
    key = token.derived(KEY_PURPOSE) if token else b""
    registrar = Registrar(RegistrarConfig(join.routers, join.url or url, join.roles, key))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(registrar.run(),), name="registrar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(registrar.leave)
        thread.join()
        loop.close()
