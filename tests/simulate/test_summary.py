"""What a report says of incidents, and of what is busy."""

import math

from fleet_support import run, setting

from kvferry.simulate.settings import Fleet, Times
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
