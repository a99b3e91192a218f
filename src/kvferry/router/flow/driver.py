"""Carries out the commands of a request's flow: towards the client here, towards instances by the dispatcher."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from kvferry.http.anthropic import error_event_for, error_for
from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, server_timing
from kvferry.router import commands
from kvferry.router.commands import Command
from kvferry.router.events import Began, Event
from kvferry.router.flow.client import Client
from kvferry.router.flow.dispatcher import Dispatcher
from kvferry.router.flow.state_machine import Flow
from kvferry.router.request.client_request import Call
from kvferry.router.request.headers import Headers, prefill_headers, response_headers
from kvferry.router.services import Services
from kvferry.router.telemetry.access_log import NO_PATH, AccessLogEntry
from kvferry.router.upstream.http_client import HttpRequest, WholeResponse

RELEASE_PATH = "/kvferry/release"
# The status under which an answer is counted that has begun well and ended badly.
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

    async def _carry_out(self, batch: list[Command]) -> Event | None:
        event = None
        for command in batch:
            match command:
                case commands.Pick():
                    event = self._dispatcher.pick(command)
                case commands.Start():
                    self._dispatcher.start(command)
                case commands.Send():
                    event = await self._dispatcher.send(command, self.flow.path)
                case commands.Relay():
                    event = await self._relay()
                case commands.Count():
                    self._dispatcher.count(command)
                case commands.Release():
                    self._release(command)
                case _:
                    await self._end(command)
        return event

    async def _end(self, command: Command) -> None:
        """Carry out a command that ends the request. For `Cut` nothing is sent: the server closes the connection of an
        app that returns amid its response."""
        match command:
            case commands.Forward():
                await self._answer(self._dispatcher.answer)
            case commands.Refuse():
                await self._refuse(command)
            case commands.EndWithError():
                self._client.status = BROKEN_OFF
                endpoint = self._call.request.endpoint
                event = error_event_for(endpoint, command.message, command.code, command.reason)
                await self._client.unless_left(partial(self._client.finish_with_event, event), 0.0)
            case commands.Cut():
                self._client.status = BROKEN_OFF
            case commands.Cancel():
                self._client.status = CLIENT_CLOSED_REQUEST
                self._dispatcher.stop()

    def _release(self, command: commands.Release) -> None:
        self._dispatcher.leave_early()
        self._services.metrics.releases.labels(command.reason).inc()
        headers = prefill_headers(self._call.headers, self._call.request_id)
        request = HttpRequest("POST", command.instance.url, RELEASE_PATH, headers, command.body)
        self._services.http.send_in_background(request, self._services.config.probe_timeout_s)

    async def _refuse(self, command: commands.Refuse) -> None:
        body = msgspec.json.encode(error_for(self._call.request.endpoint, command.body))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if command.retry_after_s:
            headers.append((b"retry-after", str(command.retry_after_s).encode()))
        await self._answer(WholeResponse(command.status, headers, body), tells_path=False)

    async def _answer(self, answer: WholeResponse, *, tells_path: bool = True) -> None:
        headers = self._response_headers(answer.headers, tells_path=tells_path)

        async def tell() -> None:
            await self._client.start(answer.status, headers)
            await self._client.finish(answer.body)

        await self._client.unless_left(tell, 0.0)

    async def _relay(self) -> Event:
        return await self._dispatcher.relay(self._response_headers(self._dispatcher.in_flight.headers))

    def _response_headers(self, headers: Headers, *, tells_path: bool = True) -> Headers:
        """The headers for the client. A refusal of the router's own came by no path."""
        timing = self._dispatcher.timing
        own = {"x-request-id": self._call.request_id}
        own |= {"x-kvferry-path": str(self.flow.path)} if tells_path else {}
        own |= {"x-kvferry-reason": self.flow.reason} if self.flow.reason else {}
        own |= {"server-timing": server_timing(timing.phases)} if timing.decode_s else {}
        return response_headers(headers, own)
