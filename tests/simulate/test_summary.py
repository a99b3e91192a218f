"""What a report says of incidents, and of what is busy."""

import math
from dataclasses import replace

import pytest
from fleet_support import WIRES, arrival, run, setting

from kvferry.simulate.settings import Fleet, Times
from kvferry.simulate.simulation import simulate
from kvferry.simulate.summary import report_of

FLEET = Fleet(4, 8, per_rack=4)


def courses(*incidents, warm_up_s=0.0):
    given = setting(FLEET, 60.0, incidents, times=Times(start_up_s=10.0, warm_up_s=warm_up_s))
    return report_of(run(given, rate=15.0)).courses


def test_an_incident_in_the_warm_up_has_nothing_to_be_compared_with():
    (course,) = courses("rack 1 dies from 5 to 20", warm_up_s=10.0)
    assert course.before.num_requests == 0
    assert course.recovery_s is None
    assert course.during.num_requests > 0
    assert course.during.ends_s == 20.0


def test_an_incident_within_one_that_is_not_over_has_nothing_to_be_compared_with():
    lasting, within = courses("link of rack 1 at 0.01% from 10", "hot prefix 40% from 40")
    assert lasting.recovery_s == math.inf
    assert within.before.num_requests == 0
    assert within.recovery_s is None
    assert within.during.ends_s == 60.0


@pytest.mark.parametrize("last_s", [39.5, 40.0, 58.0])
def test_a_fleet_that_is_dead_is_not_back_to_normal_where_no_request_comes_any_more(last_s):
    """Whose last windows are empty."""
    given = setting(Fleet(1, 1, per_rack=2), 60.0, ["rack 0 dies at 20"])
    report = report_of(simulate(given, [arrival(step / 2) for step in range(int(2 * last_s) + 1)]))
    (course,) = report.courses
    assert report.windows[-1].num_requests == 0
    assert course.during.num_failed == course.during.num_requests > 0
    assert course.recovery_s == math.inf
    assert course.during.ends_s == 60.0


def test_one_good_window_after_the_worse_ones_is_a_recovery_whatever_is_empty_then():
    given = setting(Fleet(1, 1, per_rack=2), 60.0, ["rack 0 dies from 20 to 25"])
    report = report_of(simulate(given, [arrival(float(at)) for at in range(50)]))
    (course,) = report.courses
    assert report.windows[-1].num_requests == 0
    assert 0 < course.recovery_s <= 25


def test_an_incident_after_the_last_request_has_nothing_to_be_compared_with():
    (course,) = report_of(simulate(setting(duration_s=60.0, incidents=["rack 0 dies at 40"]), [arrival(1.0)])).courses
    assert (course.before.num_requests, course.recovery_s) == (1, None)


def test_an_incident_that_does_nothing_changes_no_goodput():
    """However long answers take: those that are open when it begins are fewer before it, and no lower rate."""
    given = setting(FLEET, 120.0, ["link of rack 0 at 99% from 30 to 40"])
    report = report_of(run(given, rate=5.0, lengths=((400, 1200), (1000, 1001))))
    (course,) = report.courses
    assert course.recovery_s == 0.0
    assert course.before.num_requests < course.before.num_arrived
    for part in (course.before, course.during, course.after):
        arrived = [each for each in report.result.outcomes if part.begins_s <= each.arrived_s < part.ends_s]
        assert part.num_good == part.num_requests > 0
        assert part.goodput == len(arrived) / (part.ends_s - part.begins_s) > 0


@pytest.mark.parametrize(
    ("incidents", "words", "times"),
    [
        (["rack 0 dies from 20 to 25", "rack 1 dies from 20 to 25"], [(0, 1)], [(20.0, 25.0)]),
        (["rack 1 dies from 22 to 30", "rack 0 dies from 20 to 25"], [(1, 0)], [(20.0, 30.0)]),
        (["rack 0 dies from 20 to 30", "hot prefix 40% from 22 to 24"], [(0, 1)], [(20.0, 30.0)]),
        (["rack 0 dies at 20", "link of rack 1 at 50% from 20"], [(0, 1)], [(20.0, math.inf)]),
        (["rack 0 dies from 20 to 25", "rack 1 dies from 25 to 30"], [(0,), (1,)], [(20.0, 25.0), (25.0, 30.0)]),
    ],
)
def test_incidents_at_one_time_are_looked_at_together(incidents, words, times):
    found = courses(*incidents)
    assert [course.words for course in found] == ["; ".join(incidents[place] for place in each) for each in words]
    assert [(course.begins_s, course.ends_s) for course in found] == times
    assert all(course.during.num_requests > 0 for course in found)
    assert all(course.during.ends_s >= min(course.ends_s, 25.0) for course in found)


@pytest.mark.parametrize(
    "incidents",
    [["rack 1 dies from 5 to 20"], ["rack 1 dies from 2 to 4", "rack 0 dies from 5 to 8"], ["rack 1 dies at 5"]],
)
def test_what_happens_in_the_warm_up_counts_no_request_of_it(incidents):
    found = courses(*incidents, warm_up_s=30.0)
    for course in found:
        parts = course.before, course.during, course.after
        assert all(30.0 <= part.begins_s <= part.ends_s <= 60.0 for part in parts)
        assert course.recovery_s is None


@pytest.mark.parametrize("duration_s", [1.0, 2.1, 3.3, 20.0, 23.7, 60.0, 119.9])
def test_a_run_is_looked_at_as_often_whatever_its_length(duration_s):
    result = run(setting(FLEET, duration_s), rate=40.0)
    assert [each.at_s for each in result.samples] == [duration_s * number / 120 for number in range(1, 121)]
    assert 0 < result.busiest_uplink <= 1
    assert 0 < result.busiest_link <= 1


@pytest.mark.parametrize(("duration_s", "seed"), [(5.184, 325), (5.433, 326), (34.666, 376), (4.677, 377)])
def test_a_run_ends_no_rounding_before_the_last_look_at_it(duration_s, seed):
    """Whose requests have all ended before."""
    result = run(setting(FLEET, duration_s), rate=6.0 / duration_s, lengths=((10, 20), (1, 2)), seed=seed)
    assert len(result.samples) == 120
    assert result.busiest_link > 0


def test_links_are_busy_in_the_time_that_counts():
    """Ten caches of 80 MB take 80 ms of an empty link: eight in the warm-up, and two after it."""
    given = setting(Fleet(1, 1, per_rack=1), 20.0, times=Times(warm_up_s=10.0))
    arrivals = [arrival(float(at)) for at in (1, 2, 3, 4, 5, 6, 7, 8, 14, 16)]
    result = simulate(replace(given, wires=replace(WIRES, link_bytes_per_s=1e9)), arrivals)
    assert result.busiest_link == pytest.approx(2 * 0.08 / 10.0)
    assert result.busiest_uplink == pytest.approx(2 * 0.08 / 10.0)


def test_links_that_are_busy_after_the_end_are_not_busier_than_all_the_time():
    wires = replace(WIRES, link_bytes_per_s=1e7)
    result = simulate(setting(Fleet(1, 1, per_rack=1), 5.0, wires=wires), [arrival(0.0), arrival(0.0)])
    assert max(outcome.first_s for outcome in result.outcomes) > 10.0
    assert 0.9 < result.busiest_link <= 1.0
