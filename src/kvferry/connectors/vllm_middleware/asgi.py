"""The words of ASGI, and a JSON answer in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from kvferry.errors import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def header(headers: Headers, name: bytes) -> str | None:
    """The first value of a header by its name in lower case, as vLLM reads it."""
    return next((value.decode("latin-1") for found, value in headers if found.lower() == name), None)


def json_messages(status: int, body: object, headers: Headers) -> tuple[Message, Message]:
    """A whole JSON answer: its head and its body."""
    encoded = msgspec.json.encode(body)
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
    head = {"type": "http.response.start", "status": status, "headers": [*own, *headers]}
    return head, {"type": "http.response.body", "body": encoded, "more_body": False}


async def answer_json(send: Send, status: int, body: object) -> None:
    """Send a whole JSON answer."""
    for message in json_messages(status, body, []):
        await send(message)


async def body_of(receive: Receive, max_bytes: int) -> bytes:
    """A request's whole body, or what a client that has left had sent. Raises RequestError if it is too large."""
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > max_bytes:
            raise RequestError("the request body is too large", expected=f"at most {max_bytes} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


class Opened:
    """A request whose body has been read before the app reads it, and is given to it in one message.

    `body` is empty when it is too large, or when the client left before it was whole: then only the app is to make
    something of it.
    """

    def __init__(self, receive: Receive, messages: list[Message], body: bytes) -> None:
        self.body = body
        self._receive = receive
        self._messages = messages

    @classmethod
    async def read(cls, receive: Receive, max_bytes: int) -> Opened:
        """Take messages until the body is whole."""
        found, message, is_open = bytearray(), await receive(), True
        while is_open and message["type"] == "http.request":
            found += message.get("body", b"")
            is_open = message.get("more_body", False)
            if not is_open or len(found) > max_bytes:
                break
            message = await receive()
        body = bytes(found)
        first: Message = {"type": "http.request", "body": body, "more_body": is_open}
        others = [] if message["type"] == "http.request" else [message]
        return cls(receive, [first, *others], b"" if is_open or len(body) > max_bytes else body)

    def replace(self, body: bytes) -> None:
        """Have the app read another body."""
        self.body, self._messages = body, [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> Message:
        """What the app hears: what has been read, and then what the client says. From then on it is not kept here."""
        self.body = b""
        return self._messages.pop(0) if self._messages else await self._receive()
