"""An answer on its way out, behind what is said of it first."""

from __future__ import annotations

from kvferry.connectors.vllm_middleware.arrivals import Arrivals
from kvferry.connectors.vllm_middleware.asgi import Message, Send
from kvferry.connectors.vllm_middleware.early import is_event_stream
from kvferry.connectors.vllm_middleware.words import lost, with_headers

__all__ = ["EarlyPassage", "Passage"]


class Passage:
    """Passes everything on. Of a decode leg's answer the head waits for the first of its body, and gets its headers.

    vLLM begins a stream at once; by the time of its first token it is known how the cache came. `name` is vLLM's name
    for the decode leg, empty for any other request.
    """

    def __init__(self, arrivals: Arrivals, name: str, send: Send) -> None:
        self._arrivals = arrivals
        self._name = name
        self._send = send
        self._heads: list[Message] = []
        self._is_replaced = False
        if name:
            arrivals.expect(name)

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


class EarlyPassage:
    """Puts an event before those of a stream that vLLM has begun; any other answer passes as it is."""

    def __init__(self, first_event: Message, send: Send) -> None:
        self._first_event = first_event
        self._send = send

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        await self._send(message)
        if message["type"] == "http.response.start" and is_event_stream(message):
            await self._send(self._first_event)
