"""One request on its way in and its answer on its way out."""

from __future__ import annotations

from kvferry.connectors.vllm_doors.arrivals import Arrivals
from kvferry.connectors.vllm_doors.asgi import Message, Receive, Scope, Send, header
from kvferry.connectors.vllm_doors.legs import NO_LEG, leg_of
from kvferry.connectors.vllm_doors.words import lost, with_headers

__all__ = ["Passage"]

REQUEST_ID = b"x-request-id"
MAX_BODY_BYTES = 16 << 20


class Passage:
    """Passes everything on. Of a decode leg's answer the head waits for the first of its body, and gets its headers.

    vLLM begins a stream at once; by the time of its first token it is known how the cache came. `leg` is what is being
    asked for; one that `is_forsaken` has lost its client before the end of its answer.
    """

    def __init__(self, arrivals: Arrivals, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._arrivals = arrivals
        self._path = path
        self._request_id = header(scope["headers"], REQUEST_ID)
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._has_asked = False
        self.leg = NO_LEG
        self.is_forsaken = False
        self._heads: list[Message] = []
        self._is_replaced = False
        self._is_sent = False

    async def receive(self) -> Message:
        """The next message of the client. What it has asked for is known before vLLM knows it."""
        message = await self._receive()
        if not self._has_asked and message["type"] == "http.request":
            self._read(message)
        if message["type"] == "http.disconnect" and not self._is_sent:
            self.is_forsaken = True
        return message

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if self._is_replaced:
            return
        is_head = message["type"] == "http.response.start"
        if is_head and self.leg.is_decode:
            self._heads.append(message)
            return
        for head in self._heads:
            await self._send_head(head)
        self._heads = []
        if not self._is_replaced:
            await self._send(message)
        self._is_sent = not is_head and not message.get("more_body", False)

    def close(self) -> None:
        """The request is over, however."""
        if self.leg.is_decode:
            self._arrivals.forget(self.leg.name)

    def _read(self, message: Message) -> None:
        self._body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        is_too_large = len(self._body) > MAX_BODY_BYTES
        self._has_asked = is_whole or is_too_large
        if is_whole and not is_too_large:
            self.leg = leg_of(self._path, self._request_id, bytes(self._body))
        if self.leg.is_decode:
            self._arrivals.expect(self.leg.name)
        if self._has_asked:
            self._body = bytearray()

    async def _send_head(self, head: Message) -> None:
        arrival = self._arrivals.told(self.leg.name)
        if arrival is None:
            await self._send(head)
        elif arrival.is_fatal:
            self._is_replaced = True
            for message in lost(head, arrival):
                await self._send(message)
        else:
            await self._send(with_headers(head, arrival))
