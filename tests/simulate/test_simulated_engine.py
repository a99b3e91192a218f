"""An engine: the times of its steps, added up by hand, and its queue beside the formula of one."""

import random
import statistics
from dataclasses import replace

import pytest
from fleet_support import COSTS, SEQUENCE_S, STEP_S, TOKEN_S, Observed

from kvferry.connectors.step_cost import StepCost
from kvferry.errors import ConfigurationError
from kvferry.simulate.costs import EngineCosts, beside_measured_prompts, points_named, points_of
from kvferry.simulate.fleet.work import EngineState


def decode_step_s(num_answers):
    return STEP_S + num_answers * SEQUENCE_S


def test_a_prompt_takes_its_chunks():
    seen = Observed().begin("a", 1.0, left=2500)
    seen.env.run()
    assert seen.ended["a"] == pytest.approx(1.0 + 3 * STEP_S + 2500 * TOKEN_S)
    assert seen.engine.busy_s == pytest.approx(3 * STEP_S + 2500 * TOKEN_S)


def test_what_is_left_of_a_chunk_is_for_the_next_prompt():
    seen = Observed().begin("a", 0.0, left=1600).begin("b", 0.0, left=1000)
    seen.env.run()
    # 1000; 600 and 400; 600.
    assert seen.ended["a"] == pytest.approx(2 * (STEP_S + 1000 * TOKEN_S))
    assert seen.ended["b"] == pytest.approx(seen.ended["a"] + STEP_S + 600 * TOKEN_S)


def test_an_answer_takes_as_many_steps_as_it_has_tokens():
    seen = Observed().begin("a", 0.0, num_tokens=7)
    seen.env.run()
    assert seen.first["a"] == pytest.approx(decode_step_s(1))
    assert seen.ended["a"] == pytest.approx(7 * decode_step_s(1))
    assert seen.progress["a"] == 7


def test_who_comes_in_the_middle_of_a_step_waits_for_its_end_and_makes_the_next_ones_longer():
    seen = Observed().begin("a", 0.0, num_tokens=10).begin("b", 2.5 * decode_step_s(1), num_tokens=4)
    seen.env.run()
    joined = 3 * decode_step_s(1)
    assert seen.first["b"] == pytest.approx(joined + decode_step_s(2))
    assert seen.ended["b"] == pytest.approx(joined + 4 * decode_step_s(2))
    assert seen.ended["a"] == pytest.approx(joined + 4 * decode_step_s(2) + 3 * decode_step_s(1))


def test_a_whole_request_writes_its_first_token_with_the_end_of_its_prompt():
    seen = Observed().begin("a", 0.0, left=500, num_tokens=3)
    seen.env.run()
    assert seen.first["a"] == pytest.approx(STEP_S + 500 * TOKEN_S)
    assert seen.ended["a"] == pytest.approx(seen.first["a"] + 2 * decode_step_s(1))


def test_a_prompt_beside_answers_has_the_rest_of_the_chunk_and_slows_them_down():
    costs = replace(COSTS, answer_tokens=100)
    seen = Observed(costs).begin("a", 0.0, num_tokens=4).begin("b", 0.0, left=1800)
    seen.env.run()
    slow = STEP_S + SEQUENCE_S + 900 * TOKEN_S
    # The first step had begun when the prompt came.
    assert seen.ended["b"] == pytest.approx(decode_step_s(1) + 2 * slow)
    assert seen.ended["a"] == pytest.approx(seen.ended["b"] + decode_step_s(1))
    assert seen.works["a"].num_slow == 2


def test_a_first_token_has_no_gap_before_it_that_could_be_slow():
    seen = Observed().begin("b", 0.0, left=1900).begin("a", 0.0, num_tokens=2)
    seen.env.run()
    assert seen.first["a"] == seen.ended["b"]
    assert seen.works["a"].num_slow == 0


@pytest.mark.parametrize(("slow_steps", "num_slow"), [(0.9, 2), (1.1, 1), (4.9, 1), (5.1, 0)])
def test_the_wait_for_a_place_between_two_tokens_is_one_gap(slow_steps, num_slow):
    """The answer of "b" has its first token while the only place is taken for four steps more, and its second after a
    step of its own."""
    one = decode_step_s(1)
    costs = EngineCosts(one, ((0, 0.0), (1, one)), overlap=1.0, max_answers=1)
    seen = Observed(costs, slow_s=slow_steps * one).begin("a", 0.0, num_tokens=6)
    seen.begin("b", 0.5 * one, left=1, num_tokens=3)
    seen.env.run()
    assert seen.ended["a"] == pytest.approx(6 * one)
    assert (seen.first["b"], seen.ended["b"]) == (pytest.approx(2 * one), pytest.approx(8 * one))
    assert seen.works["b"].num_slow == num_slow
    assert seen.works["a"].num_slow == (5 if slow_steps < 1 else 0)


def test_an_answer_that_has_its_place_at_once_has_no_gap_but_its_steps():
    """Nor has one whose cache was fetched: its first token comes after the wait."""
    seen = Observed(replace(COSTS, max_answers=1), slow_s=decode_step_s(1)).begin("a", 0.0, left=500, num_tokens=5)
    seen.begin("b", 0.065, num_tokens=5)
    seen.env.run()
    assert seen.first["b"] == pytest.approx(seen.first["a"] + 5 * decode_step_s(1))
    assert {name: work.num_slow for name, work in seen.works.items()} == {"a": 0, "b": 0}


def test_answers_that_do_not_fit_wait():
    costs = replace(COSTS, max_answers=1)
    seen = Observed(costs).begin("a", 0.0, num_tokens=5).begin("b", 0.0, num_tokens=5)
    seen.env.run(until=0.001)
    assert (seen.engine.num_answers, seen.engine.num_waiting, seen.engine.used_share) == (1, 1, 1.0)
    seen.env.run()
    assert seen.first["b"] == pytest.approx(6 * decode_step_s(1))


def test_contexts_that_do_not_fit_wait_and_a_single_one_never_does():
    costs = replace(COSTS, cache_tokens=100)
    seen = Observed(costs).begin("a", 0.0, num_tokens=5, context_tokens=200).begin("b", 0.0, num_tokens=1)
    seen.begin("c", 0.0, num_tokens=1, context_tokens=1)
    seen.env.run()
    assert seen.ended["a"] == pytest.approx(5 * decode_step_s(1))
    assert seen.ended["b"] == seen.ended["c"] == pytest.approx(5 * decode_step_s(1) + decode_step_s(2))


def test_a_step_reads_the_contexts_of_its_answers():
    costs = replace(COSTS, context_s=1e-6)
    seen = Observed(costs).begin("a", 0.0, num_tokens=5, context_tokens=3000)
    seen.env.run()
    assert seen.ended["a"] == pytest.approx(5 * (decode_step_s(1) + 0.003))


def test_what_ends_with_its_engine_is_returned_and_nobody_hears_of_it():
    seen = Observed().begin("a", 0.0, num_tokens=50).begin("b", 0.0, left=10_000)
    seen.env.run(until=0.3)
    lost = seen.engine.stop(EngineState.SILENT)
    seen.env.run()
    assert {id(work) for work in lost} == {id(work) for work in seen.works.values()}
    assert (seen.ended, seen.engine.num_waiting, seen.engine.num_answers) == ({}, 0, 0)
    seen.engine.start()
    assert seen.engine.state is EngineState.SILENT


def test_an_engine_is_idle_when_nothing_is_left_and_nothing_kept():
    seen = Observed().begin("a", 0.0, num_tokens=5)
    seen.env.run(until=0.001)
    seen.engine.keep()
    idle = seen.engine.idle()
    seen.env.run()
    assert not idle.triggered
    seen.engine.let_go()
    assert idle.triggered


def test_prompts_that_arrive_at_random_wait_as_long_as_the_formula_of_pollaczek_and_khinchine_says():
    """M/D/1: requests of one length, a step each, at 70 % of what the engine can do."""
    seen, dice, at_s, arrived = Observed(), random.Random(1), 0.0, {}
    service_s = STEP_S + 1000 * TOKEN_S
    for number in range(20_000):
        at_s += dice.expovariate(0.7 / service_s)
        arrived[number] = at_s
        seen.begin(number, at_s, left=1000)
    seen.env.run()
    waits = [seen.ended[number] - arrived[number] - service_s for number in arrived]
    assert statistics.fmean(waits) == pytest.approx(service_s * 0.7 / (2 * (1 - 0.7)), rel=0.05)
    assert seen.engine.busy_s == pytest.approx(20_000 * service_s)


def test_a_line_through_measured_steps():
    costs = EngineCosts(TOKEN_S, points_named("1=8ms,32=10ms,128=18ms"))
    assert costs.reading_s(1, 0) == pytest.approx(0.008)
    assert costs.reading_s(0, 0) == pytest.approx(0.008)
    assert costs.reading_s(80, 0) == pytest.approx(0.014)
    assert costs.reading_s(256, 0) == pytest.approx(0.018 + 128 * 0.008 / 96)


def test_a_step_cost_is_the_line_that_it_says():
    step = StepCost(0.0002, 0.02, 0.001, 0.5)
    costs = EngineCosts(step.token_s, points_of(step), step.overlap)
    for number in (0, 1, 7, 300):
        assert costs.seconds(100, number, 0) == pytest.approx(step.seconds(100, number))


@pytest.mark.parametrize("text", ["1=8ms,32=10ms,128=18ms", "0=8ms,1=9ms", "32=10ms", "1=8ms,2=9ms,3=11ms"])
def test_a_measured_speed_of_prompts_changes_nothing_but_steps_without_answers(text):
    points = points_named(text)
    costs = EngineCosts(TOKEN_S, beside_measured_prompts(points))
    assert costs.seconds(2000, 0, 0) == pytest.approx(2000 * TOKEN_S)
    for number in (1, 2, 3, 31, 32, 80, 256):
        assert costs.reading_s(number, 0) == pytest.approx(EngineCosts(TOKEN_S, points).reading_s(number, 0))


@pytest.mark.parametrize("text", ["", "8ms", "1=8", "2=8ms,1=9ms", "1=8ms,1=9ms", "1=8ms,2=7ms", "1=-8ms"])
def test_times_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigurationError):
        points_named(text)


@pytest.mark.parametrize("changes", [{"token_s": 0.0}, {"points": ((1, 0.0),)}, {"chunk_tokens": 0}])
def test_costs_that_cannot_be_are_refused(changes):
    with pytest.raises(ConfigurationError):
        replace(COSTS, **changes)
