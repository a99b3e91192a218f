"""What steps would have to cost for 2P1D to beat three whole engines, each at its best: a discrete-event model.

    python benchmarks/goodput_search.py > benchmarks/results/goodput_search.json

The setting is that of `goodput.py`: three engines, the same requests at the same times, the same SLO, the router's own
policy (least outstanding work) and the embedded engine's cost of a step (`--simulated-step`). But nothing is computed,
so that thousands of runs take minutes. `check` runs what `goodput.py` has measured and shows both. `search` looks, for
each cost, for the best number of prefill engines and the best chunks of either system: the highest rate at which nine
requests of ten are good.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import simpy
from measuring import machine, say

from kvferry.connectors.step_cost import StepCost, step_cost_named
from kvferry.router.policy.least_work import choose
from kvferry.router.policy.records import Instance, Load, RequestCost, Role

MEASURED = ("goodput.json", "goodput_overlap.json")
RESULTS = Path(__file__).parent / "results"
MARK = 1.65
ISL, OSL = 1500, 150
# In goodput.py a real token of a prompt stands for ten, and an answer's token takes as much of a chunk.
SCALE = 10
TTFT_S, ITL_S, ATTAINMENT = 5.0, 0.1, 0.9
CHUNKS = (100, 150, 200, 300, 512, 1024, 2048)
# From the end of a prefill to a decode engine that has the cache: 246 MB at 25 GB/s, and what the engines say.
HANDOVER_S = 0.02
NUM_REQUESTS, SEEDS = 150, (1, 2, 3)
RATE_STEP = 0.01
# More than any of them serves.
MOST_STEPS = 1 << 10
PROMPT = RequestCost(ISL, OSL)


@dataclass(slots=True)
class Request:
    """`left` tokens of the prompt are to be computed; `times` are those of its tokens."""

    arrived: float
    left: int = ISL
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.arrived

    def itl_s(self, by: str) -> float:
        gaps = sorted(later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False))
        return statistics.fmean(gaps) if by == "mean" else gaps[math.ceil(0.99 * len(gaps)) - 1]

    def is_good(self, by: str) -> bool:
        return self.ttft_s <= TTFT_S and self.itl_s(by) <= ITL_S


@dataclass(frozen=True, slots=True)
class System:
    """Prefill engines and decode engines; without the former each of the others serves whole requests."""

    num_prefill: int
    num_decode: int
    chunk_tokens: int

    def __str__(self) -> str:
        split = f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill else f"{self.num_decode} whole"
        return f"{split}, chunks of {self.chunk_tokens}"


class Engine:
    """One engine's steps: each computes the next token of every answer, and of prompts what is left of a chunk."""

    def __init__(self, env: simpy.Environment, role: Role, number: int, chunk_tokens: int, cost: StepCost) -> None:
        self.instance = Instance(f"http://{role}-{number}", role)
        self._env, self._chunk_tokens, self._cost = env, chunk_tokens, cost
        self._prompts: deque[tuple[Request, simpy.Event]] = deque()
        self._answers: list[tuple[Request, simpy.Event]] = []
        self._wake = env.event()
        self.num_outstanding = self.last_chosen = 0
        env.process(self._steps())

    def load(self) -> Load:
        work = self.num_outstanding * PROMPT.work(self.instance.role)
        return Load(self.instance, True, self.num_outstanding, self.last_chosen, outstanding_tokens=work)

    def compute(self, request: Request) -> simpy.Event:
        """Compute a prompt, which ends with its first token."""
        return self._add(self._prompts, request)

    def answer(self, request: Request) -> simpy.Event:
        """Write the tokens of an answer."""
        return self._add(self._answers, request)

    def _add(self, queue: Any, request: Request) -> simpy.Event:
        done = self._env.event()
        queue.append((request, done))
        if not self._wake.triggered:
            self._wake.succeed()
        return done

    def _steps(self) -> Generator[simpy.Event]:
        while True:
            if not (self._prompts or self._answers):
                self._wake = self._env.event()
                yield self._wake
            yield from self._step()

    def _step(self) -> Generator[simpy.Event]:
        answers, room = list(self._answers), self._chunk_tokens - SCALE * len(self._answers)
        num_tokens, computed = 0, []
        while self._prompts and room > num_tokens:
            request, done = self._prompts[0]
            part = min(request.left, room - num_tokens)
            request.left -= part
            num_tokens += part
            if request.left:
                break
            computed.append((request, done))
            self._prompts.popleft()
        yield self._env.timeout(self._cost.seconds(num_tokens, len(answers)))
        for request, _ in answers:
            request.times.append(self._env.now)
        for _, done in computed:
            done.succeed()
        for each in [each for each in answers if len(each[0].times) >= OSL]:
            self._answers.remove(each)
            each[1].succeed()


class Fleet:
    """The engines of a system behind a router."""

    def __init__(self, env: simpy.Environment, system: System, cost: StepCost) -> None:
        self._env = env
        counts = ((Role.PREFILL, system.num_prefill), (Role.DECODE, system.num_decode))
        self._engines = {
            role: [Engine(env, role, number, system.chunk_tokens, cost) for number in range(count)]
            for role, count in counts
        }
        self._num_choices = 0

    def serve(self, request: Request) -> Generator[simpy.Event]:
        if self._engines[Role.PREFILL]:
            with self._chosen(Role.PREFILL) as prefill:
                yield prefill.engine.compute(request)
            yield self._env.timeout(HANDOVER_S)
            with self._chosen(Role.DECODE) as decode:
                yield decode.engine.answer(request)
            return
        with self._chosen(Role.DECODE) as whole:
            yield whole.engine.compute(request)
            request.times.append(self._env.now)
            yield whole.engine.answer(request)

    def _chosen(self, role: Role) -> Assigned:
        engines = self._engines[role]
        found = choose([engine.load() for engine in engines], PROMPT)
        engine = next(engine for engine in engines if engine.instance == found)
        self._num_choices += 1
        engine.last_chosen = self._num_choices
        return Assigned(engine)


@dataclass(frozen=True, slots=True)
class Assigned:
    """A request's place at an engine."""

    engine: Engine

    def __enter__(self) -> Assigned:
        self.engine.num_outstanding += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.num_outstanding -= 1


def run(system: System, cost: StepCost, rate: float, num_requests: int, seed: int) -> list[Request]:
    """All requests, answered."""
    env, dice, at = simpy.Environment(), random.Random(seed), 0.0
    fleet, requests = Fleet(env, system, cost), []
    for _ in range(num_requests):
        at += dice.expovariate(rate)
        requests.append(Request(at))

    def arrivals() -> Generator[simpy.Event]:
        served = []
        for request in requests:
            yield env.timeout(request.arrived - env.now)
            served.append(env.process(fleet.serve(request)))
        yield env.all_of(served)

    env.run(env.process(arrivals()))
    return requests


@cache
def attainment(system: System, cost: StepCost, rate: float, by: str) -> float:
    """The share of requests that are good, of several loads together."""
    requests = [each for seed in SEEDS for each in run(system, cost, rate, NUM_REQUESTS, seed)]
    return statistics.fmean(request.is_good(by) for request in requests)


def highest_rate(system: System, cost: StepCost, by: str) -> float:
    """The highest rate, in steps of RATE_STEP, at which enough requests are good; 0 where none is."""
    low, high = 0, MOST_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attainment(system, cost, middle * RATE_STEP, by) >= ATTAINMENT else (low, middle)
    return round(low * RATE_STEP, 2)


def best(systems: Sequence[System], cost: StepCost, by: str) -> dict[str, Any]:
    rates = {system: highest_rate(system, cost, by) for system in systems}
    chosen = max(rates, key=lambda system: rates[system])
    return {"system": str(chosen), "rate": rates[chosen]}


def search(cost: StepCost, by: str, chunks: Sequence[int]) -> dict[str, Any]:
    """Both systems at their best."""
    ours = best([System(num, 3 - num, chunk) for num in (1, 2) for chunk in chunks], cost, by)
    whole = best([System(0, 3, chunk) for chunk in chunks], cost, by)
    ratio = round(ours["rate"] / whole["rate"], 2) if whole["rate"] else None
    row = {"by": by, "ours": ours, "whole": whole, "ratio": ratio}
    say(f"{cost} {row}")
    return row


def check() -> list[dict[str, Any]]:
    """What was measured on real engines with simulated steps, beside the model's."""
    rows = []
    for name in MEASURED:
        found = json.loads((RESULTS / name).read_text())
        cost = step_cost_named(found["simulated_step"])
        cost = replace(cost, token_s=cost.token_s / SCALE)
        for system, measured in found["systems"].items():
            engines = measured["engines"]
            model = System(engines["prefill"], engines["decode"], engines["chunk_tokens"])
            for run_of in measured["runs"]:
                rate = run_of["request_rate"]
                rows.append(
                    {"of": name, "system": system, "rate": rate}
                    | {f"measured by {by}": round(run_of[f"attainment_by_{by}"], 2) for by in ("mean", "p99")}
                    | {f"model by {by}": round(attainment(model, cost, rate, by), 2) for by in ("mean", "p99")}
                )
                say(str(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-ms", default="0.3,0.6,0.8,1.2", help="cost of a prompt's token")
    parser.add_argument("--steps-ms", default="24,48", help="cost of a step: to read the weights")
    parser.add_argument("--sequence-ms", type=float, default=1.55, help="cost of an answer's token")
    parser.add_argument("--overlaps", default="0,0.5,1", help="how much of computing and reading happens at once")
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)), help="tokens of prefill in a step")
    options = parser.parse_args()
    rows, chunks = [], tuple(map(int, options.chunks.split(",")))
    for overlap in map(float, options.overlaps.split(",")):
        for step_ms in map(float, options.steps_ms.split(",")):
            for token_ms in map(float, options.tokens_ms.split(",")):
                cost = StepCost(token_ms / 1e3, step_ms / 1e3, options.sequence_ms / 1e3, overlap)
                given = {"token_ms": token_ms, "step_ms": step_ms, "overlap": overlap}
                rows += [given | search(cost, by, chunks) for by in ("mean", "p99")]
    command = " ".join(["python", *sys.argv])
    facts = {"command": command, "machine": machine(), "check": check(), "mark": MARK, "rows": rows}
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
