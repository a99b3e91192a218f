"""Run one ASGI application until somebody ends it: a signal, or the parent that holds our standard input.

The first SIGTERM lets the application finish what is open (it *drains*). SIGINT, a second SIGTERM, and the end of
standard input end it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvferry.cli import console
from kvferry.cli.server.open_requests import OpenRequests

# How long open answers may go on after the order to end. The router waits longer than engines do: it is there to tell
# its clients when an engine breaks off.
ENGINE_GRACE_S = 3
ROUTER_GRACE_S = 6
# Until those that are broken off then have said so.
LAST_WORDS_S = 2
# Whoever sends requests must have had time to see that we are not ready: routers ask every two seconds.
NOTICE_S = 3.0
# A connection is closed on which no whole head of a request has come for so long.
IDLE_S = 65
# So is one on which so much has come of a head or of a trailer, and not its end. What a proxy adds has room in it.
MAX_HEAD_BYTES = 1 << 18
# Of whom nothing was heard for so long, nobody needs that time: probes come every ten seconds or more often.
UNUSED_S = 30.0


async def nothing_else() -> None:
    """Nothing but HTTP requests is open."""


@dataclass(frozen=True, slots=True)
class Drain:
    """What the first SIGTERM leads to.

    `announce` makes the application say that it is not ready, which `senders` have `notice_s` to notice, unless no
    request has come for a while. Then everything that is open (`open_work`) may end, for at most `limit_s` seconds in
    all: HTTP requests, and what `idle` waits for. With a limit of 0 the server ends at once.
    """

    limit_s: float
    announce: Callable[[], None]
    idle: Callable[[], Awaitable[None]] = nothing_else
    notice_s: float = NOTICE_S
    senders: str = "routers"
    open_work: str = "open requests and leases"


class _Protocol(HttpToolsProtocol):
    """Also closes connections on which not even one request has begun, or half a head has come: uvicorn counts the time
    from an answer to the next byte, and who sends nothing could keep all descriptors. Whoever sends a head or a trailer
    without end, which are kept until it comes, could take all memory."""

    _num_unended = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        timer, self.timeout_keep_alive_task, cycle = self.timeout_keep_alive_task, None, self.cycle
        self._num_unended += len(data)
        super().data_received(data)
        if self._num_unended > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.close()
        if timer is None:
            return
        if self.cycle is cycle:
            self.timeout_keep_alive_task = timer
        else:
            timer.cancel()

    def on_headers_complete(self) -> None:
        self._num_unended = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unended = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unended = 0
        super().on_message_complete()


class _Server(uvicorn.Server):
    """Leaves signals to `run`; the process then ends by itself and not by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(
    app: Any,
    bound: socket.socket,
    ends: Sequence[Awaitable[None]],
    grace_s: int,
    drain: Drain,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal or one of `ends`; open answers may go on for `grace_s` after the order to end.

    `announce` says that it serves: no sooner than a signal ends it well.
    """
    requests = OpenRequests(app)
    config = uvicorn.Config(
        requests,
        # Never the slower parser in silence.
        http=_Protocol,
        log_level="warning",
        access_log=False,
        # A registration without a token counts by where it comes from, and that is what the socket says.
        proxy_headers=False,
        timeout_graceful_shutdown=grace_s + LAST_WORDS_S,
        timeout_keep_alive=IDLE_S,
    )
    server = _Server(config)
    ending = _Ending(server, requests, grace_s, drain)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Until the loop closes: what follows the server is not to be interrupted by an impatient parent.
        asyncio.get_running_loop().add_signal_handler(number, ending.on_signal, number)
    announce()
    drained = _drained(ending.terminated, drain, requests, lambda: server.should_exit)
    watchers = [asyncio.create_task(ending.stop_after(end)) for end in (*ends, drained)]
    try:
        await server.serve(sockets=[bound])
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


class _Ending:
    """The ways in which a server is told to end. `terminated` is set by the first SIGTERM, which has it drain."""

    def __init__(self, server: _Server, requests: OpenRequests, grace_s: int, drain: Drain) -> None:
        self.terminated = asyncio.Event()
        self._server = server
        self._requests = requests
        self._grace_s = grace_s
        self._drain = drain

    def on_signal(self, number: int) -> None:
        """SIGINT, and whatever comes after a SIGTERM, ends it at once."""
        if not self.terminated.is_set() and number != signal.SIGINT:
            self.terminated.set()
            return
        self._stop()
        self._drain.announce()
        waiting = f"{self._requests.num_open} open requests have {self._grace_s} s to finish"
        console.say(f"stopping: {waiting if self._requests.num_open else 'no request is open'}")

    async def stop_after(self, end: Awaitable[None]) -> None:
        """Stop when that has come."""
        await end
        self._stop()

    def _stop(self) -> None:
        if not self._server.should_exit:
            self._server.should_exit = True
            asyncio.get_running_loop().call_later(self._grace_s, self._requests.break_off)


async def _drained(
    terminated: asyncio.Event, drain: Drain, requests: OpenRequests, is_ending: Callable[[], bool]
) -> None:
    """Returns some time after SIGTERM: when nothing is open any more, or when that takes too long. If it `is_ending`
    for another reason, what is open has been broken off."""
    await terminated.wait()
    drain.announce()
    notice_s = drain.notice_s if requests.came_within(UNUSED_S) else 0.0
    noticing = f"{notice_s:g} s for {drain.senders} to notice, then " if notice_s else ""
    console.say(f"draining: /ready answers 503; waiting {noticing}for {drain.open_work}, at most {drain.limit_s:g} s")
    with suppress(TimeoutError):
        async with asyncio.timeout(drain.limit_s):
            await asyncio.sleep(notice_s)
            await _nothing_open(drain, requests)
            if not is_ending():
                console.say(f"drained: all {drain.open_work} have ended")
            return
    console.say(
        f"--drain-timeout has expired: dropping all {drain.open_work} that are left ({requests.num_open} requests)"
    )


async def _nothing_open(drain: Drain, requests: OpenRequests) -> None:
    while True:
        await drain.idle()
        await requests.none_open.wait()
        # Between the end of a request and now another one may have begun.
        await drain.idle()
        if not requests.num_open:
            return


async def stdin_closed() -> None:
    """Returns when standard input ends: a parent that dies, however it dies, closes it, so no child outlives it. Nobody
    holds what is a file, such as /dev/null, or is not there."""
    if sys.stdin is None:
        return
    loop, fd, closed = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()

    def readable() -> None:
        if not os.read(fd, 4096):
            closed.set()

    try:
        loop.add_reader(fd, readable)
    except OSError:
        return
    try:
        await closed.wait()
    finally:
        loop.remove_reader(fd)
