"""Run one ASGI application until somebody ends it: a signal, or the parent that holds our standard input."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import uvicorn

from kvferry.errors import ConfigurationError

__all__ = ["ENGINE_GRACE_S", "ROUTER_GRACE_S", "listen", "run", "stdin_closed", "url_of"]

# How long open answers may go on after the order to end. The router waits longer than engines do: it is there to tell
# its clients when an engine breaks off.
ENGINE_GRACE_S = 3
ROUTER_GRACE_S = 6


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigurationError when it cannot be had."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        taken = error.errno == errno.EADDRINUSE
        raise ConfigurationError(
            f"cannot listen on {host}:{port}",
            found=error.strerror or str(error),
            hint="choose another --port, or 0 for any free one" if taken else "127.0.0.1 always works on this machine",
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL under which a listening socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://{host}:{port}"


async def run(app: Any, bound: socket.socket, ends: Sequence[Awaitable[None]], grace_s: int) -> None:
    """Serve until SIGINT, SIGTERM, or one of `ends`; then finish what is open within `grace_s`."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s, timeout_keep_alive=65
    )
    server = uvicorn.Server(config)

    async def stop_after(end: Awaitable[None]) -> None:
        await end
        server.should_exit = True

    watchers = [asyncio.create_task(stop_after(end)) for end in ends]
    try:
        await server.serve(sockets=[bound])
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def stdin_closed() -> None:
    """Returns when standard input ends: a parent that dies, however it dies, closes it, so no child outlives it."""
    loop, fd, closed = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()

    def readable() -> None:
        if not os.read(fd, 4096):
            closed.set()

    loop.add_reader(fd, readable)
    try:
        await closed.wait()
    finally:
        loop.remove_reader(fd)
