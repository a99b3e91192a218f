"""Many runs, in several processes: those that share a pair of engines go to the same one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from simulator.defects.defect import DEFECTS, NO_DEFECT, Defect
from simulator.report.outcome import Outcome
from simulator.run import simulate
from simulator.state.shapes import NUM_SHAPES


def play_all(seeds: range, defect: Defect = NO_DEFECT, num_processes: int = 1) -> Iterator[Outcome]:
    """The outcomes of these seeds, in any order."""
    by_shape = [seeds[start::NUM_SHAPES] for start in range(min(NUM_SHAPES, len(seeds)))]
    play = partial(_play_some, defect.name)
    if num_processes == 1:
        for some in by_shape:
            yield from play(some)
        return
    # Forked processes would share the locks of whatever runs in this one.
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for outcomes in pool.imap_unordered(play, by_shape):
            yield from outcomes


def first_violation(defect: Defect, seeds: range) -> tuple[Outcome, ...]:
    """The first run, in the order of the seeds, that finds a planted defect; empty when none of them does."""
    found = (outcome for outcome in (simulate(seed, defect) for seed in seeds) if outcome.violation)
    return tuple(islice(found, 1))


def _play_some(defect_name: str, seeds: Sequence[int]) -> list[Outcome]:
    defect = DEFECTS.get(defect_name, NO_DEFECT)
    return [simulate(seed, defect) for seed in seeds]
