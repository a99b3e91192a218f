"""A request whose body is read before vLLM's app reads it."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

LENGTH_HEADERS = frozenset((b"content-length", b"transfer-encoding"))


class BufferedRequest:
    """Gives the app the body in one message, with the `scope` that goes with it.

    `body` is empty when it is too large, or when the client left before it was whole: then only the app is to make
    something of it.
    """

    def __init__(self, scope: Scope, receive: Receive, messages: list[Message], body: bytes) -> None:
        self.scope = scope
        self.body = body
        self._receive = receive
        self._messages = messages

    @classmethod
    async def read(cls, scope: Scope, receive: Receive, max_bytes: int) -> BufferedRequest:
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
        return cls(scope, receive, [first, *others], b"" if is_open or len(body) > max_bytes else body)

    def replace(self, body: bytes) -> None:
        """Have the app read another body, of another length."""
        self.body, self._messages = body, [{"type": "http.request", "body": body, "more_body": False}]
        headers = [pair for pair in self.scope["headers"] if pair[0].lower() not in LENGTH_HEADERS]
        self.scope = {**self.scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}

    async def receive(self) -> Message:
        """What the app hears: what has been read, and then what the client says. From then on it is not kept here."""
        self.body = b""
        return self._messages.pop(0) if self._messages else await self._receive()
