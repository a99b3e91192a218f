"""Where the time of one small fetch goes: every step of both agents, on one clock.

    python benchmarks/fetch_steps.py > benchmarks/results/fetch_steps.json

Prints JSON: the median milliseconds of each step, by transport, of one fetch after another between agents that have
met: 256 tokens in long rows, read directly, 2 ranks to 2. Beside them vLLM's rows over NIXL, as a list that lies
ready, and two messages that are answered at once. What travels is encoded, sent, received and decoded, and wakes a
thread up. The clock is put around the sessions and the loop by this benchmark (`fetch_marks.py`), which costs each
step some microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from fetch_marks import Mark, RoundTrips, record
from measuring import machine, say
from mixed_tp_cases import Request, Rig
from mixed_tp_target import Target

AGENT = "direct, not shared"
WARM_UP = 20
STEPS = (
    ("the engine's call reaches the agent's thread", ("target", "hears FetchRequest")),
    ("the target prepares a claim", ("target", "begins Claim")),
    ("the claim reaches the source's thread", ("source", "hears Claim")),
    ("the source checks it and prepares a grant", ("source", "begins Grant")),
    ("the grant reaches the target's thread", ("target", "hears Grant")),
    ("the target plans its rows", ("target", "begins Post")),
    ("the rows are posted", ("target", "ends Post")),
    ("the bytes move, and that is noticed", ("target", "hears TicketEnded")),
    ("the target prepares the word that they have landed", ("target", "begins Landed")),
    ("that word reaches the source's thread", ("source", "hears Landed")),
    ("the source sees that the lease was live, and has its digest", ("source", "begins Valid")),
    ("the answer reaches the target's thread", ("target", "hears Valid")),
    ("the target compares digests", ("target", "begins Fetched")),
    ("the engine's thread has it", ("engine", "has Fetched")),
)
"""What each step is, and the mark that ends it."""


def steps_of(began: float, ended: float, marks: dict[str, list[Mark]]) -> dict[str, float]:
    """Seconds of each. A mark that comes twice counts when it comes first."""
    first: dict[tuple[str, str], float] = {("engine", "has Fetched"): ended}
    for side, found in marks.items():
        for name, at in found:
            if at >= began:
                first.setdefault((side, name), at)
    ends = [began, *(first[mark] for _, mark in STEPS)]
    return {words: after - before for (words, _), before, after in zip(STEPS, ends, ends[1:], strict=False)}


def measure(transport: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    here = record()
    target = Target(Rig(2, 2, "head-major", transport), (AGENT,))
    try:
        (source,) = [target.sources[rank] for rank in target.rig.readable]
        source.ask("record")
        trips = RoundTrips(source.ask("echo"))
        target.choose(Request(num_tokens, "random"), target.source_memories())
        times: dict[str, list[float]] = defaultdict(list)
        for number in range(repeats + WARM_UP):
            here.clear()
            elapsed, _, began = target.timed_fetch(AGENT)
            marks = {"target": list(here), "source": [(name, at) for name, at in source.ask("marks")]}
            times["vLLM's rows over NIXL"].append(target.read_by_block())
            times["two messages and their answers over ZeroMQ"].append(trips.seconds())
            times["whole"].append(elapsed)
            for words, seconds in steps_of(began, began + elapsed, marks).items():
                times[words].append(seconds)
            if number == WARM_UP - 1:
                times.clear()
        trips.close()
    finally:
        target.close()
    return {words: round(statistics.median(values) * 1e3, 3) for words, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--transports", default="nixl,shm,cma,tcp")
    arguments = parser.parse_args()
    results = {}
    for transport in arguments.transports.split(","):
        results[transport] = measure(transport, arguments.tokens, arguments.repeats)
        say(f"{transport}: {results[transport]}")
    command = f"python benchmarks/{' '.join(['fetch_steps.py', *sys.argv[1:]])}"
    print(json.dumps({"command": command, "machine": machine(), "ms": results}, indent=1))


if __name__ == "__main__":
    main()
