"""One request on its way in and its answer on its way out."""

from __future__ import annotations

from kvferry.connectors.vllm_middleware.arrivals import Arrivals
from kvferry.connectors.vllm_middleware.asgi import Message, Receive, Scope, Send, header
from kvferry.connectors.vllm_middleware.legs import leg_name
from kvferry.connectors.vllm_middleware.words import lost, with_headers

__all__ = ["Passage"]

REQUEST_ID = b"x-request-id"
MAX_BODY_BYTES = 16 << 20


class Passage:
    """Passes everything on. Of a decode leg's answer the head waits for the first of its body, and gets its headers.

    vLLM begins a stream at once; by the time of its first token it is known how the cache came.
    """

    def __init__(self, arrivals: Arrivals, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._arrivals = arrivals
        self._path = path
        self._request_id = header(scope["headers"], REQUEST_ID)
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._has_asked = False
        self._name = ""
        self._heads: list[Message] = []
        self._is_replaced = False

    async def receive(self) -> Message:
        """The next message of the client. What it has asked for is known before vLLM knows it."""
        message = await self._receive()
        if not self._has_asked and message["type"] == "http.request":
            self._read(message)
        return message

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if self._is_replaced:
            return
        if self._name and message["type"] == "http.response.start":
            self._heads.append(message)
            return
        for head in self._heads:
            await self._send_head(head)
        self._heads = []
        if not self._is_replaced:
            await self._send(message)

    def close(self) -> None:
        """The request is over, however."""
        if self._name:
            self._arrivals.forget(self._name)

    def _read(self, message: Message) -> None:
        self._body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        is_too_large = len(self._body) > MAX_BODY_BYTES
        self._has_asked = is_whole or is_too_large
        if is_whole and not is_too_large:
            self._name = leg_name(self._path, self._request_id, bytes(self._body))
        if self._name:
            self._arrivals.expect(self._name)
        if self._has_asked:
            self._body = bytearray()

    async def _send_head(self, head: Message) -> None:
        arrival = self._arrivals.told(self._name)
        if arrival is None or arrival.is_given_up:
            await self._send(head)
        elif arrival.is_fatal:
            self._is_replaced = True
            for message in lost(head, arrival):
                await self._send(message)
        else:
            await self._send(with_headers(head, arrival))
