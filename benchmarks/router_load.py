"""An open-loop client: requests at the times of a Poisson process, whether earlier ones have been answered or not."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from dataclasses import dataclass, field

from router_alarm import Alarm

__all__ = ["Load", "Outcome", "percentile", "run"]

TIMEOUT_S = 60.0
NONE = "none"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TROUBLES = ("the client leaves", "prefill fails", "the stream breaks off", "the body is not valid JSON")
MARKS = {"prefill fails": "FAIL", "the stream breaks off": "CUT"}


@dataclass(frozen=True, slots=True)
class Load:
    """Ask `ports`, which are asked one after the other, `rate` times a second for `num` requests.

    One port is a router, two are a prefill and a decode engine. `rate` 0 begins all requests within `ramp_s`. A share
    of `trouble` of them has one of `TROUBLES` each. With `keeps` connections are used again, like those of a library
    client; else each request has a new one.
    """

    ports: tuple[int, ...]
    num: int
    rate: float
    num_tokens: int
    ramp_s: float = 0.0
    seed: int = 1
    trouble: float = 0.0
    keeps: bool = False


class Connections:
    """Of one generator, by port: those that are idle, if they are kept."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self._idle: dict[int, list[Streams]] = {}

    async def take(self, port: int) -> Streams:
        """The one that was used last, or a new one."""
        idle = self._idle.get(port)
        return idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)

    def give_back(self, port: int, streams: Streams) -> None:
        """Its answer has been read to the end."""
        self._idle.setdefault(port, []).append(streams)

    def close(self) -> None:
        for idle in self._idle.values():
            for _, writer in idle:
                writer.close()


@dataclass(slots=True)
class Outcome:
    """Times in seconds. An error is an answer that is not what its request has to get: all tokens and `[DONE]`, or
    where the engine breaks off an error event instead, or 400 for what is no JSON.

    `late_s` is how much later than meant the generator sent each request: as late, it notices what comes.
    """

    first_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0


def percentile(values: list[float], part: float) -> float:
    """`part` of the values are at most this; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


async def run(load: Load) -> Outcome:
    """Everything is over when it returns."""
    outcome, chooser, connections = Outcome(), random.Random(load.seed), Connections(load.keeps)
    # A collection of what the requests so far left would hold up the next ones by milliseconds, which are not the
    # router's.
    gc.collect()
    gc.disable()
    with Alarm() as alarm:
        due_s, tasks = time.monotonic(), []
        for _ in range(load.num):
            due_s += chooser.expovariate(load.rate) if load.rate else load.ramp_s / load.num
            await alarm.until(due_s)
            outcome.late_s.append(time.monotonic() - due_s)
            # A late generator is no delay of the router: the clock of a request begins when it is sent.
            trouble = chooser.choice(TROUBLES) if chooser.random() < load.trouble else NONE
            tasks.append(asyncio.create_task(_one(load, connections, trouble, outcome)))
        await asyncio.gather(*tasks)
    gc.enable()
    connections.close()
    return outcome


async def _one(load: Load, connections: Connections, trouble: str, outcome: Outcome) -> None:
    outcome.num_open += 1
    outcome.most_open = max(outcome.most_open, outcome.num_open)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for port in load.ports[:-1]:
                await _ask(connections, port, _body(True), load.num_tokens, NONE)
            body = b"{" if trouble == "the body is not valid JSON" else _body(False, MARKS.get(trouble, ""))
            outcome.first_s.append(await _ask(connections, load.ports[-1], body, load.num_tokens, trouble) - began)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        outcome.errors.append(repr(error)[:200])
    finally:
        outcome.num_open -= 1


def _body(is_prefill: bool, mark: str = "") -> bytes:
    more = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1} if is_prefill else {"stream": True}
    return json.dumps(
        {"model": "fake", "prompt": "When does the ferry leave? " * 15 + mark, "max_tokens": 64, **more}
    ).encode()


async def _ask(connections: Connections, port: int, body: bytes, num_tokens: int, trouble: str) -> float:
    """The time of the first byte of the body; raises ValueError when the answer is not whole."""
    reader, writer = await connections.take(port)
    is_kept = False
    try:
        close = "" if connections.keeps else "connection: close\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{close}"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = b" 400 " if trouble == "the body is not valid JSON" else b" 200 "
        if status not in answer.partition(b"\r\n")[0]:
            raise ValueError(answer.partition(b"\r\n")[0].decode())
        first = await reader.read(1 << 16)
        at = time.perf_counter()
        is_stream = b"text/event-stream" in answer or b'"kv_transfer_params"' not in first
        if trouble == "the stream breaks off":
            await _to_error(reader, first)
        elif is_stream and trouble in (NONE, "prefill fails"):
            last = await _to_end(reader, first, num_tokens)
            if connections.keeps and trouble == NONE:
                await _to_last_chunk(reader, last)
                is_kept = True
        elif connections.keeps and trouble == NONE:
            await _to_length(reader, answer, len(first))
            is_kept = True
        return at
    finally:
        if is_kept:
            connections.give_back(port, (reader, writer))
        else:
            writer.close()


async def _to_last_chunk(reader: asyncio.StreamReader, tail: bytes) -> None:
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        tail = tail[-16:] + await reader.readuntil(b"\n")


async def _to_length(reader: asyncio.StreamReader, head: bytes, num_read: int) -> None:
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    await reader.readexactly(length - num_read)


async def _to_end(reader: asyncio.StreamReader, piece: bytes, num_tokens: int) -> bytes:
    """Returns the last bytes that were read."""
    found, tail = piece.count(b'"text":" token"'), piece
    while b"[DONE]" not in tail:
        piece = await reader.read(1 << 16)
        if not piece:
            raise ValueError(f"the stream ended after {found} tokens")
        found += piece.count(b'"text":" token"')
        tail = tail[-16:] + piece
    if found != num_tokens:
        raise ValueError(f"{found} tokens, expected {num_tokens}")
    return tail


async def _to_error(reader: asyncio.StreamReader, piece: bytes) -> None:
    body = piece + await reader.read(-1)
    if b"[DONE]" in body or b'"upstream_broke_off"' not in body:
        raise ValueError(f"a stream that broke off ended in {body[-200:]!r}")
