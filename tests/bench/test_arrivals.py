"""Arrival times and lengths are independent: a queue that they feed waits as long as queueing theory says."""

from statistics import fmean

import pytest

from kvferry.bench.load.workload import Lengths, Synthetic, poisson, synthetic
from kvferry.simulate.load import Load

RATE, NUM, SEEDS = 0.7, 1500, range(40)
# Lengths of ten bits take as many random words as gaps: from equal dice, each would follow from the same words.
LENGTHS = Lengths(1, 1023)


def of_bench(seed):
    return synthetic(Synthetic(NUM, LENGTHS, LENGTHS, seed), poisson(NUM, RATE, seed))


def of_simulation(seed):
    return Load(RATE, NUM / RATE, LENGTHS, LENGTHS, seed).requests()


def mean_wait_s(requests, token_s):
    """The mean wait for a single server that takes so long for each token of a prompt."""
    waits, free_s = [], 0.0
    for request in requests:
        waits.append(max(free_s - request.at_s, 0.0))
        free_s = max(free_s, request.at_s) + request.prompt.num_tokens * token_s
    return fmean(waits)


@pytest.mark.parametrize("drawn", [of_bench, of_simulation])
def test_a_queue_of_random_prompts_waits_as_pollaczek_and_khinchine_say(drawn):
    token_s = 1.0 / 512
    second_moment = fmean((token_s * length) ** 2 for length in range(LENGTHS.low, LENGTHS.high + 1))
    expected_s = RATE * second_moment / (2 * (1 - RATE * 1.0))
    assert fmean(mean_wait_s(drawn(seed), token_s) for seed in SEEDS) == pytest.approx(expected_s, rel=0.1)
