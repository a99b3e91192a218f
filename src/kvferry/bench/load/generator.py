"""Sends requests at their arrival times (open loop) or so many at once (closed loop), and measures the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import aiohttp

from kvferry.bench.load.answer import Answer, refusal
from kvferry.bench.load.target import Target, open_session
from kvferry.bench.load.workload import PlannedRequest
from kvferry.bench.report.record import Record
from kvferry.http.client_errors import client_error_text

Progress = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records in the order of the requests; `duration_s` is from the start to the last answer."""

    records: tuple[Record, ...]
    duration_s: float
    most_open: int


async def run_load(
    target: Target, planned: tuple[PlannedRequest, ...], concurrency: int, timeout_s: float, progress: Progress
) -> Outcome:
    """Ask for everything that is planned, and wait for the last answer.

    With `concurrency` 0 the arrivals decide when (open loop); else so many requests are open at a time, each beginning
    when another ends, and the arrivals mean nothing. An answer that takes longer than `timeout_s` is an error.
    """
    bodies = [target.body(one) for one in planned]
    async with open_session({"content-type": "application/json", **target.headers}, timeout_s) as session:
        load = Load(session, target, timeout_s, progress)
        if concurrency:
            await load.closed(planned, bodies, concurrency)
        else:
            await load.open(planned, bodies)
        return Outcome(tuple(load.records[i] for i in range(len(planned))), load.elapsed_s(), load.most_open)


class Load:
    """One run."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, timeout_s: float, progress: Progress) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._url = f"{target.url}{target.endpoint.path}"
        self._progress = progress
        self._began = time.perf_counter()
        self._num_open = 0
        self.most_open = 0
        self.records: dict[int, Record] = {}

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    async def open(self, planned: tuple[PlannedRequest, ...], bodies: list[bytes]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(planned):
                await asyncio.sleep(max(one.at_s - self.elapsed_s(), 0.0))
                group.create_task(self._request(number, one, bodies[number], one.at_s))

    async def closed(self, planned: tuple[PlannedRequest, ...], bodies: list[bytes], concurrency: int) -> None:
        waiting = iter(enumerate(planned))

        async def work() -> None:
            for number, one in waiting:
                await self._request(number, one, bodies[number], self.elapsed_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(planned))):
                group.create_task(work())

    async def _request(self, number: int, planned: PlannedRequest, body: bytes, due_s: float) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        record = Record(due_s=due_s, sent_s=self.elapsed_s(), prompt_tokens=planned.prompt.num_tokens)
        try:
            record = await self._ask(record, body)
        except TimeoutError:
            record = replace(record, error=f"no complete answer within {self._timeout_s:g} s (--timeout)")
        except (aiohttp.ClientError, OSError) as error:
            record = replace(record, error=client_error_text(error))
        finally:
            self._num_open -= 1
        self.records[number] = record
        self._progress(record)

    async def _ask(self, record: Record, body: bytes) -> Record:
        began, answer = time.perf_counter(), Answer()
        async with self._session.post(self._url, data=body) as response:
            if response.status != 200:
                return replace(record, error=refusal(response.status, await response.read()))
            async for data in response.content.iter_any():
                answer.push(data, time.perf_counter())
        ended = time.perf_counter()
        answer.end(ended)
        return _finished(record, answer, began, ended)


def _finished(record: Record, answer: Answer, began: float, ended: float) -> Record:
    times = answer.piece_times
    if answer.wrong:
        return replace(record, error=answer.wrong)
    return replace(
        record,
        prompt_tokens=record.prompt_tokens if answer.prompt_tokens < 0 else answer.prompt_tokens,
        output_tokens=len(times) if answer.output_tokens < 0 else answer.output_tokens,
        ttft_s=times[0] - began,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        e2el_s=ended - began,
    )
