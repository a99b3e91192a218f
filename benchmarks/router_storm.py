"""A router with very many engines: all of them register at once, nothing is asked, all of them are restarted.

    python benchmarks/router_storm.py > benchmarks/results/router_storm.json
    python benchmarks/router_storm.py --instances 1000 --rounds 1

`kvferry route`, started as its user would, on a core of its own; on the other one engines that speak HTTP and compute
nothing (`storm_engines.py`), half of them prefill, and the clients. In each round every number of instances has a fresh
router. Prints JSON; times of clients are to the first byte of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
import uvloop
from measuring import machine, num_wake_ups, say
from router_load import Load, Outcome, percentile, run
from router_subjects import Subject, cpu_s, started

ROUTER_CORE, LOAD_CORE = 0, 1
ROUTE = (sys.executable, "-m", "kvferry.cli.main", "route", "--port", "PORT", "--accept-registrations")
ROUTER = Subject("kvferry route", ROUTE, "this package")
NUM_TOKENS, GAP_MS = 8, 20.0
RATE, SLICE_S = 50.0, 1.0
# Who serves clients while the others come; in batches of such a share all are restarted.
NUM_FIRST, BATCH_SHARE = 4, 10
DEADLINE_S, POLL_S = 120.0, 0.05
NUM_SCRAPES = 5

Found = TypeVar("Found")


class Engines:
    """The process of the engines, of which the first half is prefill."""

    def __init__(self, process: asyncio.subprocess.Process, ports: list[int]) -> None:
        self._process = process
        self.ports = ports

    @property
    def pairwise(self) -> list[int]:
        """The numbers of all, a prefill and a decode engine in turns."""
        half = len(self.ports) // 2
        return [number for place in range(half) for number in (place, half + place)]

    async def tell(self, do: str, engines: list[int] = [], **more: Any) -> dict[str, Any]:  # noqa: B006
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the engines have no pipes")
        self._process.stdin.write(json.dumps({"do": do, "engines": engines, **more}).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_S):
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer


@asynccontextmanager
async def engines_of(number: int) -> AsyncIterator[Engines]:
    script = Path(__file__).with_name("storm_engines.py")
    command = [sys.executable, str(script), str(number), str(NUM_TOKENS), str(GAP_MS)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        if process.stdout is None:
            raise RuntimeError("no output")
        yield Engines(process, json.loads(await process.stdout.readline()))
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Router:
    """The process that is measured."""

    pid: int
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str) -> tuple[bytes, float]:
        """A body and how many seconds it took."""
        began = time.perf_counter()
        async with self.session.get(self.url + path) as response:
            return await response.read(), time.perf_counter() - began

    async def until_pairs(self, number: int) -> None:
        """So many pairs of instances can serve."""
        async with asyncio.timeout(DEADLINE_S):
            while json.loads((await self.get("/ready"))[0])["num_usable_pairs"] != number:
                await asyncio.sleep(POLL_S)

    async def until_members(self, number: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(json.loads((await self.get("/kvferry/members"))[0])["members"]) != number:
                await asyncio.sleep(POLL_S)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_full_info().uss)


@asynccontextmanager
async def router() -> AsyncIterator[Router]:
    with started(ROUTER, 0, 0, ROUTER_CORE) as (port, pid):
        async with aiohttp.ClientSession() as session:
            yield Router(pid, port, session)


async def asking(subject: Router, work: Awaitable[Found]) -> tuple[Found, dict[str, Any]]:
    """Do this while clients ask, and say what they got."""
    doing, outcome, busy_s = asyncio.ensure_future(work), Outcome(), -cpu_s(subject.pid)
    began = time.perf_counter()
    while not outcome.late_s or not doing.done():
        num, seed = int(RATE * SLICE_S), len(outcome.late_s)
        found = await run(Load((subject.port,), num, RATE, NUM_TOKENS, seed=seed, keeps=True))
        outcome.first_s += found.first_s
        outcome.late_s += found.late_s
        outcome.errors += found.errors
    busy_s += cpu_s(subject.pid)
    told = clients(outcome) | {"core_busy": busy_s / (time.perf_counter() - began)}
    return await doing, told


def clients(outcome: Outcome) -> dict[str, Any]:
    parts = {f"p{part}_ms": percentile(outcome.first_s, part / 100) * 1000 for part in (50, 99)}
    late_ms = percentile(outcome.late_s, 0.99) * 1000
    failed = {"requests": len(outcome.late_s), "failed": len(outcome.errors), "first_error": outcome.errors[:1]}
    return failed | parts | {"max_ms": max(outcome.first_s, default=0.0) * 1000, "generator_late_p99_ms": late_ms}


async def storm(subject: Router, engines: Engines) -> dict[str, Any]:
    """All but a few register at the same time."""
    first, rest = engines.pairwise[:NUM_FIRST], engines.pairwise[NUM_FIRST:]
    await engines.tell("join", first, router=subject.url)
    await subject.until_pairs((NUM_FIRST // 2) ** 2)

    async def join() -> dict[str, float]:
        began = time.perf_counter()
        told = await engines.tell("join", rest, router=subject.url) if rest else {}
        await subject.until_pairs((len(engines.ports) // 2) ** 2)
        return told | {"usable_s": time.perf_counter() - began}

    found, told = await asking(subject, join())
    return found | {"clients": told}


async def idle(subject: Router, engines: Engines, seconds: float) -> dict[str, Any]:
    """Nothing is asked but what the router asks itself, and the engines tell it."""
    asked, switches = (await engines.tell("count"))["num_asked"], num_wake_ups(subject.pid)
    busy_s, began = cpu_s(subject.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began
    found = {
        "core_busy": (cpu_s(subject.pid) - busy_s) / took_s,
        "wake_ups_per_s": (num_wake_ups(subject.pid) - switches) / took_s,
        "asked_of_engines_per_s": ((await engines.tell("count"))["num_asked"] - asked) / took_s,
        "memory_bytes": subject.memory_bytes(),
        "descriptors": psutil.Process(subject.pid).num_fds(),
        "threads": psutil.Process(subject.pid).num_threads(),
    }
    return found | await answers(subject)


async def answers(subject: Router) -> dict[str, Any]:
    """Of those whom operators and load balancers ask for."""
    found: dict[str, Any] = {}
    for name in ("metrics", "kvferry/members", "ready"):
        scrapes = [await subject.get(f"/{name}") for _ in range(NUM_SCRAPES)]
        short = name.rpartition("/")[2]
        found[f"{short}_bytes"] = len(scrapes[-1][0])
        found[f"{short}_ms"] = statistics.median(took_s for _, took_s in scrapes) * 1000
    return found


async def requests(subject: Router, engines: Engines, seconds: float) -> dict[str, Any]:
    """Through the router, and the same two requests of the engines themselves just before."""
    prefill, decode = (engines.ports[number] for number in engines.pairwise[:2])
    num = int(RATE * seconds)
    direct = clients(await run(Load((prefill, decode), num, RATE, NUM_TOKENS, keeps=True)))
    routed = clients(await run(Load((subject.port,), num, RATE, NUM_TOKENS, keeps=True)))
    added = {f"added_p{part}_ms": routed[f"p{part}_ms"] - direct["p50_ms"] for part in (50, 99)}
    return {"direct": direct, "routed": routed, **added}


async def restart(subject: Router, engines: Engines, notice_s: float) -> dict[str, Any]:
    """Of all engines, a batch after the other: they come back as other processes, of another version."""
    numbers = engines.pairwise
    size = max(len(numbers) // BATCH_SHARE // 2 * 2, 2)
    midway: dict[str, Any] = {}

    async def roll() -> list[float]:
        usable_s = []
        for first in range(0, len(numbers), size):
            told = await engines.tell("restart", numbers[first : first + size], router=subject.url, notice_s=notice_s)
            began = time.perf_counter()
            new = min(first + size, len(numbers)) // 2
            await subject.until_pairs(new**2 + (len(numbers) // 2 - new) ** 2)
            usable_s.append(told["known_s"] + time.perf_counter() - began)
            if not midway and 2 * new >= len(numbers) // 2:
                midway.update(await answers(subject))
        return usable_s

    before_bytes = subject.memory_bytes()
    usable_s, told = await asking(subject, roll())
    return {
        "batch": size,
        "longest_until_usable_s": max(usable_s),
        "clients": told,
        "midway": midway,
        "memory_before_bytes": before_bytes,
        "memory_after_bytes": subject.memory_bytes(),
    }


async def deaths(subject: Router, engines: Engines) -> dict[str, Any]:
    """A tenth of the engines are gone without a word, and come back later."""
    half = len(engines.ports) // 2
    gone = engines.pairwise[: max(len(engines.ports) // BATCH_SHARE // 2 * 2, 2)]

    async def die() -> dict[str, float]:
        began = time.perf_counter()
        await engines.tell("die", gone)
        await subject.until_pairs((half - len(gone) // 2) ** 2)
        down_s = time.perf_counter() - began
        await subject.until_members(len(engines.ports) - len(gone))
        return {"engines": len(gone), "down_s": down_s, "forgotten_s": time.perf_counter() - began}

    found, told = await asking(subject, die())
    await engines.tell("revive", gone, router=subject.url)
    await subject.until_pairs(half**2)
    return found | {"clients": told}


async def row(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """A fresh router with so many engines."""
    async with engines_of(number) as engines, router() as subject:
        alone_bytes = subject.memory_bytes()
        found: dict[str, Any] = {"instances": number, "memory_alone_bytes": alone_bytes}
        found["storm"] = await storm(subject, engines)
        say(f"{number}: storm: {found['storm']}")
        await asyncio.sleep(options.seconds)
        found["idle"] = await idle(subject, engines, options.seconds)
        say(f"{number}: idle: {found['idle']}")
        found["requests"] = await requests(subject, engines, options.seconds)
        say(f"{number}: requests: {found['requests']}")
        found["restarts"] = [await restart(subject, engines, options.notice_s) for _ in range(options.restarts)]
        say(f"{number}: restarts: {found['restarts']}")
        found["deaths"] = await deaths(subject, engines)
        say(f"{number}: deaths: {found['deaths']}")
        await asyncio.sleep(options.seconds)
        return found | {"memory_at_the_end_bytes": subject.memory_bytes()}


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = [int(number) for number in options.instances.split(",")]
    return [{"round": place, **await row(number, options)} for place in range(options.rounds) for number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="10,100,1000", help="even numbers from 4 on")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part in which nothing happens")
    parser.add_argument("--notice-s", type=float, default=1.0, help="how long an engine that leaves still serves")
    parser.add_argument("--restarts", type=int, default=2, help="of all engines, one after the other")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    rows = uvloop.run(measure(options))
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
