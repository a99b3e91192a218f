"""A fleet: every request ends once, the same seed has the same run, and each kind of incident does what it says."""

import math
from collections import Counter
from dataclasses import asdict, replace

import pytest
from fleet_support import SEQUENCE_S, SLO, STEP_S, TOKEN_S, WIRES, arrival, run, setting, transfer_s

from kvferry.bench.load.workload import Lengths, Piece, PlannedRequest, Prompt
from kvferry.bench.report.slo import ItlBy, Slo
from kvferry.cli.server.http import NOTICE_S
from kvferry.errors import ConfigurationError
from kvferry.router.config import PrefillFallback
from kvferry.router.fleet.prefill_speed import Mean
from kvferry.router.policy.records import Limits, NoInstance, Overloaded
from kvferry.simulate.incidents import FORMS, HotPrefix, incident_named, of_kind
from kvferry.simulate.load import PREFIX_TOKENS, Load, arrivals_of
from kvferry.simulate.outcome import Outcome, figures_of
from kvferry.simulate.ratio import find_ratio
from kvferry.simulate.settings import Fleet, Routing, Times
from kvferry.simulate.simulation import GRACE_S, simulate
from kvferry.simulate.summary import report_of

FLEET = Fleet(4, 8, per_rack=4)


def test_a_request_in_an_idle_fleet_takes_the_sum_of_its_parts():
    (outcome,) = simulate(setting(duration_s=5.0), [arrival(1.0)]).outcomes
    prefill_s, step_s = STEP_S + 800 * TOKEN_S, STEP_S + SEQUENCE_S
    assert outcome.ttft_s == pytest.approx(prefill_s + WIRES.handover_s + transfer_s(800) + step_s)
    assert outcome.itl_s == pytest.approx(step_s)
    assert outcome.ended_s == outcome.last_s == pytest.approx(outcome.first_s + 9 * step_s)
    assert (outcome.failure, outcome.is_alone, outcome.num_retries) == ("", False, 0)


def test_without_prefill_engines_a_decode_engine_does_everything():
    (outcome,) = simulate(setting(Fleet(0, 2), 5.0), [arrival(1.0)]).outcomes
    assert outcome.ttft_s == pytest.approx(STEP_S + 800 * TOKEN_S)
    assert outcome.is_alone


def test_what_is_cached_is_neither_computed_nor_moved_again():
    given = setting(duration_s=20.0)
    first, second = simulate(given, [arrival(1.0, 600, prefixes=(7, 8)), arrival(10.0, 600, prefixes=(7, 9))]).outcomes
    saved_s = PREFIX_TOKENS * TOKEN_S + transfer_s(600) - transfer_s(600 - PREFIX_TOKENS)
    assert second.ttft_s == pytest.approx(first.ttft_s - saved_s)


def test_requests_are_spread_over_idle_engines():
    outcomes = simulate(setting(Fleet(2, 2), 5.0), [arrival(1.0), arrival(1.0)]).outcomes
    assert outcomes[0].ttft_s == pytest.approx(outcomes[1].ttft_s)


@pytest.mark.parametrize(
    "incidents",
    [
        (),
        ("rack 1 dies at 20",),
        ("rack 1 dies from 20 to 25", "rack 0 dies at 22"),
        ("rack 0 dies from 20 to 40", "link of rack 1 at 0.1% from 10 to 60"),
        ("rollout from 10 by 4", "rack 2 dies from 25 to 50"),
        ("hot prefix 80% from 20 to 40",),
    ],
)
def test_every_request_ends_once_whatever_happens(incidents):
    result = run(setting(FLEET, 60.0, incidents), rate=15.0)
    assert len(result.outcomes) > 800
    for outcome in result.outcomes:
        assert outcome.arrived_s <= outcome.ended_s < math.inf
        assert outcome.is_answered != bool(outcome.failure)
    figures = report_of(result).figures
    assert figures.num_requests == len(result.outcomes)
    assert figures.num_good <= figures.num_requests - figures.num_failed
    assert all(0 <= resource.share <= 1 + 1e-9 for resource in report_of(result).resources)


def test_the_same_seed_has_the_same_run_and_another_one_has_another():
    given = setting(FLEET, 40.0, ("rack 1 dies from 10 to 20", "rollout from 15 by 2"))
    first, again, other = (run(given, rate=15.0, seed=seed) for seed in (1, 1, 2))
    assert list(map(asdict, first.outcomes)) == list(map(asdict, again.outcomes))
    assert first.samples == again.samples
    assert first.outcomes != other.outcomes


def test_all_is_over_when_nobody_can_answer():
    result = run(setting(Fleet(1, 1, per_rack=2), 30.0, ("rack 0 dies at 10",)), rate=2.0)
    late = [outcome for outcome in result.outcomes if outcome.arrived_s > 10]
    assert late
    assert all(outcome.failure for outcome in late)


def test_what_has_not_ended_when_the_run_does_is_unfinished_and_later_than_all_others():
    """A hundred prompts of 11 s each at one engine: the run is over before the last 46 have been computed."""
    result = simulate(setting(duration_s=5.0), [arrival(1.0, 100_000) for _ in range(100)])
    figures = report_of(result).figures
    num_ended = int(GRACE_S / (100 * STEP_S + 100_000 * TOKEN_S))
    assert (figures.num_requests, figures.num_failed, figures.num_unfinished) == (100, 0, 100 - num_ended)
    assert figures.ttft_s.median == pytest.approx(11.0 * 50.5, rel=0.01)
    assert (figures.ttft_s.mean, figures.ttft_s.percentiles) == (math.inf, (math.inf,) * 3)
    # How fast answers are written is known of those that were.
    assert figures.itl_s.p99 == pytest.approx(STEP_S + SEQUENCE_S)


def test_an_answer_that_has_begun_and_not_ended_has_a_first_token_and_no_time_between_tokens():
    costs = replace(setting().costs, max_answers=1)
    given = setting(Fleet(0, 1), 5.0, costs=costs)
    result = simulate(given, [arrival(1.0, output_tokens=10), arrival(1.0, output_tokens=100_000), arrival(1.0)])
    report = report_of(result)
    assert report.figures.num_unfinished == 2
    assert report.figures.ttft_s.p99 < 1.0
    assert (report.figures.itl_s.median, report.figures.itl_s.mean) == (math.inf, math.inf)
    shares = {resource.name: resource.share for resource in report.resources}
    assert shares["decode steps"] == pytest.approx(report.figures.answered_itl_s / SLO.itl_s)
    assert shares["decode steps"] < 1


@pytest.mark.parametrize(
    ("num_ended", "num_unfinished", "median", "p90"),
    [
        (0, 1, math.inf, math.inf),
        (1, 1, math.inf, math.inf),
        (2, 1, 2.0, math.inf),
        (10, 1, 6.0, 10.0),
        (9, 2, 6.0, math.inf),
    ],
)
def test_a_percentile_that_falls_on_an_unfinished_request_is_infinite(num_ended, num_unfinished, median, p90):
    """Also where it lies between one that was answered and one that was not."""
    ended = [Outcome(0.0, 100, 2, float(number), number + 1.0) for number in range(1, num_ended + 1)]
    figures = figures_of([*ended, *(Outcome(0.0, 100, 2) for _ in range(num_unfinished))], SLO, 0.0, 1.0)
    assert (figures.ttft_s.median, figures.ttft_s.percentiles[0]) == (median, p90)


def test_a_request_that_failed_is_not_unfinished():
    figures = figures_of([Outcome(0.0, 100, 2, failure="failed")], SLO, 0.0, 1.0)
    assert (figures.num_failed, figures.num_unfinished, figures.ttft_s, figures.itl_s) == (1, 0, None, None)


def test_a_rack_that_dies_fails_its_answers_and_the_others_go_on():
    given = setting(FLEET, 90.0, ("rack 1 dies from 30 to 50",))
    report = report_of(run(given, rate=15.0))
    (course,) = report.courses
    assert course.before.num_failed == 0
    assert course.before.good_share > 0.99
    # Until two probes have not been answered, requests are sent to it.
    assert 0 < course.during.num_failed < course.during.num_requests / 2
    assert course.during.num_retried > 0
    assert 0 < course.recovery_s < 60
    assert course.after.num_failed == 0
    assert course.after.good_share > 0.99


def test_what_it_takes_to_find_out_that_nobody_is_there_is_no_handover(monkeypatch):
    """Whoever has a limit for the first token plans with that mean."""
    told = []
    monkeypatch.setattr(Mean, "add", lambda self, value: told.append(value))
    result = run(setting(Fleet(4, 8, per_rack=4), 60.0, ("rack 1 dies at 20",)), rate=15.0)
    assert any(outcome.num_retries for outcome in result.outcomes)
    assert len(told) > 100
    assert max(told) < 1.0


def test_a_cache_whose_source_has_died_is_computed_again():
    """The only prefill engines are in a rack that dies while their caches are on the way over a slow link."""
    wires = replace(WIRES, link_bytes_per_s=20e6)
    given = setting(Fleet(1, 1, per_rack=1), 30.0, ("rack 0 dies at 2",), wires=wires)
    (outcome,) = simulate(given, [arrival(0.5)]).outcomes
    assert outcome.is_recomputed
    moved_s = 0.5 + STEP_S + 800 * TOKEN_S + WIRES.handover_s + 800 * 100_000 / 20e6
    silence_s = given.times.silence_s
    assert outcome.first_s == pytest.approx(moved_s + silence_s + STEP_S + 800 * TOKEN_S, abs=0.01)


def test_a_slow_uplink_delays_first_tokens_as_long_as_it_is_slow():
    given = setting(FLEET, 90.0, ("link of rack 1 at 1% from 30 to 60",))
    report = report_of(run(given, rate=10.0))
    (course,) = report.courses
    assert course.during.ttft_s.mean > 1.5 * course.before.ttft_s.mean
    assert course.after.ttft_s.mean == pytest.approx(course.before.ttft_s.mean, rel=0.3)
    uplinks = [sample.busy_uplink for sample in report.result.samples]
    times = [sample.at_s for sample in report.result.samples]
    assert max(busy for busy, at in zip(uplinks, times, strict=True) if 31 < at < 60) > 0.2


def test_a_rollout_replaces_every_engine_and_fails_nothing():
    given = setting(FLEET, 120.0, ("rollout from 20 by 2",))
    report = report_of(run(given, rate=8.0))
    (course,) = report.courses
    # Twelve engines, two at a time: six starts of ten seconds each, three to be noticed, and what is open then.
    assert 78 <= course.ends_s - 20 < 84
    assert report.figures.num_failed == 0
    assert report.figures.good_share > 0.99
    assert course.after.num_requests > 0


def test_a_draining_engine_waits_as_long_to_be_noticed_as_the_server_does():
    assert Times().notice_s == NOTICE_S


def test_a_hot_prefix_is_computed_less_often():
    given = setting(FLEET, 80.0, ("hot prefix 90% of 1024 tokens from 40",))
    report = report_of(run(given, rate=15.0, lengths=((1500, 1500), (10, 60))))
    samples = report.result.samples
    before, during = ([s.busy_prefill for s in samples if (s.at_s > 45) is later] for later in (False, True))
    assert sum(during) / len(during) < 0.6 * sum(before) / len(before)


def test_without_a_fallback_the_requests_are_refused():
    routing = Routing(fallback=PrefillFallback.REFUSE)
    result = run(setting(Fleet(0, 2), 10.0, routing=routing), rate=5.0)
    assert {outcome.failure for outcome in result.outcomes} == {"refused"}


def test_the_limits_and_the_policy_are_those_of_the_router():
    full = run(setting(Fleet(1, 1), 10.0, routing=Routing(limits=Limits(max_requests=1))), rate=50.0)
    assert any(outcome.failure == "turned_away" for outcome in full.outcomes)
    asked = []

    def policy(query):
        asked.append(query.role)
        return NoInstance() if len(asked) == 1 else Overloaded("mine", 1)

    found = simulate(setting(Fleet(1, 1), 5.0, routing=Routing(policy=policy)), [arrival(1.0), arrival(2.0)])
    assert [outcome.failure for outcome in found.outcomes] == ["failed", "turned_away"]


def test_a_request_is_judged_by_its_slow_gaps_where_that_is_asked_for():
    outcome = Outcome(0.0, 100, 201, first_s=1.0, last_s=3.0, num_slow=2)
    assert outcome.meets(replace(SLO, itl_by=ItlBy.P99))
    outcome.num_slow = 3
    assert outcome.meets(SLO)
    assert not outcome.meets(replace(SLO, itl_by=ItlBy.P99))
    assert not outcome.meets(Slo(e2el_s=2.9))
    assert not Outcome(0.0, 100, 201, failure="failed").meets(Slo())


def test_an_answer_that_waits_for_a_place_after_its_first_token_has_a_slow_gap():
    """A whole engine with one place: with 99 gaps, one that is slow is more than a hundredth of them."""
    costs = replace(setting().costs, max_answers=1)
    slo = Slo(itl_s=0.25, itl_by=ItlBy.P99)
    arrivals = [arrival(1.0, output_tokens=100), arrival(1.0, output_tokens=100)]
    first, second = simulate(setting(Fleet(0, 1), 5.0, costs=costs, slo=slo), arrivals).outcomes
    assert (first.num_slow, second.num_slow) == (0, 1)
    assert (first.meets(slo), second.meets(slo)) == (True, False)
    assert second.meets(replace(slo, itl_by=ItlBy.MEAN))


def test_the_best_ratio_is_the_one_that_the_work_says():
    """Ten engines: a prompt takes about 0.1 s of one, and an answer one of its eight places for half a second."""
    costs = replace(setting().costs, max_answers=8)
    given = setting(Fleet(5, 5), 10.0, costs=costs)
    arrivals = arrivals_of(Load(60.0, 10.0, Lengths(900, 1000), Lengths(40, 50)).requests(), (), 0)
    told = []
    best, tried = find_ratio(given, arrivals, told.append)
    by_number = {report.result.setting.fleet.num_prefill: report for report in tried}
    assert len(told) == len(tried)
    assert list(by_number) == sorted(by_number)
    # 60 prompts/s of 0.105 s each are 6.3 engines' work; 60 answers/s of 45 steps of up to 14 ms, 8 at a time: 4.7.
    assert best.result.setting.fleet.num_prefill in (6, 7)
    assert best.figures.goodput == max(report.figures.goodput for report in tried)
    assert by_number[1].figures.goodput < best.figures.goodput
    assert by_number[9].figures.goodput < best.figures.goodput


def test_a_single_engine_has_no_ratio():
    with pytest.raises(ConfigurationError):
        find_ratio(setting(Fleet(0, 1)), [arrival(1.0)], lambda _: None)


def test_names_of_beginnings_are_equal_as_far_as_prompts_are():
    def names(*pieces):
        planned = PlannedRequest(0.0, Prompt(tuple(Piece(*piece) for piece in pieces)), 1)
        return arrivals_of([planned], (), 0)[0].names

    first, second = names(("a", 600), ("b", 600)), names(("a", 600), ("c", 600))
    assert len(first) == 1200 // PREFIX_TOKENS
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, False, False]
    assert names(("a", 100)) == ()


def test_a_hot_prefix_is_in_as_many_prompts_as_it_says():
    hot = of_kind([incident_named("hot prefix 40% of 512 tokens from 20 to 80")], HotPrefix)
    planned = Load(50.0, 100.0, Lengths(600, 900), Lengths(5, 5)).requests()
    arrivals = arrivals_of(planned, hot, 0)
    first = [each.cost.prefixes[0] for each in arrivals]
    shared = max(set(first), key=first.count)
    times = [each.at_s for each, name in zip(arrivals, first, strict=True) if name == shared]
    assert 20 <= min(times) < max(times) < 80
    assert len(times) / sum(20 <= each.at_s < 80 for each in arrivals) == pytest.approx(0.4, abs=0.05)
    assert [each.cost.prompt_tokens for each in arrivals] == [each.prompt.num_tokens for each in planned]


def test_hot_prefixes_at_one_time_are_each_in_as_many_prompts_as_they_say():
    texts = "hot prefix 40% of 512 tokens from 0", "hot prefix 30% of 512 tokens from 0"
    planned = Load(50.0, 100.0, Lengths(600, 900), Lengths(5, 5)).requests()
    first = [each.names[0] for each in arrivals_of(planned, of_kind(map(incident_named, texts), HotPrefix), 0)]
    (_, most), (_, second), (_, other) = Counter(first).most_common(3)
    assert most / len(first) == pytest.approx(0.4, abs=0.03)
    assert second / len(first) == pytest.approx(0.3, abs=0.03)
    assert other == 1


@pytest.mark.parametrize("text", FORMS)
def test_every_form_of_an_incident_is_understood(text):
    assert incident_named(f"  {text} ").words == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rack dies at 60",
        "rack 3 dies",
        "rack 3 dies from 60",
        "rack 3 dies from 60 to 50",
        "link of rack 2 at 0% from 1 to 2",
        "link of rack 2 at 200% from 1 to 2",
        "rollout from 60 by 0",
        "hot prefix 140% from 60",
        "rack 3 dies at -1",
        "rack 3 dies at 1e999",
    ],
)
def test_an_incident_that_cannot_be_is_refused_with_what_can(text):
    with pytest.raises(ConfigurationError) as refused:
        incident_named(text)
    assert refused.value.expected


@pytest.mark.parametrize("text", ["rack 3 dies at 60", "link of rack 9 at 10% from 1 to 2", "rollout from 100"])
def test_an_incident_that_does_not_fit_the_fleet_is_refused(text):
    with pytest.raises(ConfigurationError) as refused:
        setting(FLEET, 100.0, (text,))
    assert refused.value.found == text


@pytest.mark.parametrize(
    "texts",
    [
        ("rack 1 dies from 20 to 40", "rack 1 dies from 30 to 50"),
        ("rack 1 dies from 30 to 50", "rack 1 dies from 20 to 40"),
        ("rack 1 dies at 20", "rack 1 dies from 50 to 60"),
        ("link of rack 2 at 10% from 20 to 60", "link of rack 2 at 1% from 30 to 40"),
        ("hot prefix 60% from 20 to 60", "hot prefix 30% from 20", "hot prefix 20% from 50"),
    ],
)
def test_incidents_that_would_undo_each_other_are_refused(texts):
    with pytest.raises(ConfigurationError) as refused:
        setting(FLEET, 100.0, texts)
    assert texts[0] in refused.value.found
    assert texts[-1] in refused.value.found


@pytest.mark.parametrize(
    "texts",
    [
        ("rack 1 dies from 20 to 40", "rack 0 dies from 30 to 50"),
        ("rack 1 dies from 20 to 40", "link of rack 1 at 10% from 20 to 40"),
        ("rack 1 dies from 20 to 40", "rack 1 dies from 40 to 50"),
        ("hot prefix 60% from 20 to 60", "hot prefix 40% from 20", "hot prefix 60% from 60"),
        ("rollout from 20", "rollout from 50"),
    ],
)
def test_other_incidents_may_be_at_one_time(texts):
    assert [incident.words for incident in setting(FLEET, 100.0, texts).incidents] == list(texts)


def test_a_slow_uplink_in_a_fleet_of_one_rack_is_refused():
    with pytest.raises(ConfigurationError) as refused:
        setting(Fleet(1, 1), 100.0, ("link of rack 0 at 10% from 1 to 2",))
    assert "two racks" in refused.value.expected


@pytest.mark.parametrize("words", [(-1, 4), (1, 0), (1, 1, 0), (15_000, 15_000)])
def test_a_fleet_that_cannot_be_is_refused(words):
    with pytest.raises(ConfigurationError):
        Fleet(*words)


@pytest.mark.parametrize(("rate", "duration_s"), [(0.0, 10.0), (10.0, 0.0), (math.inf, 10.0), (1e6, 1e6), (1e-9, 1.0)])
def test_a_load_that_cannot_be_is_refused(rate, duration_s):
    with pytest.raises(ConfigurationError):
        Load(rate, duration_s, Lengths(1, 1), Lengths(1, 1)).requests()
