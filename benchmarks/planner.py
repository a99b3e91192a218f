"""What planning costs, in one run: per peer (route and bind) and per request (copies), against one numpy outer sum.

    python benchmarks/planner.py > benchmarks/results/planner.json

Times are medians of interleaved repeats, in milliseconds.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvferry.plan import Attention, Copies, EngineShape, Layout, TokenRange, bind, copies_for, describe, route

MODEL = Attention(num_layers=80, num_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2)
NUM_TOKENS = 131_072
BLOCK_TOKENS = 16


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def engines(tensor_parallel: int, num_blocks: int, first_address: int) -> tuple[Layout, ...]:
    return describe(MODEL, EngineShape(tensor_parallel, 1, BLOCK_TOKENS, num_blocks, "token-major"), first_address)


def meet(num_blocks: int) -> Callable[[], object]:
    """Route and bind TP8 to TP4: everything that is computed once per peer."""
    sources, targets = engines(8, num_blocks, 1 << 50), engines(4, num_blocks, 1 << 51)

    def work() -> None:
        found = route(sources, targets)
        for source, target in found.pairs():
            bind(found.between(source, target), sources[source], targets[target])

    return work


def requests() -> dict[str, Callable[[], Copies]]:
    """Copies of one long request with equal layouts, with block ids at random and adjacent."""
    num_needed = NUM_TOKENS // BLOCK_TOKENS
    (source,), (target,) = engines(1, 2 * num_needed, 1 << 50), engines(1, 2 * num_needed, 1 << 51)
    program = bind(route((source,), (target,)).legs, source, target)
    ids = list(range(2 * num_needed))
    random.Random(0).shuffle(ids)
    tokens = TokenRange(0, NUM_TOKENS)
    return {
        "random": lambda: copies_for(program, [ids[:num_needed]], [ids[num_needed:]], tokens),
        "adjacent": lambda: copies_for(program, [range(num_needed)], [range(num_needed)], tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    by_ids = requests()
    rows = {name: len(work()) for name, work in by_ids.items()}
    left = np.arange(2 * MODEL.num_layers, dtype=np.uint64)
    right = np.arange(rows["random"] // len(left), dtype=np.uint64)
    work = {
        "meet_small_pool": meet(1_000),
        "meet_large_pool": meet(1_000_000),
        "copies_random": by_ids["random"],
        "copies_adjacent": by_ids["adjacent"],
        "outer_sum": lambda: np.add.outer(left, right).ravel(),
    }
    times = {name: [] for name in work}
    for _ in range(repeats):
        for name, step in work.items():
            times[name].append(timed(step))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "command": f"python benchmarks/planner.py --repeats {repeats}",
                "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
                "median_ms": {name: round(value, 3) for name, value in median.items()},
                "rows": rows,
                "ratios": {
                    "copies_random / outer_sum": round(median["copies_random"] / median["outer_sum"], 2),
                    "copies_adjacent / copies_random": round(median["copies_adjacent"] / median["copies_random"], 3),
                    "meet_large_pool / meet_small_pool": round(
                        median["meet_large_pool"] / median["meet_small_pool"], 2
                    ),
                },
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
