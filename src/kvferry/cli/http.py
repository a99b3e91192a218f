"""Run one ASGI application until somebody ends it: a signal, or the parent that holds our standard input."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from kvferry.errors import ConfigurationError

__all__ = ["listen", "run", "url_of"]

GRACE_S = 5


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigurationError when it cannot be had."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"cannot listen on {host}:{port}",
            found=error.strerror or str(error),
            hint="another program has this port: choose another --port, or 0 for any free one",
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL under which a listening socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://{host}:{port}"


async def run(app: Any, bound: socket.socket, *, until_stdin_closes: bool) -> None:
    """Serve until SIGINT, SIGTERM, or (when asked) the end of standard input; then finish what is open, briefly."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=65
    )
    server = uvicorn.Server(config)
    if until_stdin_closes:
        _call_when_stdin_closes(lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[bound])


def _call_when_stdin_closes(stop: Callable[[], None]) -> None:
    """A parent that dies, however it dies, closes the pipe: no child outlives it."""
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop()

    loop.add_reader(fd, readable)
