"""The fleet's engines beside the model that has each step, and so beside what was measured on real engines."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.bench.report.slo import ItlBy, Slo
from kvferry.connectors.step_cost import step_cost_named
from kvferry.router.policy.records import RequestCost
from kvferry.simulate.costs import CacheSize, EngineCosts, points_of
from kvferry.simulate.load import Arrival
from kvferry.simulate.settings import Fleet, Setting, Wires
from kvferry.simulate.simulation import simulate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Where both roles are apart, the shares are the same. In the step-exact model a whole engine begins a step before an
# answer whose prompt has just been computed can join it; here it joins. That is one step of 150.
APART, WHOLE = 0.001, 0.05
# Loads of 36 requests on two cores: what one more or less of them is, and what cores that are busy add.
MEASURED = 0.15


@pytest.fixture(scope="module")
def exact():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import goodput_search

        yield goodput_search
    finally:
        sys.path.remove(str(BENCHMARKS))


def share_of_good(exact, system, cost, rate, by):
    """As `attainment` of the model that has each step: the same requests at the same times."""
    costs = EngineCosts(
        cost.token_s,
        points_of(cost),
        cost.overlap,
        chunk_tokens=system.chunk_tokens,
        answer_tokens=exact.SCALE,
    )
    slo, good, number = Slo(exact.TTFT_S, exact.ITL_S, itl_by=ItlBy(by)), 0, 0
    # A cache next to nothing: what a transfer takes is in the handover there.
    wires = Wires(CacheSize(1.0), handover_s=exact.HANDOVER_S)
    for seed in exact.SEEDS:
        dice, at_s, arrivals = random.Random(seed), 0.0, []
        for _ in range(exact.NUM_REQUESTS):
            at_s += dice.expovariate(rate)
            arrivals.append(Arrival(at_s, RequestCost(exact.ISL, exact.OSL)))
        fleet = Fleet(system.num_prefill, system.num_decode)
        result = simulate(Setting(fleet, costs, wires, slo, at_s + 1.0), arrivals)
        good += sum(outcome.meets(slo) for outcome in result.outcomes)
        number += len(result.outcomes)
    return good / number


def cases():
    for name in ("goodput.json", "goodput_overlap.json"):
        found = json.loads((BENCHMARKS / "results" / name).read_text())
        for words, system in found["systems"].items():
            for run in system["runs"]:
                yield pytest.param(
                    found["simulated_step"], system["engines"], run, id=f"{words}, {run['request_rate']}"
                )


@pytest.mark.parametrize(("step", "engines", "run"), list(cases()))
@pytest.mark.slow
def test_the_share_of_good_requests_is_that_of_the_model_with_each_step(exact, step, engines, run):
    cost = step_cost_named(step)
    cost = replace(cost, token_s=cost.token_s / exact.SCALE)
    system = exact.System(engines["prefill"], engines["decode"], engines["chunk_tokens"])
    for by in ("mean", "p99"):
        share = share_of_good(exact, system, cost, run["request_rate"], by)
        of_each_step = exact.attainment(system, cost, run["request_rate"], by)
        assert share == pytest.approx(of_each_step, abs=APART if system.num_prefill else WHOLE)
        if system.num_prefill:
            assert share == pytest.approx(run[f"attainment_by_{by}"], abs=MEASURED)
