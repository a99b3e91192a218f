"""How long the router takes to choose a decode and a prefill instance, by how many instances there are.

    python benchmarks/router_choice.py > benchmarks/results/router_choice.json

The pool alone, with its policy, in one process: no request is sent. Half of the instances are prefill, all are ready;
each prompt begins like one of a hundred. *Rollout* is the same while half of each role speaks another wire version.
*Join* is what an instance costs that comes and says who it is, *after a join* a choice that comes next, and *ready* the
answer of `/ready`. Prints JSON; microseconds, medians.
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
from msgspec import structs

from kvferry.router.config import PolicySettings
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceRequest, Origin, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.http.status import readiness
from kvferry.router.policy.records import Instance, RequestCost, Role
from kvferry.router.telemetry.metrics import Metrics

NUM_REQUESTS, WARM_UP, NUM_PREFIXES = 300, 20, 100
IN_FLIGHT, NUM_CHANGES = 50, 10


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


def after_a_join(pool: InstancePool) -> float:
    """Of a choice for which everything has to be found anew."""
    took = []
    for number in range(NUM_CHANGES):
        instance = pool.instances[number % len(pool.instances)]
        pool.introduce(instance, structs.replace(pool.info_of(instance), version=str(number)))
        began = time.perf_counter()
        choose(pool, number)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def answer_of_ready(pool: InstancePool) -> float:
    took = []
    for _ in range(NUM_CHANGES):
        began = time.perf_counter()
        readiness(pool, True)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def row(num_instances: int) -> dict[str, Any]:
    pool, joined = fleet_of(num_instances)
    found = {"instances": num_instances, "choice_us": microseconds(pool)}
    roll_out(pool)
    found |= {"rollout_us": microseconds(pool), "join_us": statistics.median(joined[-NUM_CHANGES:]) * 1e6}
    return found | {"after_a_join_us": after_a_join(pool), "ready_us": answer_of_ready(pool)}


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
