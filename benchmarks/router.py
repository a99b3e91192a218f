"""Routers under load, side by side in one run: added latency, many streams at once, memory.

`python benchmarks/router.py [--example-proxy FILE --example-python PYTHON] [--vllm-router PROGRAM] [--parts soak]`

Each router runs on one core; the engines, which stream and compute nothing, and the load generator share the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import uvloop
from measuring import machine, say
from router_load import TROUBLES, Load, Outcome, percentile, run
from router_subjects import Subject, cpu_s, engine, rss_bytes, started, subjects

ROUTER_CORE, LOAD_CORE = 0, 1
RATE, LATENCY_TOKENS, LATENCY_GAP_MS = 200.0, 8, 20.0
STREAMS, STREAM_TOKENS, STREAM_GAP_MS = 1000, 40, 250.0
WARM_UP = 200


def ask(load: Load) -> Outcome:
    return uvloop.run(run(load))


def latency(port: int, pid: int, engines: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    """Times to the first byte at RATE requests/s, and of the same two requests without a router just before."""
    num, keeps = int(RATE * options.seconds), options.connections == "kept"
    ask(Load((port,), WARM_UP, RATE, LATENCY_TOKENS))
    direct = ask(Load(engines, num, RATE, LATENCY_TOKENS, keeps=keeps))
    before_s, began = cpu_s(pid), time.perf_counter()
    routed = ask(Load((port,), num, RATE, LATENCY_TOKENS, keeps=keeps))
    busy = (cpu_s(pid) - before_s) / (time.perf_counter() - began)
    base_s = statistics.median(direct.first_s)
    added = {f"added_p{part}_ms": (percentile(routed.first_s, part / 100) - base_s) * 1000 for part in (50, 90, 99)}
    return {
        "requests": num,
        "errors": len(routed.errors),
        "first_error": routed.errors[:1],
        "direct_p50_ms": base_s * 1000,
        "direct_p99_ms": percentile(direct.first_s, 0.99) * 1000,
        **added,
        "generator_late_p99_ms": percentile(routed.late_s, 0.99) * 1000,
        "core_busy": busy,
    }


def streams(port: int, pid: int) -> dict[str, Any]:
    """STREAMS streams that are all open at the same time."""
    before_s, began = cpu_s(pid), time.perf_counter()
    found = ask(Load((port,), STREAMS, 0.0, STREAM_TOKENS, ramp_s=5.0))
    took_s = time.perf_counter() - began
    ideal_s = 5.0 + STREAM_TOKENS * STREAM_GAP_MS / 1000
    return {
        "streams": STREAMS,
        "most_at_once": found.most_open,
        "errors": len(found.errors),
        "first_error": found.errors[:1],
        "seconds": took_s,
        "ideal_seconds": ideal_s,
        "core_busy": (cpu_s(pid) - before_s) / took_s,
        "memory_bytes": rss_bytes(pid),
    }


def soak(port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Memory while requests come, some in trouble. Growth is of the second half: the first fills pools and caches."""
    seconds, rate = options.soak_s, options.soak_rate
    samples, errors, first_error, began = [], 0, [], time.perf_counter()
    while time.perf_counter() - began < seconds:
        seed = len(samples)
        found = ask(Load((port,), int(rate * 10), rate, LATENCY_TOKENS, seed=seed, trouble=options.soak_trouble))
        errors += len(found.errors)
        first_error = first_error or found.errors[:1]
        samples.append(rss_bytes(pid))
        say(f"  {time.perf_counter() - began:.0f} s: {samples[-1] / 2**20:.1f} MiB, {errors} errors")
    half = samples[len(samples) // 2]
    return {
        "seconds": seconds,
        "requests_per_s": rate,
        "in_trouble": options.soak_trouble,
        "troubles": TROUBLES,
        "errors": errors,
        "first_error": first_error,
        "samples_mib": [round(sample / 2**20, 2) for sample in samples],
        "growth_in_second_half_bytes": samples[-1] - half,
    }


def measure(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for, each with a router and engines of its own."""
    found: dict[str, Any] = {"name": subject.name, "what": subject.note}
    for part in options.parts:
        gap_ms = STREAM_GAP_MS if part == "streams" else LATENCY_GAP_MS
        num_tokens = STREAM_TOKENS if part == "streams" else LATENCY_TOKENS
        with (
            engine(num_tokens, gap_ms, LOAD_CORE) as prefill,
            engine(num_tokens, gap_ms, LOAD_CORE) as decode,
            started(subject, prefill, decode, ROUTER_CORE) as (port, pid),
        ):
            time.sleep(options.settle_s)
            if part == "latency":
                found[part] = latency(port, pid, (prefill, decode), options)
            elif part == "streams":
                found[part] = streams(port, pid)
            else:
                found[part] = soak(port, pid, options)
        say(f"{subject.name}: {part}: {json.dumps(found[part])}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example-proxy", default="")
    parser.add_argument("--example-python", default=sys.executable)
    parser.add_argument("--vllm-router", default="")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", choices=["new", "kept"], default="new", help="of the client, for latency")
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--parts", nargs="*", default=["latency", "streams"], choices=["latency", "streams", "soak"])
    parser.add_argument("--soak-s", type=float, default=600.0)
    parser.add_argument("--soak-rate", type=float, default=RATE / 2)
    parser.add_argument("--soak-trouble", type=float, default=0.05)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    chosen = [
        s
        for s in subjects(options.example_proxy, options.example_python, options.vllm_router)
        if options.only in s.name
    ]
    result = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "engines": "fake: they stream and compute nothing; they share a core with the load generator",
        "load": f"{RATE:.0f} requests/s, Poisson, {LATENCY_TOKENS} tokens each {LATENCY_GAP_MS:.0f} ms",
        "connections": options.connections,
        "routers": [measure(subject, options) for subject in chosen],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
