"""A server that streams and computes nothing: what a router is measured against costs as little as it can.

`python benchmarks/router_engine.py TOKENS GAP_MS` prints its port. It speaks HTTP/1.1 and the two requests of vLLM's
connectors: a prefill request gets `kv_transfer_params` at once, everything else so many events, so far apart. Where a
prompt says so (`FAIL`, `CUT`), a prefill request gets 500 and a stream breaks off in its middle.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys

import uvloop

PREFILLED = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "fake",
            "remote_block_ids": [list(range(64))],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_request_id": "fake",
            "tp_size": 1,
        },
    }
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "fake"}]}).encode()
TOKEN = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"fake",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
END = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Connection(asyncio.Protocol):
    """One client: requests one after the other, each answered before the next is read."""

    def __init__(self, num_tokens: int, gap_s: float) -> None:
        self._num_tokens, self._gap_s = num_tokens, gap_s
        self._received = b""
        self._left = 0
        self._cut_at = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        length = int(lowered.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self._received = body[length:]
        self._answer(head.split(b" ", 2)[1], body[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path.startswith((b"/health", b"/ready")):
            self._transport.write(whole(b"200 OK", b"{}"))
        elif path.startswith(b"/v1/models"):
            self._transport.write(whole(b"200 OK", MODELS))
        elif not path.startswith(b"/v1/"):
            self._transport.write(whole(b"404 Not Found", b"{}"))
        elif b'"do_remote_decode":true' in body.replace(b" ", b""):
            is_failing = b"FAIL" in body
            self._transport.write(whole(b"500 No", b"{}") if is_failing else whole(b"200 OK", PREFILLED))
        else:
            self._cut_at = self._num_tokens // 2 if b"CUT" in body else -1
            self._transport.write(STREAM)
            self._left = self._num_tokens
            self._token()

    def _token(self) -> None:
        if self._transport.is_closing():
            return
        if self._left == self._cut_at:
            self._transport.abort()
            return
        if not self._left:
            self._transport.write(chunk(END) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(chunk(TOKEN))
        if self._gap_s:
            asyncio.get_running_loop().call_later(self._gap_s, self._token)
        else:
            self._token()


async def main(num_tokens: int, gap_ms: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(num_tokens, gap_ms / 1000), "127.0.0.1", 0, backlog=4096)
    # Its own pauses are not the router's.
    gc.disable()
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
