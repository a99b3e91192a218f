"""How an engine process joins routers: told on the command line, done beside whatever else the process does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry import SharedToken
from kvferry.cli.serve.command import JoinOptions
from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.http.registration import KEY_PURPOSE


@asynccontextmanager
async def joined(join: JoinOptions, url: str, token: SharedToken) -> AsyncIterator[Registrar]:
    """Routers are told of the engine at `url`, and of its leaving at the end at the latest."""
    key = token.derived(KEY_PURPOSE) if token else b""
    registrar = Registrar(RegistrarConfig(tuple(join.register), join.advertise_url or url, tuple(join.role), key))
    running = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        registrar.leave()
        # That has a time limit of its own.
        await asyncio.wait({running})
