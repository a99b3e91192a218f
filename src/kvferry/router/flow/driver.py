"""Carries out a flow's commands: where a request's flow meets its client and its legs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from kvferry.router.events import (
    Began,
    Cancel,
    Command,
    Count,
    Cut,
    EndWithError,
    Event,
    Forward,
    Pick,
    Refuse,
    Relay,
    Release,
    Send,
)
from kvferry.router.flow.client import CLIENT_CLOSED_REQUEST, Client
from kvferry.router.flow.dispatcher import Dispatcher
from kvferry.router.flow.leg import Head
from kvferry.router.flow.state_machine import Flow
from kvferry.router.request.call import Call
from kvferry.router.request.headers import Headers, prefill_headers, response_headers
from kvferry.router.services import Services
from kvferry.router.telemetry.access_log import NO_PATH, AccessLogEntry
from kvferry.router.telemetry.server_timing import server_timing
from kvferry.router.upstream.http_client import UpstreamRequest

RELEASE_PATH = "/kvferry/release"
# What counts an answer that has begun well and ended badly.
BROKEN_OFF = 502


class Driver:
    """One request from its first event to its last."""

    def __init__(self, services: Services, call: Call, client: Client) -> None:
        self.flow = Flow(call.request, services.config.prefill_fallback)
        self._services = services
        self._call = call
        self._client = client
        self._dispatcher = Dispatcher(services, call, client)

    @property
    def path(self) -> str:
        """How the answer came about; `none` where no engine was asked."""
        return str(self.flow.path) if self._dispatcher.urls else NO_PATH

    async def run(self) -> None:
        """Serve the request. Cancelling it closes the upstream connections."""
        event: Event | None = Began()
        try:
            while event is not None:
                event = await self._carry_out(self.flow.handle(event))
        finally:
            self._dispatcher.close()

    def close(self, endpoint: str) -> None:
        """Tell logs and traces how it went; the client has everything, or has left."""
        timing = self._dispatcher.timing
        entry = AccessLogEntry(
            request_id=self._call.request_id,
            endpoint=endpoint,
            model=self._call.cost.model,
            status=self._client.status,
            path=self.path,
            reason=self.flow.reason,
            instances=self._dispatcher.urls,
            seconds=time.monotonic() - self._call.started_s,
            phases=timing.phases if timing.decode_s else {},
        )
        entry.log()
        self._dispatcher.trace.ended(entry.attributes())

    async def _carry_out(self, commands: list[Command]) -> Event | None:
        event = None
        for command in commands:
            event = await ACTIONS[type(command)](self, command)
        return event

    async def count(self, command: Count) -> None:
        self._dispatcher.count(command)

    async def pick(self, command: Pick) -> Event:
        return self._dispatcher.pick(command)

    async def send(self, command: Send) -> Event:
        return await self._dispatcher.send(command, self.flow.path)

    async def relay(self, command: Relay) -> Event:
        return await self._dispatcher.relay(self._response_headers(self._dispatcher.head))

    async def release(self, command: Release) -> None:
        self._dispatcher.leave_early()
        self._services.metrics.count_release(command.reason)
        headers = prefill_headers(self._call.headers, self._call.request_id)
        request = UpstreamRequest("POST", command.instance.url, RELEASE_PATH, headers, command.body)
        self._services.background.send(request)

    async def cancel(self, command: Cancel) -> None:
        self._client.status = CLIENT_CLOSED_REQUEST
        self._dispatcher.stop()

    async def forward(self, command: Forward) -> None:
        head, body = self._dispatcher.answer
        await self._client.start(head.status, self._response_headers(head))
        await self._client.finish(body)

    async def refuse(self, command: Refuse) -> None:
        body = msgspec.json.encode(command.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if command.retry_after_s:
            headers.append((b"retry-after", str(command.retry_after_s).encode()))
        headers = self._response_headers(Head(command.status, headers), tells_path=False)
        await self._client.start(command.status, headers)
        await self._client.finish(body)

    async def end_with_error(self, command: EndWithError) -> None:
        self._client.status = BROKEN_OFF
        await self._client.finish_with_error(command.message, command.code, command.reason)

    async def cut(self, command: Cut) -> None:
        """Send nothing: a server closes the connection of an app that returns amid its response."""
        self._client.status = BROKEN_OFF

    def _response_headers(self, head: Head, *, tells_path: bool = True) -> Headers:
        """A refusal of the router's own came by no path."""
        timing = self._dispatcher.timing
        own = {"x-request-id": self._call.request_id}
        own |= {"x-kvferry-path": str(self.flow.path)} if tells_path else {}
        own |= {"x-kvferry-reason": self.flow.reason} if self.flow.reason else {}
        own |= {"server-timing": server_timing(timing.phases)} if head.status and timing.decode_s else {}
        return response_headers(head.headers, own)


ACTIONS: Mapping[type[Command], Callable[[Driver, Any], Awaitable[Event | None]]] = {
    Cancel: Driver.cancel,
    Count: Driver.count,
    Cut: Driver.cut,
    EndWithError: Driver.end_with_error,
    Forward: Driver.forward,
    Pick: Driver.pick,
    Refuse: Driver.refuse,
    Relay: Driver.relay,
    Release: Driver.release,
    Send: Driver.send,
}
