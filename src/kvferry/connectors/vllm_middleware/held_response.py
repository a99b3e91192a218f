"""An answer on its way out, behind what is said of it first."""

from __future__ import annotations

import asyncio

from kvferry.connectors.vllm_middleware.asgi import Message, Receive, Send
from kvferry.connectors.vllm_middleware.early import is_event_stream
from kvferry.connectors.vllm_middleware.prefill_starts import Beginnings
from kvferry.connectors.vllm_middleware.response_fields import lost, with_headers, with_local
from kvferry.connectors.vllm_middleware.transfer_reports import Arrivals


class Passage:
    """Passes everything on. Of a decode leg's answer the head waits for the first of its body, and gets its headers.

    vLLM begins a stream at once; by the time of its first token it is known how the cache came. `name` is vLLM's name
    for the decode leg; empty for one of which vLLM tells nothing, and for any other request, which `is_local`.
    """

    def __init__(self, arrivals: Arrivals, name: str, is_local: bool, send: Send) -> None:
        self._arrivals = arrivals
        self._name = name
        self._is_local = is_local
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
        if self._is_local and message["type"] == "http.response.start":
            message = with_local(message)
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


class Delivery:
    """Passes an answer on. It `is_done` when the client has it: whole, no failure, and before the client has left."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._status = 0
        self.is_done = False

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not message.get("more_body", False):
            # Afterwards servers say of every client that it has left.
            self.is_done = self._status < 500 and not await self._has_left()
        await self._send(message)

    async def _has_left(self) -> bool:
        """vLLM answers a client that has left with a status of 200, and does not listen any more once it has an answer.
        The server drops both without a word."""
        hearing = asyncio.ensure_future(self._receive())
        await asyncio.wait((hearing,), timeout=0)
        if hearing.done():
            return bool(hearing.result()["type"] == "http.disconnect")
        hearing.cancel()
        return False


class EarlyPassage:
    """Puts an event before those of a stream that vLLM has begun; any other answer passes as it is.

    Not before vLLM computes for the request: a decode side that made room for a prompt that waits for its turn would
    keep that room from others, and the prompt may be waiting for just these. Where vLLM does not tell when it computes,
    the event comes with its own first one.
    """

    def __init__(self, beginnings: Beginnings, name: str, first_event: Message, send: Send) -> None:
        self._beginnings = beginnings
        self._name = name
        self._first_event = first_event
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._has_begun = asyncio.Event()
        # Only of a stream.
        self._telling: list[asyncio.Task[None]] = []
        self._one_at_a_time = asyncio.Lock()
        self._is_told = False
        beginnings.expect(name, self._begun)

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if self._telling:
            await self._tell()
        await self._send(with_local(message) if message["type"] == "http.response.start" else message)
        if message["type"] == "http.response.start" and is_event_stream(message):
            self._telling = [asyncio.create_task(self._tell_when_begun())]

    def close(self) -> None:
        """The request is over, however."""
        self._beginnings.forget(self._name)
        for telling in self._telling:
            telling.cancel()

    def _begun(self) -> None:
        """From whatever thread."""
        self._loop.call_soon_threadsafe(self._has_begun.set)

    async def _tell_when_begun(self) -> None:
        await self._has_begun.wait()
        await self._tell()

    async def _tell(self) -> None:
        async with self._one_at_a_time:
            if not self._is_told:
                self._is_told = True
                await self._send(self._first_event)
