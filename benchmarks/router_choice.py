"""How long the router takes to choose a decode and a prefill instance, by how many instances there are.

    python benchmarks/router_choice.py > benchmarks/results/router_choice.json

The pool alone, with its policy, in one process: no request is sent. Half of the instances are prefill, all are ready;
each prompt begins like one of a hundred. *Rollout* is the same while half of each role speaks another wire version.
*Join* is what an instance costs that comes and says who it is. Prints JSON; microseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from typing import Any

from measuring import machine, say

from kvferry.router.config import PolicySettings
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceRequest, Origin, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Instance, RequestCost, Role
from kvferry.router.telemetry.metrics import Metrics

NUM_REQUESTS, WARM_UP, NUM_PREFIXES = 300, 20, 100
IN_FLIGHT = 50


def fleet_of(num_instances: int) -> tuple[InstancePool, list[float]]:
    """All ready and open, and what each took to join."""
    pool, took = InstancePool((), Metrics(), PolicySettings(seed=0)), []
    for number in range(num_instances):
        instance = Instance(f"http://10.0.{number >> 8}.{number & 255}:8000", list(Role)[number % 2])
        began = time.perf_counter()
        pool.add(instance, Origin.REGISTERED)
        pool.introduce(instance, info("9", number))
        pool.probed(instance, ProbeResult.READY, "")
        took.append(time.perf_counter() - began)
    return pool, took


def info(wire_version: str, number: int) -> EngineInfo:
    return EngineInfo("kvferry", "1", wire_version, f"{wire_version}-{number}", ("model",), "cache")


def roll_out(pool: InstancePool) -> None:
    """Every second one of each role comes back as another version."""
    for number, instance in enumerate(pool.instances):
        if number % 4 < 2:
            pool.introduce(instance, info("10", number))


def choose(pool: InstancePool, number: int) -> tuple[Reservation, ...]:
    """Both instances of a request."""
    cost = RequestCost(1000, 100, prefixes=(number % NUM_PREFIXES,), prefix_tokens=256, model="model")
    decode = pool.reserve(InstanceRequest(Role.DECODE, cost))
    if not isinstance(decode, Reservation):
        raise SystemExit(f"no decode instance was chosen: {decode}")
    prefill = pool.reserve(InstanceRequest(Role.PREFILL, cost, partners=(decode.instance,)))
    if not isinstance(prefill, Reservation):
        raise SystemExit(f"no prefill instance was chosen: {prefill}")
    return decode, prefill


def microseconds(pool: InstancePool) -> float:
    """Of a request, while some others are open."""
    took: list[float] = []
    open_requests: list[tuple[Reservation, ...]] = []
    for number in range(WARM_UP + NUM_REQUESTS):
        began = time.perf_counter()
        open_requests.append(choose(pool, number))
        took.append(time.perf_counter() - began)
        if len(open_requests) > IN_FLIGHT:
            for reservation in open_requests.pop(0):
                reservation.release()
    return statistics.median(took[WARM_UP:]) * 1e6


def row(num_instances: int) -> dict[str, Any]:
    pool, joined = fleet_of(num_instances)
    steady = microseconds(pool)
    roll_out(pool)
    joins = statistics.median(joined[-10:]) * 1e6
    return {"instances": num_instances, "choice_us": steady, "rollout_us": microseconds(pool), "join_us": joins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="10,100,1000,5000", help="with commas between them")
    options = parser.parse_args()
    # One line for each instance of a rollout.
    logging.disable()
    rows = []
    for number in map(int, options.instances.split(",")):
        rows.append(row(number))
        say(str(rows[-1]))
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
